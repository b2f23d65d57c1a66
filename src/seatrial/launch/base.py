"""The launcher: ``render`` a job (pure), then ``start`` it.

A new launcher is one file in this folder, and an entry in ``_launcher`` (__init__.py) and in the config's ``launcher``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from seatrial.config.schema import Config
from seatrial.launch import container
from seatrial.launch.collect import Collector
from seatrial.model import Frozen, Job, JobFailure, NodeShortage, SeatrialError
from seatrial.util.processes import CommandResult

TOKEN = "token"  # file in an attempt's folder with the attempt's random token, by which its job is found
# Seconds without an answer of the scheduler until a message is shown, and until the job counts as failed
OUTAGE_MESSAGE_S, OUTAGE_LIMIT_S = 10.0, 600.0


class RenderedJob(Frozen):
    """A job ready to start by ``argv``. ``text``: its script, or its command, as ``--dry-run`` prints it."""

    argv: tuple[str, ...]
    text: str
    nodes: int = 1


class WaitState(Frozen):
    """Why the ranks of a job cannot be watched now: it is pending, completing, or its state is unknown.

    ``reason`` is empty if it need not be shown. ``permanent``: waiting longer will not help. ``seconds``: how long the
    job has been in this state. ``pending``: the job has not started. ``shortage``: the missing nodes that keep the job
    pending; None if none are missing.
    """

    reason: str
    permanent: bool
    seconds: float = 0.0
    pending: bool = False
    shortage: NodeShortage | None = None
    failures: tuple[JobFailure, ...] = ()  # known causes why the job does not start


class JobRefused(SeatrialError):
    """The scheduler refused a job. ``failures``: known causes. ``transient``: it may accept the job a little later."""

    def __init__(self, message: str, failures: tuple[JobFailure, ...] = (), *, transient: bool = False) -> None:
        super().__init__(message)
        self.failures, self.transient = failures, transient


class Allocation(Frozen):
    """The scheduler's job id, nodes and container images of a job; empty without a scheduler.

    ``failures``: known causes why the job failed.
    """

    id: str = ""
    nodes: str = ""
    images: tuple[str, ...] = ()
    failures: tuple[JobFailure, ...] = ()


class StartedJob(ABC):
    """A started job; the methods that are not abstract are for a job without a scheduler."""

    @property
    def show_node_command(self) -> str:
        """The command that shows the state of a node; ``{node}`` stands for the node's name."""
        return "uptime"

    @property
    def unreadable_nodes(self) -> Collection[int]:
        """The indices of the nodes whose files cannot be read now; the checks may run on them nevertheless."""
        return ()

    def allocation(self) -> Allocation:
        """Return the scheduler's job id and nodes; empty while unknown."""
        return Allocation()

    def wait_state(self) -> WaitState | None:
        """Return why the ranks cannot be watched now; None if they can."""
        return None

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code of the job, or 1 if its files cannot be fetched; None while it runs or waits."""

    def exit_reason(self) -> str:
        """Return the scheduler's reason for the end of the job; empty if there is none."""
        return ""

    def completing_code(self) -> int | None:
        """Return the exit code of a job that has ended, even if its nodes are not free yet; else None."""
        return self.poll()

    def node_state(self, host: str) -> tuple[str, str]:
        """Return the scheduler's name of the node with this host name, and its state, which is empty if unknown."""
        return host, ""

    def node_is_free(self, name: str) -> bool:
        """Return whether this node is up and all processes of the cancelled job on it have ended; False if unknown."""
        del name
        return False

    @abstractmethod
    def run_on_nodes(self, script: str, attempt: Path, limit_s: float) -> CommandResult:
        """Run a bash script once on each node while the job runs; ``$0`` is the attempt's folder on the node.

        The code of the result is None if the script took longer than ``limit_s``. Raises OSError or SeatrialError if
        the script cannot start.
        """

    @abstractmethod
    def cancel(self, *, node_lost: bool = False) -> str:
        """End all processes of the job, even if the job has ended; return a message if some may still run, else empty.

        ``node_lost``: a node seems not to respond. Then no files are fetched, and the limit of the wait is shorter.
        """


@dataclass
class ScheduledJob(StartedJob):
    """A job that runs on while its scheduler does not answer. Times are of the monotonic clock.

    ``poll_s``: time between two queries.
    """

    poll_s: ClassVar[float]
    collector: Collector = field(init=False)
    _last_query: float = field(default=0.0, init=False)
    _last_response: float = field(default_factory=time.monotonic, init=False)
    _query_error: str = field(default="", init=False)  # of the last query; empty if the scheduler answered

    @abstractmethod
    def _read_state(self) -> None:
        """Query the state of the job. Raises SeatrialError or ValueError."""

    def _query(self, now: bool = False) -> None:
        """Query the state, at most once per ``poll_s`` unless ``now``."""
        if not now and time.monotonic() - self._last_query < self.poll_s:
            return
        try:
            self._read_state()
            self._query_error, self._last_response = "", time.monotonic()
        except (SeatrialError, ValueError) as error:
            self._query_error = str(error)
        self._last_query = time.monotonic()  # after the answer, which may take long

    def _outage(self, subject: str) -> WaitState | None:
        """Return the state of ``subject``, this job, if the outage of the scheduler is long enough for a message."""
        seconds = time.monotonic() - self._last_response
        if not self._query_error or seconds <= OUTAGE_MESSAGE_S:
            return None
        permanent = seconds > OUTAGE_LIMIT_S
        duration = f" for {seconds:.0f} s" if permanent else ""
        reason = f"the state of {subject} is unknown{duration}: {self._query_error}"
        return WaitState(reason=reason, permanent=permanent, seconds=seconds)

    def run_on_nodes(self, script: str, attempt: Path, limit_s: float) -> CommandResult:
        return self.collector.run_script(script, attempt, limit_s)


def token_files(run_dir: Path) -> Iterator[Path]:
    """Yield the files with tokens of all attempts; ``run_dir``: a run directory, or the folder of one attempt."""
    yield from run_dir.glob(TOKEN)
    yield from run_dir.rglob(f"attempt*/{TOKEN}")


class Launcher(ABC):
    """Starts ``seatrial.worker`` on the nodes of a job. ``runtimes``: those of containers that it supports."""

    name: str
    runtimes: tuple[str, ...] = ()

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def unavailable_reason(self) -> str | None:
        """Return why this launcher cannot start jobs of the trial; None if it can."""
        return container.unsupported_reason(self._settings, self.runtimes)

    def require_access(self) -> None:
        """Raise UsageError if jobs cannot be started from here: no client, permission or operator, or no slurm.conf."""
        return  # without a scheduler nothing is needed

    def node_shortage(self) -> NodeShortage | None:
        """Return the nodes that need an administrator or are reserved for others; None if enough other nodes are left.

        Raises SeatrialError if the scheduler cannot be queried.
        """
        return None

    def cancel_earlier_jobs(self, folder: Path) -> Iterator[str]:
        """Cancel the jobs that a killed run left in the scheduler, and wait for their end; yield a message before each.

        ``folder``: the run directory, or the folder of one attempt. A local job ends with the run that started it
        (``processes.die_with_parent``). Raises SeatrialError if the scheduler cannot be queried or a job cannot be
        cancelled, since files that it writes later would count as results of this run.
        """
        del folder
        yield from ()

    @abstractmethod
    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        """Return ``job`` ready to start. Pure."""

    @abstractmethod
    def start(self, rendered: RenderedJob, folder: Path) -> StartedJob:
        """Start a rendered job; its output goes to ``folder``. Raises SeatrialError, or OSError on a full disk.

        Can be called again after a transient JobRefused: it never starts the job twice.
        """
