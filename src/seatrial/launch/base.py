"""The launcher protocol: ``render`` a job (pure), then ``start`` it. A new launcher is one file in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from seatrial.model import Frozen, Job


class Rendered(Frozen):
    """The complete command of a job; ``--dry-run`` prints it, golden files test it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    text: str


class Waiting(Frozen):
    """Why the ranks of a job cannot be watched now: it is pending, completing, or its state is unknown.

    ``reason`` is empty if it need not be shown. ``permanent``: waiting longer will not help.
    """

    reason: str
    permanent: bool


class Allocation(Frozen):
    """The scheduler's job id and nodes of a job; both empty without a scheduler."""

    id: str = ""
    nodes: str = ""


class Running(Protocol):
    """A started job."""

    def allocation(self) -> Allocation:
        """Return the scheduler's job id and the nodes, as far as known."""

    def waiting(self) -> Waiting | None:
        """Return why the ranks cannot be watched now; None while the job runs."""

    def poll(self) -> int | None:
        """Return the exit code of the job; None until it has ended."""

    def exit_reason(self) -> str:
        """Return the scheduler's reason for the end of the job; empty if there is none."""

    def cancel(self) -> str:
        """End the job and all its processes, also after its end; return what still runs, empty if nothing does."""


class Launcher(Protocol):
    """Starts ``seatrial.worker`` on the nodes of a job."""

    name: str

    def available(self, nodes: int) -> str | None:
        """Return None if this launcher can start jobs on this number of nodes, else the reason."""

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> Rendered:
        """Return the complete command for ``job``. Pure."""

    def start(self, rendered: Rendered, folder: Path) -> Running:
        """Start a rendered job; its output goes to ``folder``. Raises SeatrialError, or OSError on a full disk."""
