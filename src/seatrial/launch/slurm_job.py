"""A Slurm job from its submission until its nodes are free again.

Slurm's controller is queried once a second. While it does not respond, for example during a restart, the job runs on.
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
from seatrial.launch.base import Allocation, WaitState
from seatrial.launch.collect import Collector
from seatrial.launch.collect_srun import SrunTransport
from seatrial.model import SeatrialError
from seatrial.util import processes
from seatrial.util.text import and_more

# Files in an attempt's folder. The token is a random argument of the script, by which its job is found again.
SCRIPT, TOKEN, JOB_ID = "job.sbatch", "token", "slurm_job_id"

_POLL_S = 1.0
# Seconds without a response from Slurm until a message is shown, and until the job counts as failed
_OUTAGE_MESSAGE_S, _OUTAGE_LIMIT_S = 10.0, 600.0
# Seconds in state COMPLETING until a message is shown, and until the job counts as ended. Slurm's defaults
# (slurm.conf(5)): KillWait 30 s, UnkillableStepTimeout 60 s; an Epilog adds to these.
_COMPLETING_MESSAGE_S, _COMPLETING_LIMIT_S = 5.0, 180.0
_CANCEL_LIMIT_S = 60.0  # from scancel to the end of the job; includes KillWait
_CLEANUP_LIMIT_S = 15.0  # from the fetch of all files until the script has removed them and ended


@dataclass
class SlurmJob:
    """A submitted Slurm job."""

    id: str
    settings: Config
    collector: Collector
    submitted: float = field(default_factory=time.monotonic)
    _last_query: float = 0.0
    _last_response: float = field(default_factory=time.monotonic)
    _query_error: str = ""  # of the last query
    _job: Job | None = None  # Slurm's last response
    _has_started: bool = False
    _completing_since: float = 0.0

    def poll(self) -> int | None:
        job = self._query()
        if job is None or job.pending:
            return None
        self.collector.fetch(job.nodes)
        stuck = self._completing_since and time.monotonic() - self._completing_since > _COMPLETING_LIMIT_S
        if not (_is_over(job) or stuck):
            return 1 if self.collector.problem() else None
        self.collector.close()
        succeeded = job.state == "COMPLETED" or (_is_completing(job) and not (job.exit_code or job.signal))
        return 0 if succeeded and self.collector.finished else job.exit_code or 1

    def wait_state(self) -> WaitState | None:
        job = self._query()
        outage_s = time.monotonic() - self._last_response
        if self._query_error and outage_s > _OUTAGE_MESSAGE_S:
            reason = f"the state of Slurm job {self.id} has been unknown for {outage_s:.0f} s: {self._query_error}"
            return WaitState(reason=reason, permanent=outage_s > _OUTAGE_LIMIT_S)
        if job is None or _is_over(job):
            return None
        if job.pending:
            if not self._has_started:
                return self._pending(job)
            # a second start would overwrite the measurements
            reason = f"Slurm job {self.id} was requeued after its start (reason: {job.reason or 'none'})"
            return WaitState(reason=f"{reason}. Run first: scontrol show job {self.id}; sinfo -R", permanent=True)
        if _is_completing(job):
            reason = f"Slurm job {self.id} is COMPLETING on {job.nodes or 'unknown nodes'}"
            late = time.monotonic() - self._completing_since > _COMPLETING_MESSAGE_S
            return WaitState(reason=reason if late else "", permanent=False)
        return None

    def _pending(self, job: Job) -> WaitState:
        waited_s = time.monotonic() - self.submitted
        reason = f"Slurm job {self.id} is {job.state}: {job.reason or 'no reason yet'}"
        permanent = is_permanent_pending_reason(job.reason)
        if not permanent and waited_s <= self.settings.slurm.queue_s:
            return WaitState(reason=reason, permanent=False)
        queue_s = self.settings.slurm.queue_s
        limit = "waiting will not help" if permanent else f"pending {waited_s:.0f} s, slurm.queue_s is {queue_s:g} s"
        details = [unavailable_nodes(self.settings), over_time_limit(job, self.settings)]
        sentences = [f"{reason}; {limit}", *details, f"Run first: {first_commands(self.id, job.reason)}"]
        return WaitState(reason=". ".join(filter(None, sentences)), permanent=True)

    def allocation(self) -> Allocation:
        return Allocation(id=self.id, nodes=(self._job.nodes if self._job else None) or "")

    def exit_reason(self) -> str:
        job = self._job
        if job is None:
            return ""
        sentences = [self.collector.missing_files()]
        if job.state != "COMPLETED":
            nodes = job.nodes or "no nodes"
            sentences += [f"Slurm job {self.id} on {nodes} is {job.state} (reason: {job.reason or 'none'})"]
        if job.reason == "JobLaunchFailure":
            scratch = self.settings.slurm.scratch  # slurmd opens the job's log there
            sentences += [
                f"slurmd could not start the script. Run first: srun ls -ld {scratch}; sinfo -R; "
                "on the node: journalctl -u slurmd"
            ]
        if job.state == "TIMEOUT":
            sentences += ["To request more time: --set slurm.time_min=MINUTES"]
        if job.state == "NODE_FAIL":
            sentences += [unavailable_nodes(self.settings), f"Run first: {first_commands(self.id, job.reason)}"]
        return ". ".join(filter(None, sentences))

    def cancel(self) -> str:
        job = self._query(now=True)
        if job is not None and _is_over(job):
            self.collector.close()
            return ""
        if job is not None and job.state == "RUNNING" and not self.collector.problem():
            self.collector.stop_ranks(job.nodes)
            if self.collector.fetched:
                job = self._wait_until_over(_CLEANUP_LIMIT_S, cancel=False)
                if job is not None and job.state == "RUNNING":
                    self.collector.remove_remote_files()
        self.collector.close()
        job = self._wait_until_over(_CANCEL_LIMIT_S, cancel=True)
        if job is not None and _is_over(job):
            return ""
        state = job.state if job else "in an unknown state"
        error = f" ({self._query_error})" if self._query_error else ""
        remaining = f"Slurm job {self.id} is still {state} {_CANCEL_LIMIT_S:g} s after scancel{error}"
        return f"{remaining}. Run first: scontrol show job {self.id}; sinfo -R"

    def _wait_until_over(self, seconds: float, *, cancel: bool) -> Job | None:
        """Wait until the job is over, at most ``seconds``, and return its state; retry a scancel that fails."""
        deadline = time.monotonic() + seconds
        while True:
            if cancel and processes.run_command(["scancel", self.id], timeout_s=30).code == 0:
                cancel = False
            job = self._query(now=True)
            if (job is not None and _is_over(job)) or time.monotonic() > deadline:
                return job
            time.sleep(0.2)

    def _query(self, now: bool = False) -> Job | None:
        """Return the job's state, queried at most once per ``_POLL_S`` unless ``now``."""
        if now or time.monotonic() - self._last_query > _POLL_S:
            try:
                self._job, self._query_error, self._last_response = slurm.job(self.id), "", time.monotonic()
            except (SeatrialError, ValueError) as error:
                self._query_error = str(error)
            self._last_query = time.monotonic()  # after the response, which may take long
            if self._job is not None:
                self._has_started = self._has_started or not self._job.pending
                if _is_completing(self._job):
                    self._completing_since = self._completing_since or time.monotonic()
        return self._job


def cancel_remaining_jobs(run_dir: Path, settings: Config) -> Iterator[str]:
    """Cancel the jobs that a killed run in this directory left, and wait for their end; yield a message before each.

    A job belongs to the run if its script or its token is in ``run_dir``. Raises SeatrialError
    if Slurm cannot be queried or a job cannot be cancelled, since files that the job writes later would count as
    results of this run.
    """
    folders = {token.read_text(encoding="utf-8"): token.parent for token in run_dir.rglob(f"attempt*/{TOKEN}")}
    if not folders:
        return
    for job_id, command in slurm.queued_job_scripts().items():
        for token, folder in folders.items():
            if command.endswith(f" {token}") or command == str(folder / SCRIPT):
                yield f"Slurm job {job_id} of an earlier run in {run_dir} has not ended: cancelling it"
                job = SlurmJob(job_id, settings, job_collector(job_id, settings, folder))
                if remaining := job.cancel():
                    raise SeatrialError(f"an earlier run may still write to {run_dir}: {remaining}")


def job_collector(job_id: str, settings: Config, folder: Path) -> Collector:
    """Return a collector that fetches the job's files from the nodes' scratch directory through srun."""
    return Collector(SrunTransport(job_id), f"{settings.slurm.scratch}/seatrial-{job_id}", folder)


def unavailable_nodes(settings: Config) -> str:
    """Return the number of usable nodes and the states of the others; empty if all are usable and enough."""
    try:
        nodes = slurm.nodes()
    except (SeatrialError, ValueError):
        return ""  # only additional information for a message
    config = settings.slurm
    nodes = tuple(node for node in nodes if config.partition is None or config.partition in node.partitions)
    unusable = [node for node in nodes if not node.usable or node.blocked_by_reservation(config.reservation)]
    usable = len(nodes) - len(unusable)
    if usable >= settings.cluster.nodes and not unusable:
        return ""
    states = and_more([f"{node.name} is {node}" for node in unusable], 8, "; ")
    partition = f" of partition {config.partition}" if config.partition else ""
    counts = f"{usable} of {len(nodes)} nodes{partition} are usable, the trial needs {settings.cluster.nodes}"
    return f"{counts}: {states}" if unusable else counts


def over_time_limit(job: Job, settings: Config) -> str:
    """Return a message if the job's time limit exceeds the partition's; empty if not, or if Slurm fails."""
    try:
        partition = slurm.partition_of_jobs(settings.slurm.partition)
    except (SeatrialError, ValueError):
        return ""  # only additional information for a message
    limit_s, requested_s = partition.max_time_s if partition else None, job.time_limit_s
    if partition and isinstance(limit_s, int) and isinstance(requested_s, int) and requested_s > limit_s:
        return f"partition {partition.name} allows {limit_s // 60} minutes, the job requests {requested_s // 60}"
    return ""


def _is_over(job: Job) -> bool:
    """Return whether the job has ended and its nodes are free, or Slurm has no state of it any more."""
    return job.ended or not job.has_state


def _is_completing(job: Job) -> bool:
    """Return whether the job has ended but its nodes are not free yet."""
    return job.state == "COMPLETING"
