"""Live progress on standard error: a status line that moves on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from seatrial.model import Job, Outcome
from seatrial.report.text import clean

STYLES = {
    Outcome.PASS: "green",
    Outcome.WARN: "yellow",
    Outcome.FAIL: "bold red",
    Outcome.ERROR: "magenta",
    Outcome.UNJUDGED: "cyan",
    Outcome.SKIP: "dim",
}


class Live:
    """What a person sees while a trial runs. A terminal that is gone, or a log that is full, ends no trial."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._status = Status("discover", console=console)
        self._words = ""
        self._heading = ""

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            with _whoever_looks():
                self._status.start()
        else:
            self._line("discover")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _whoever_looks():
            self._status.stop()

    def planned(self, jobs: tuple[Job, ...], run_dir: Path) -> None:
        self._line(f"run directory {run_dir}")
        for job in jobs:
            where = f"{job.nodes} × {job.ranks_per_node} processes" if job.placement == "ranks" else f"{job.nodes} × 1"
            names = ", ".join(job.checks)
            self._line(f"plan    job {job.name} ({where}, {job.device}, at most {_clock(job.limit_s)}): {names}")

    def job_started(self, job: Job, attempt: int) -> None:
        again = f", attempt {attempt}" if attempt > 1 else ""
        self._heading = f"job {job.name}{again}"
        self._line(f"start   {self._heading}")

    def retry_started(self, job: Job, reasons: Mapping[str, str]) -> None:
        for check in job.checks:
            self._line(f"again   {check} in job {job.name}, since one measurement alone is no proof: {reasons[check]}")

    def current_check(self, words: str) -> None:
        """Called many times a second; says something new only when there is something new."""
        if self._console.is_terminal:
            elapsed = _clock(time.monotonic() - self._begun)
            with _whoever_looks():
                self._status.update(f"{elapsed}  {self._heading}: {escape(clean(words))}")
        elif words not in (self._words, "starting", "closing"):
            self._line(words if words.startswith("waiting") else f"running {words}")
            self._words = words

    def judged(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None:
        why = "" if outcome is Outcome.PASS else f": {reason}"
        style = STYLES[outcome]
        text = f"[{style}]{outcome:<8}[/] {escape(check)} ({seconds:.1f} s){escape(clean(why))}"
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"[bold red]{escape(clean(text))}[/]")

    def _line(self, text: str) -> None:
        self._print(escape(clean(text)))

    def _print(self, markup: str) -> None:
        with _whoever_looks():
            self._console.print(self._stamp() + markup, soft_wrap=True, highlight=False)

    def _stamp(self) -> str:
        return f"{_clock(time.monotonic() - self._begun)}  "


def _whoever_looks() -> AbstractContextManager[None]:
    """For writing to standard error, which says nothing that the record does not hold."""
    return contextlib.suppress(OSError)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
