"""What a launcher is: it renders a job, purely, and starts what it rendered. Adding one is one file in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from seatrial.model import Frozen, Job


class Rendered(Frozen):
    """All that a launcher will do, before it does it: what ``--dry-run`` prints and golden tests hold."""

    argv: tuple[str, ...]
    env: dict[str, str]
    text: str


class Waiting(Frozen):
    """Why there is nothing to watch: a job has not begun, or nobody knows how it goes. Longer may be hopeless.

    ``reason`` is empty while it is not worth a word.
    """

    reason: str
    hopeless: bool


class Allocation(Frozen):
    """What a scheduler calls a job, and the nodes it gave it; both empty without one."""

    id: str = ""
    nodes: str = ""


class Running(Protocol):
    """A started job."""

    def allocation(self) -> Allocation:
        """Its number in the queue and its nodes, as far as they are known."""

    def waiting(self) -> Waiting | None:
        """Why the job has not begun yet, or is not to be seen; None while it runs."""

    def poll(self) -> int | None:
        """The exit code once the job has ended, None before."""

    def exit_reason(self) -> str:
        """What the scheduler says of the end of the job; empty where there is none, or nothing to say."""

    def cancel(self) -> str:
        """End the job and everything it started; safe to call when it has ended. Says what could not be ended."""


class Launcher(Protocol):
    """Starts ``seatrial.worker`` on the nodes of a job."""

    name: str

    def available(self, nodes: int) -> str | None:
        """None when this launcher can start jobs on so many nodes from here, else the reason."""

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> Rendered:
        """What would be started for ``job``. Pure."""

    def start(self, rendered: Rendered, folder: Path) -> Running:
        """Start it; its output goes to ``folder``. Raises SeatrialError when it is refused, OSError on a full disk."""
