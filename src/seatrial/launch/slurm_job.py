"""A job in Slurm's queue, from its submission to the moment at which nothing of it is left.

Slurm is asked once a second: a controller has more to do than to answer us. One that does not answer for a while, as
while it is restarted, ends nothing: the job goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.config.schema import Config
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Job
from seatrial.discover.slurm_messages import first_commands, is_permanent_pending_reason
from seatrial.launch.base import Allocation, Waiting
from seatrial.launch.collect import Collector
from seatrial.launch.collect_srun import SrunTransport
from seatrial.model import SeatrialError
from seatrial.util import processes
from seatrial.util.text import and_more

SCRIPT, TOKEN, JOB_ID = "job.sbatch", "token", "slurm_job_id"  # what lies in an attempt's folder

_ASK_EVERY_S = 1.0
# Without an answer for so long a person is told, and after so long it is given up: nobody knows any more what runs.
_OUTAGE_TOLD_S, _OUTAGE_S = 10.0, 600.0
# Between a job's end and the moment its nodes are free: KillWait is 30 s, UnkillableStepTimeout 60 s by default
# (slurm.conf(5)), and an Epilog comes on top. What takes longer will not end by itself.
_COMPLETING_TOLD_S, _COMPLETING_S = 5.0, 180.0
_GONE_S = 60.0  # after scancel; KillWait again


@dataclass
class SlurmJob:
    """A submitted job, as seatrial sees it."""

    id: str
    settings: Config
    collector: Collector
    submitted: float = field(default_factory=time.monotonic)
    _asked: float = 0.0
    _answered: float = field(default_factory=time.monotonic)
    _trouble: str = ""  # why Slurm's last answer was none
    _last: Job | None = None
    _begun: bool = False
    _ended: float = 0.0  # when it was first seen to be completing

    def poll(self) -> int | None:
        job = self._look()
        if job is None or job.pending:
            return None
        self.collector.fetch(job.nodes)
        if not (_is_over(job) or (self._ended and time.monotonic() - self._ended > _COMPLETING_S)):
            return 1 if self.collector.problem() else None
        self.collector.close()
        fine = job.state == "COMPLETED" or (_is_completing(job) and not (job.exit_code or job.signal))
        return 0 if fine and self.collector.finished else job.exit_code or 1

    def waiting(self) -> Waiting | None:
        job = self._look()
        outage_s = time.monotonic() - self._answered
        if self._trouble and outage_s > _OUTAGE_TOLD_S:
            told = f"Slurm no longer says what has become of job {self.id}: {self._trouble}"
            return Waiting(reason=told, hopeless=outage_s > _OUTAGE_S)
        if job is None or _is_over(job):
            return None
        if job.pending:
            if not self._begun:
                return self._in_the_queue(job)
            # begun again it would write over what it has measured
            told = f"job {self.id} had begun, and was put back into the queue ({job.reason or 'no reason given'})"
            return Waiting(reason=f"{told}. Run first: scontrol show job {self.id}; sinfo -R", hopeless=True)
        if _is_completing(job):
            told = f"job {self.id} has ended, and Slurm still clears up on {job.nodes or 'its nodes'}"
            late = time.monotonic() - self._ended > _COMPLETING_TOLD_S
            return Waiting(reason=told if late else "", hopeless=False)
        return None

    def _in_the_queue(self, job: Job) -> Waiting:
        waited = time.monotonic() - self.submitted
        reason = f"job {self.id} is {job.state}: {job.reason or 'Slurm has given no reason yet'}"
        hopeless = is_permanent_pending_reason(job.reason)
        if not hopeless and waited <= self.settings.slurm.queue_s:
            return Waiting(reason=reason, hopeless=False)
        why = "waiting will not help" if hopeless else f"after {waited:.0f} s (slurm.queue_s)"
        facts = [unavailable_nodes(self.settings), over_time_limit(job, self.settings)]
        told = [f"{reason}; {why}", *facts, f"Run first: {first_commands(self.id, job.reason)}"]
        return Waiting(reason=". ".join(filter(None, told)), hopeless=True)

    def allocation(self) -> Allocation:
        return Allocation(id=self.id, nodes=(self._last.nodes if self._last else None) or "")

    def exit_reason(self) -> str:
        job = self._last
        if job is None:
            return ""
        said = f"Slurm says that job {self.id} on {job.nodes or 'no node'} is {job.state}: {job.reason or 'no reason'}"
        first = f"Run first: {first_commands(self.id, job.reason)}"
        nodes = ". ".join(filter(None, [unavailable_nodes(self.settings), first])) if job.state == "NODE_FAIL" else ""
        scratch = self.settings.slurm.scratch  # where Slurm itself opens the log
        launch = f"slurmd could not start its script. Run first: srun ls -ld {scratch}; sinfo -R; journalctl -u slurmd"
        launch = launch if job.reason == "JobLaunchFailure" else ""
        told = [self.collector.lost(), said if job.state != "COMPLETED" else "", launch, nodes]
        return ". ".join(filter(None, told))

    def cancel(self) -> str:
        job = self._look(now=True)
        if job is not None and _is_over(job):
            self.collector.close()
            return ""
        if job is not None and job.state == "RUNNING" and not self.collector.problem():
            self.collector.stop_ranks(job.nodes)
            if self.collector.fetched:
                over = self._until_over(15, cancel=False)  # it ends by itself now, and tidies up on its nodes
                if over is not None and over.state == "RUNNING":
                    self.collector.remove_remote_files()
        self.collector.close()
        job = self._until_over(_GONE_S, cancel=True)
        if job is not None and _is_over(job):
            return ""
        state, why = job.state if job else "perhaps there", f" ({self._trouble})" if self._trouble else ""
        told = f"Slurm job {self.id} is still {state} a minute after scancel{why}"
        return f"{told}. Run first: scontrol show job {self.id}; sinfo -R"

    def _until_over(self, seconds: float, *, cancel: bool) -> Job | None:
        """What Slurm says of the job when it is over, or when the time is up. A scancel that fails is tried again."""
        deadline = time.monotonic() + seconds
        while True:
            if cancel and processes.run_command(["scancel", self.id], timeout_s=30).code == 0:
                cancel = False
            job = self._look(now=True)
            if (job is not None and _is_over(job)) or time.monotonic() > deadline:
                return job
            time.sleep(0.2)

    def _look(self, now: bool = False) -> Job | None:
        """What Slurm says, or what it said last. The second counts from its answer, which may take its time."""
        if now or time.monotonic() - self._asked > _ASK_EVERY_S:
            try:
                self._last, self._trouble, self._answered = slurm.job(self.id), "", time.monotonic()
            except (SeatrialError, ValueError) as error:
                self._trouble = str(error)
            self._asked = time.monotonic()
            if self._last is not None:
                self._begun = self._begun or not self._last.pending
                self._ended = self._ended or (time.monotonic() if _is_completing(self._last) else 0.0)
        return self._last


def cancel_remaining_jobs(run_dir: Path, settings: Config) -> Iterator[str]:
    """End the jobs that a run in this directory, which was killed, has left in the queue: a word before each.

    When this is at its end, they are gone. Ours is whose script lies in this directory, or was given the token that we
    wrote beside it. Raises SeatrialError where Slurm cannot be asked, or such a job cannot be ended: what it writes
    later would count as measured by us.
    """
    folders = {token.read_text(encoding="utf-8"): token.parent for token in run_dir.rglob(f"attempt*/{TOKEN}")}
    if not folders:
        return
    for job_id, command in slurm.queued_job_scripts().items():
        for token, folder in folders.items():
            if command.endswith(f" {token}") or command == str(folder / SCRIPT):
                yield f"job {job_id} of an earlier run here is still in Slurm's queue: it is cancelled"
                job = SlurmJob(job_id, settings, job_collector(job_id, settings, folder))
                if left := job.cancel():
                    raise SeatrialError(f"what an earlier run here left may still write here: {left}")


def job_collector(job_id: str, settings: Config, folder: Path) -> Collector:
    return Collector(SrunTransport(job_id), f"{settings.slurm.scratch}/seatrial-{job_id}", folder)


def unavailable_nodes(settings: Config) -> str:
    """How many nodes can take our jobs, and what is wrong with the others; empty where they suffice, or are unknown."""
    try:
        nodes = slurm.nodes()
    except (SeatrialError, ValueError):
        return ""  # the reason beside which this would stand has been told
    wanted = settings.slurm
    nodes = tuple(node for node in nodes if wanted.partition is None or wanted.partition in node.partitions)
    out = [node for node in nodes if not node.usable or node.blocked_by_reservation(wanted.reservation)]
    able = len(nodes) - len(out)
    if able >= settings.cluster.nodes and not out:
        return ""
    those = and_more([f"{node.name} is {node}" for node in out], 8, "; ")
    whose = f" of partition {wanted.partition}" if wanted.partition else ""
    asked = f"{able} of {len(nodes)} nodes{whose} can take jobs, {settings.cluster.nodes} are asked for"
    return f"{asked}: {those}" if out else asked


def over_time_limit(job: Job, settings: Config) -> str:
    """Whether more time is asked for than the partition gives; empty where not, or where nobody knows."""
    try:
        found = slurm.partitions()
    except (SeatrialError, ValueError):
        return ""  # as above
    name = settings.slurm.partition
    for partition in found:
        ours = partition.name == name if name else partition.default
        most, asked = partition.max_time_s, job.time_limit_s
        if ours and isinstance(most, int) and isinstance(asked, int) and asked > most:
            return f"partition {partition.name} gives a job {most // 60} minutes, {asked // 60} are asked for"
    return ""


def _is_over(job: Job) -> bool:
    """Nothing is left of it, on its nodes either; of a job that Slurm has forgotten there is nothing."""
    return job.ended or not job.has_state


def _is_completing(job: Job) -> bool:
    """It has ended; its nodes are not free yet."""
    return job.state == "COMPLETING"
