"""A Slurm job from its submission until its nodes are free again.

Slurm's controller is queried once a second. While it does not respond, for example during a restart, the job runs on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.config.schema import Config
from seatrial.config.slurm_options import srun_command
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import JobRecord
from seatrial.discover.slurm_messages import first_commands
from seatrial.discover.slurm_nodes import PendingJob, candidate_nodes, node_state
from seatrial.launch.base import Allocation, ScheduledJob, WaitState
from seatrial.launch.collect import Collector
from seatrial.launch.collect_srun import SrunTransport
from seatrial.model import SeatrialError
from seatrial.util import processes

# Files in an attempt's folder. The token is an argument of the script
SCRIPT, JOB_ID = "job.sbatch", "slurm_job_id"

# Seconds in state COMPLETING until a message is shown, and until the job counts as ended. Slurm's defaults
# (slurm.conf(5)): KillWait 30 s, UnkillableStepTimeout 60 s; an Epilog adds to these.
_COMPLETING_MESSAGE_S, _COMPLETING_LIMIT_S = 5.0, 180.0
_CANCEL_LIMIT_S = 60.0  # from scancel to the end of the job; includes KillWait
# The same if a node seems lost: Slurm ends such a job only after SlurmdTimeout (300 s by default)
_LOST_NODE_LIMIT_S = 12.0
_CLEANUP_LIMIT_S = 15.0  # from the fetch of all files until the script has removed them and ended


@dataclass
class SlurmJob(ScheduledJob):
    """A submitted Slurm job. ``folder``: the attempt's folder."""

    poll_s = 1.0
    id: str
    settings: Config
    folder: Path
    submitted: float = field(default_factory=time.monotonic)
    show_node_command: str = "scontrol show node {node}"
    _job: JobRecord | None = None  # Slurm's last response
    _has_started: bool = False
    _allocated: str = ""  # all nodes of the job, in Slurm's notation; empty before its start
    _completing_since: float = 0.0  # 0: not COMPLETING yet
    _completing_nodes: str = ""  # the nodes of the job when the message on COMPLETING was first shown
    _pending_job: PendingJob = field(init=False)

    def __post_init__(self) -> None:
        slurm_settings = self.settings.slurm
        self._pending_job = PendingJob(slurm_settings)
        transport = SrunTransport(self.id, slurm_settings)
        self.collector = Collector(transport, f"{slurm_settings.scratch}/seatrial-{self.id}", self.folder)

    def poll(self) -> int | None:
        job = self._queried()
        if job is None or job.pending:
            return None
        self.collector.fetch(job.nodes)
        stuck = self._completing_since and time.monotonic() - self._completing_since > _COMPLETING_LIMIT_S
        if not (_is_over(job) or stuck):
            return 1 if self.collector.problem() else None
        self.collector.close()
        return self._exit_code(job)

    def completing_code(self) -> int | None:
        job = self._job
        return self._exit_code(job) if job is not None and (_is_over(job) or _is_completing(job)) else None

    def _exit_code(self, job: JobRecord) -> int:
        succeeded = job.state == "COMPLETED" or (_is_completing(job) and not (job.exit_code or job.signal))
        return 0 if succeeded and self.collector.finished else job.exit_code or 1

    def wait_state(self) -> WaitState | None:
        job = self._queried()
        if outage := self._outage(f"Slurm job {self.id}"):
            return outage
        if job is None or _is_over(job):
            return None
        if job.pending:
            if not self._has_started:
                return self._pending(job)
            # a second start would overwrite the measurements
            reason = f"Slurm job {self.id} was requeued after its start (reason: {job.reason or 'none'})"
            return WaitState(reason=f"{reason}. Run first: scontrol show job {self.id}; sinfo -R", permanent=True)
        if job.state in ("SUSPENDED", "STOPPED"):  # its ranks are silent, although they and their nodes are healthy
            preemption = "by an administrator, or by the preemption of another job"
            commands = f"scontrol show job {self.id}; scontrol show config | grep -i Preempt"
            reason = f"Slurm job {self.id} is {job.state}, {preemption}. Run first: {commands}"
            return WaitState(reason=reason, permanent=True)
        if _is_completing(job):
            seconds = time.monotonic() - self._completing_since
            if seconds <= _COMPLETING_MESSAGE_S:
                return WaitState(reason="", permanent=False)
            self._completing_nodes = self._completing_nodes or job.nodes or "unknown nodes"
            reason = f"Slurm job {self.id} is COMPLETING on {self._completing_nodes}"
            return WaitState(reason=reason, permanent=False, seconds=seconds)
        return None

    def _pending(self, job: JobRecord) -> WaitState:
        waited_s, needed = time.monotonic() - self.submitted, job.node_count or self.settings.cluster.nodes
        permanent = self._pending_job.never_starts(job, waited_s, needed)
        candidates, shortage = self._pending_job.candidates, self._pending_job.shortage
        queue_s = self.settings.slurm.queue_s
        if not permanent and waited_s <= queue_s:
            reason = self._pending_job.reason(job, needed)
            return WaitState(reason=f"Slurm job {self.id} is {job.state} ({reason})", permanent=False, seconds=waited_s)
        limit = "waiting will not help" if permanent else f"pending {waited_s:.0f} s, slurm.queue_s is {queue_s:g} s"
        sentences = [
            f"Slurm job {self.id} is {job.state}: {job.reason or 'no reason yet'}; {limit}",
            candidates.message(needed) if candidates else unavailable_nodes(self.settings),
            over_time_limit(job, self.settings),
            f"To test the others: --min-nodes {shortage.usable}" if shortage and shortage.usable else "",
            f"Run first: {first_commands(self.id, job.reason)}",
        ]
        reason = ". ".join(filter(None, sentences))
        return WaitState(reason=reason, permanent=True, seconds=waited_s, pending=True, shortage=shortage)

    def allocation(self) -> Allocation:
        return Allocation(id=self.id, nodes=self._allocated)

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
            srun = srun_command(self.settings.slurm, job.nodes)
            sentences += [
                f"slurmd could not start the script. Run first: {srun} ls -ld {scratch}; sinfo -R; "
                "on the node: journalctl -u slurmd"
            ]
        if job.state == "TIMEOUT":
            sentences += ["To request more time: --set slurm.time_min=MINUTES"]
        if job.state == "NODE_FAIL":
            sentences += [unavailable_nodes(self.settings), f"Run first: {first_commands(self.id, job.reason)}"]
        return ". ".join(filter(None, sentences))

    def node_state(self, host: str) -> tuple[str, str]:
        return node_state(host)

    def node_is_free(self, name: str) -> bool:
        try:
            node = slurm.node(name)
        except (SeatrialError, ValueError):
            return False
        return node is not None and node.up and "COMPLETING" not in node.states

    def cancel(self, *, node_lost: bool = False) -> str:
        job = self._queried(now=True)
        if job is not None and _is_over(job):
            self.collector.close()
            return ""
        if job is not None and job.state == "RUNNING" and not node_lost and not self.collector.problem():
            self.collector.stop_ranks(job.nodes)
            if self.collector.fetched:
                job = self._wait_until_over(_CLEANUP_LIMIT_S, cancel=False)
                if job is not None and job.state == "RUNNING":
                    self.collector.remove_remote_files()
        self.collector.close()
        if node_lost:  # SIGKILL, so that all other nodes end their processes at once
            processes.run_command(["scancel", "--signal=KILL", self.id], timeout_s=30)
        limit_s = _LOST_NODE_LIMIT_S if node_lost else _CANCEL_LIMIT_S
        job = self._wait_until_over(limit_s, cancel=True)
        if job is not None and (_is_over(job) or (node_lost and _is_completing(job))):
            return ""
        state = job.state if job else "in an unknown state"
        error = f" ({self._query_error})" if self._query_error else ""
        remaining = f"Slurm job {self.id} is still {state} {limit_s:g} s after scancel{error}"
        return f"{remaining}. Run first: scontrol show job {self.id}; sinfo -R"

    def _wait_until_over(self, seconds: float, *, cancel: bool) -> JobRecord | None:
        """Wait until the job is over, at most ``seconds``, and return its last record.

        ``cancel``: call scancel first, and repeat the call until it succeeds.
        """
        deadline, must_cancel = time.monotonic() + seconds, cancel
        while True:
            if must_cancel and processes.run_command(["scancel", self.id], timeout_s=30).code == 0:
                must_cancel = False
            job = self._queried(now=True)
            if (job is not None and _is_over(job)) or time.monotonic() > deadline:
                return job
            time.sleep(0.2)

    def _queried(self, now: bool = False) -> JobRecord | None:
        """Return Slurm's last record of the job, after a query (see ``_query``)."""
        self._query(now)
        return self._job

    def _read_state(self) -> None:
        self._job = job = slurm.job(self.id)
        self._has_started = self._has_started or not job.pending
        # keep the first list: for a COMPLETING job, Slurm lists only nodes that are not free yet
        self._allocated = self._allocated or job.nodes
        if _is_completing(job):
            self._completing_since = self._completing_since or time.monotonic()


def unavailable_nodes(settings: Config) -> str:
    """Return the number of usable nodes and the states of the others.

    Empty if all nodes are usable and enough, or if Slurm cannot be queried.
    """
    try:
        return candidate_nodes(settings.slurm).message(settings.cluster.nodes)
    except (SeatrialError, ValueError):
        return ""  # only additional information for a message


def over_time_limit(job: JobRecord, settings: Config) -> str:
    """Return a message if the job's time limit exceeds the partition's; empty if not, or if Slurm fails."""
    try:
        partition = slurm.partition_of_jobs(settings.slurm.partition)
    except (SeatrialError, ValueError):
        return ""  # only additional information for a message
    limit_s, requested_s = partition.max_time_s if partition else None, job.time_limit_s
    if partition and isinstance(limit_s, int) and isinstance(requested_s, int) and requested_s > limit_s:
        return f"partition {partition.name} allows {limit_s // 60} minutes, the job requests {requested_s // 60}"
    return ""


def _is_over(job: JobRecord) -> bool:
    """Return whether the job has ended and its nodes are free, or Slurm has no state of it any more."""
    return job.ended or not job.has_state


def _is_completing(job: JobRecord) -> bool:
    """Return whether the job has ended but its nodes are not free yet."""
    return job.state == "COMPLETING"
