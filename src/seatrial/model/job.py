"""A job, its result, and the machine of a trial."""

import re
from enum import StrEnum
from typing import Literal

from pydantic import (
    Field,
    JsonValue,
)

from seatrial.model.base import Count, Frozen, Number, RetryNumber, Seconds
from seatrial.model.topology import Topology
from seatrial.util.secrets import redacted, secret_values

# The time that seatrial requests from a scheduler: this multiple of the typical duration on H200, and at least
# MIN_REQUEST_S. Hardware may be several times slower, and a job that ends early costs nothing.
REQUEST_FACTOR, MIN_REQUEST_S = 4.0, 600.0
# The first command after "Run first" in a message; a semicolon outside quotes ends it
_FIRST_COMMAND = re.compile(r"\. Run first[^:;]{0,40}: ((?:'[^']*'|[^;'])+)")


class Preflight(Frozen):
    """The requirements of a node. ``bench.preflight`` tests them before all checks, in the workers' environment."""

    version: str = Field(description="of the seatrial that started the trial")
    torch: bool = Field(description="a check uses torch")
    gpus: Count = Field(description="GPUs per node that torch must be able to use")
    hf_cache: bool = Field(description="HF_HOME, if it is set, must be writable: the trial trains models")


class Job(Frozen):
    """A set of processes that run several checks; the complete input of a worker."""

    name: str
    placement: Literal["control", "nodes", "ranks"]  # one process on this host, one per node, or one per GPU
    device: Literal["cuda", "cpu"]
    nodes: Count
    ranks_per_node: Count
    checks: tuple[str, ...]
    options: dict[str, dict[str, JsonValue]]
    expected_gpus: Count | None  # per node
    expected_nodes: Count = 1  # of the trial; ``nodes`` is 1 for a control job
    nodelist: str = Field(default="", description="nodes of the previous jobs, in the scheduler's notation")
    topology: Topology | None = Field(default=None, description="switches and racks of the nodes, for jobs of ranks")
    exclude: str = Field(default="", description="nodes that earlier jobs lost, separated by commas")
    limits: dict[str, Seconds] = Field(default={}, description="time limit of each check in seconds")
    limit_s: Seconds = Field(description="time limit of the job in seconds: its start, and the limits of its checks")
    typical: dict[str, Seconds] = Field(default={}, description="typical seconds of each check; without unknown ones")
    start_s: Seconds = Field(default=0, description="typical seconds of the start and end of the job")
    network_gbps: Number | None = Field(
        default=None, description="Gbit/s of a node on the TCP network of the trial, for jobs of GPUs on several nodes"
    )
    left_out: dict[str, str] = Field(
        default={}, description="check → why it omits some default sizes: the network is too slow for them"
    )
    env: dict[str, str] = {}
    retry: RetryNumber = Field(default=0, description="0: first measurement; 1, 2: retries of checks with bad values")
    telemetry_hz: Number = Field(default=0, description="telemetry samples per second on each node; 0: none")
    preflight: Preflight | None = Field(default=None, description="None: an earlier job has tested these nodes")

    @property
    def retry_suffix(self) -> str:
        """The suffix of the names of jobs and directories: empty, ``-retry`` or ``-retry2``."""
        return {0: "", 1: "-retry"}.get(self.retry, f"-retry{self.retry}")

    @property
    def process_count(self) -> int:
        """The number of processes on all nodes; each returns one measurement per check."""
        return self.nodes * self.ranks_per_node

    def on_fewer_nodes(self, nodes: int) -> "Job":
        """The job for this number of nodes, chosen by the scheduler; its name differs from that of the planned job."""
        changes = {"name": f"{self.name}-on{nodes}", "nodes": nodes, "expected_nodes": nodes, "nodelist": ""}
        return self.model_copy(update={**changes, "left_out": self.left_out if nodes > 1 else {}})

    @property
    def expected_s(self) -> float:
        """The typical duration in seconds; a check of unknown duration counts with its time limit."""
        return self.start_s + sum(self.typical.get(name, self.limits.get(name, 0.0)) for name in self.checks)

    @property
    def requested_s(self) -> float:
        """The seconds to request from a scheduler; ``limit_s`` is longer, since it is meant for hangs."""
        startup_s = self.limit_s - sum(self.limits.values())
        # a second attempt runs fewer checks, but keeps all limits
        limits = [(name, self.limits[name]) for name in self.checks if name in self.limits]
        seconds = sum(min(limit_s, REQUEST_FACTOR * self.typical.get(name, limit_s)) for name, limit_s in limits)
        return min(self.limit_s, max(MIN_REQUEST_S, startup_s + seconds))

    def with_checks(self, names: tuple[str, ...]) -> "Job":
        """The job with some of its checks and their time limits."""
        limits = {name: self.limits[name] for name in names}
        changes = {
            "checks": names,
            "limits": limits,
            "limit_s": self.limit_s - sum(self.limits.values()) + sum(limits.values()),
            "typical": {name: self.typical[name] for name in names if name in self.typical},
            "left_out": {name: self.left_out[name] for name in names if name in self.left_out},
        }
        return self.model_copy(update=changes)

    def without_secrets(self) -> "Job":
        """The job for display: its secrets, and those of this process's environment, are replaced."""
        document = self.model_dump()
        return Job.model_validate(redacted(document, secret_values(document)))


class MissingNode(Frozen):
    """An expected node that did not run the jobs; ``state``: the scheduler's state, or how the node was lost."""

    name: str
    state: str

    def __str__(self) -> str:
        return f"{self.name} ({self.state})"


class NodeShortage(Frozen):
    """Too few nodes for a job. ``missing``: nodes that are lost, need an administrator or are reserved for others.

    ``usable``: the number of the remaining nodes. The trial runs on these nodes if cluster.min_nodes
    is set and at most ``usable``.
    """

    usable: Count
    missing: tuple[MissingNode, ...]


class JobState(StrEnum):
    """How a job ended."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"  # a process exited with an error or was killed
    HUNG = "HUNG"  # the heartbeat of a process stopped, or a process remained after the end of the job
    TIMEOUT = "TIMEOUT"  # still running at its time limit
    CANCELLED = "CANCELLED"  # by Ctrl-C or another stop signal to seatrial
    REFUSED = "REFUSED"  # a node does not meet the requirements of the trial; no check of the job started
    REJECTED = "REJECTED"  # the scheduler rejected the job, or would never start it; no check of the job started


class JobFailure(Frozen):
    """A known cause why a job did not start or failed. ``cause``: its id in data/causes.

    ``nodes``: the nodes on which it failed; empty if unknown. ``name``: the object at fault, such as the image.
    ``message``: the text of the scheduler.
    """

    cause: str
    name: str = ""
    message: str
    nodes: tuple[str, ...] = ()
    first_command: str


class JobResult(Frozen):
    """The result of one attempt at a job; ``failed_subject`` is the rank or node at fault, ``cause`` the reason."""

    job: str
    attempt: Count
    launcher: str
    state: JobState
    started: Seconds
    seconds: Seconds
    startup_s: Seconds
    failed_subject: str = ""
    cause: str = ""
    scheduler_id: str = Field(default="", description="job id of the scheduler")
    nodelist: str = Field(default="", description="nodes it ran on, in the scheduler's notation: n[1-4]")
    images: tuple[str, ...] = Field(default=(), description="images that its pods ran, by digest, from Kubernetes")
    missing_nodes: tuple[MissingNode, ...] = Field(default=(), description="nodes that it could not get, or lost")
    failures: tuple[JobFailure, ...] = Field(default=(), description="known causes why it did not start, or failed")

    @property
    def refused(self) -> bool:
        """Whether nodes or the scheduler refused the job, so that none of its checks was started."""
        return self.state in (JobState.REFUSED, JobState.REJECTED)

    @property
    def cause_without_command(self) -> str:
        """The cause up to the first command to run."""
        return self.cause.partition(". Run first")[0]

    @property
    def first_command(self) -> str:
        """The first command to run that the cause names; empty if it names none."""
        command = _FIRST_COMMAND.search(self.cause)
        return command[1].strip() if command else ""


class Machine(Frozen):
    """The machine that a trial measures, recorded to detect that a resumed trial runs on another one."""

    host: str = Field(description="host name; empty if a scheduler chooses the nodes")
    gpus: tuple[str, ...] = Field(description="UUIDs of the usable GPUs")
    versions: tuple[str, ...] = Field(
        default=(), description="versions of kernel, driver, torch and seatrial; without GPUs also the machine id"
    )
