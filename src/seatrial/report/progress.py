"""Live progress on standard error: a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from seatrial.checks import catalog
from seatrial.model import Job, Outcome
from seatrial.report.plan_text import plan_lines
from seatrial.report.tables import STYLES
from seatrial.report.text import clean
from seatrial.util.text import and_more, plural

# If the typical durations of the finished checks sum to more than this, the remaining time is scaled by the ratio of
# their measured to their typical duration
MIN_TYPICAL_DONE_S = 10.0
SECONDS_BELOW_S = 90.0  # an estimate below this is shown in seconds, rounded up to tens
LATE_S = 10.0  # a check that exceeds its typical duration by more than this takes "longer than expected"
HEARTBEAT_S = 30.0  # a log gets a line with the current step if it got no line for this time
WAITING_LINE_S = 60.0  # seconds between log lines about the same state of the scheduler

_MAX_NAMED = 4  # checks listed in one line
_errors_ignored = partial(contextlib.suppress, OSError)  # of standard error: the record has the same information


class Live:
    """Prints the progress of a trial. A closed terminal or a full log file does not end the trial."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._started = self._last_line = clock()
        self._status = Status("discover", console=console)
        self._heading = ""  # the job and its attempt
        self._printed_waits: dict[str, float] = {}  # state → seconds waited when its line was printed
        self._last_outcome: tuple[str, Outcome, str] | None = None
        self._remaining = Remaining()

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            with _errors_ignored():
                self._status.start()
        else:
            self._line("discover")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _errors_ignored():
            self._status.stop()

    def show_plan(
        self,
        jobs: tuple[Job, ...],
        run_dir: Path,
        excluded_checks: Mapping[str, str],
        not_run: Sequence[str],
        *,
        as_root: bool,
    ) -> None:
        """Show the jobs and their cost. ``not_run``: checks that no job can run.

        Later, ``show_not_run`` counts these checks as finished.
        """
        self._remaining = Remaining(jobs, not_run)
        self._line(f"run directory {run_dir}")
        for job in jobs:
            per_node = job.ranks_per_node if job.placement == "ranks" else 1
            processes = f"{job.nodes} × {plural(per_node, 'process', 'processes')}"
            names = ", ".join(job.checks)
            limit = f"at most {duration_text(job.limit_s)}"
            self._line(f"plan    job {job.name} ({processes}, {job.device}, {limit}): {names}")
        for line in plan_lines(jobs, excluded_checks, catalog(), not_run, as_root=as_root):
            self._line(f"plan    {line}")

    def show_note(self, text: str) -> None:
        """Show a line about the plan."""
        self._line(f"note    {text}")

    def job_started(self, job: Job, attempt: int) -> None:
        self._heading = f"job {job.name}{f', attempt {attempt}' if attempt > 1 else ''}"
        self._printed_waits.clear()
        self._line(f"start   {self._heading}")
        self._update_status("starting")

    def retry_started(self, job: Job, reasons: Mapping[str, str]) -> None:
        for check in job.checks:
            self._line(f"retry   {check} in job {job.name} (below threshold: {reasons[check]})")

    def show_status(self, text: str) -> None:
        """Show ``text``, the current check and step. Called many times a second; a log gets it after HEARTBEAT_S."""
        now = self._clock()
        self._remaining.start(text.partition(": ")[0], now)
        if self._console.is_terminal:
            self._update_status(text)
        elif now - self._last_line >= HEARTBEAT_S:
            self._line(", ".join(filter(None, [f"running {self._heading}: {text}", self._remaining.text(now)])))

    def show_waiting(self, state: str, seconds: float) -> None:
        """Show what the job waits for, and for how long. A log gets each state once, then at most once a minute."""
        if self._console.is_terminal:
            self._update_status(f"waiting: {state}, {duration_text(seconds)}")
        elif seconds - self._printed_waits.get(state, -math.inf) >= WAITING_LINE_S:
            self._line(f"waiting: {state}, {duration_text(seconds)}")
            self._printed_waits[state] = seconds

    def show_outcome(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None:
        self._remaining.finish(check, None if outcome in (Outcome.SKIP, Outcome.ERROR) else seconds)
        if (check, outcome, reason) == self._last_outcome:  # the same error of another rank
            return
        self._last_outcome = (check, outcome, reason)
        detail = "" if outcome is Outcome.PASS else f": {reason}"
        # on a terminal the status line has the remaining time
        estimate = "" if self._console.is_terminal else self._remaining.estimate(self._clock())
        position = f"{self._remaining.position(check)}{estimate}".removeprefix(", ")
        progress = escape(f"[{position}] ") if position and self._remaining.check_count else ""
        name = f"[{STYLES[outcome]}]{outcome:<8}[/] {escape(check)}"
        self._print(f"{progress}{name} ({seconds:.1f} s){escape(clean(detail))}")

    def show_not_run(self, checks: Sequence[str], outcome: Outcome, reason: str) -> None:
        """Show checks that no job can run, all for the same reason."""
        for check in checks:
            self._remaining.finish(check, None)
        text = f"{plural(len(checks), 'check')} not run: {reason}: {and_more(checks, _MAX_NAMED)}"
        self._print(f"[{STYLES[outcome]}]{outcome:<8}[/] {escape(clean(text))}")

    def warn(self, text: str) -> None:
        self._print(f"[bold red]{escape(clean(text))}[/]")

    def _update_status(self, text: str) -> None:
        now = self._clock()
        progress = f"{_clock_text(now - self._started)}  {self._remaining.text(now)}"
        with _errors_ignored():
            self._status.update(f"{progress}  {self._heading}: {escape(clean(text))}")

    def _line(self, text: str) -> None:
        self._print(escape(clean(text)))

    def _print(self, markup: str) -> None:
        """Print a line with the elapsed time. A terminal wraps it between words; a log file keeps it on one line."""
        self._last_line = self._clock()
        stamp = f"{_clock_text(self._last_line - self._started)}  "
        with _errors_ignored():
            self._console.print(stamp + markup, soft_wrap=not self._console.is_terminal, highlight=False)


class Remaining:
    """The number of finished checks, and the remaining time as estimated from typical durations."""

    def __init__(self, jobs: Sequence[Job] = (), not_run: Sequence[str] = ()) -> None:
        """``not_run``: further checks, which no job runs and which take no time."""
        self._unfinished = dict.fromkeys([*not_run, *(check for job in jobs for check in job.checks)])
        self._checks = frozenset(self._unfinished)
        self._typical = {check: seconds for job in jobs for check, seconds in job.typical.items()}
        self._typical |= dict.fromkeys(not_run, 0.0)
        self._typical_done = self._measured_done = 0.0  # seconds of finished checks with a typical duration
        self._running, self._running_since = "", 0.0  # the check that runs, and when it started (monotonic clock)
        self.check_count = len(self._unfinished)

    @property
    def done_count(self) -> int:
        return self.check_count - len(self._unfinished)

    def start(self, check: str, now: float) -> None:
        """Record that ``check`` runs, so that the estimate subtracts its elapsed time. Ignore unknown names."""
        if check in self._checks and check != self._running:
            self._running, self._running_since = check, now

    def finish(self, check: str, seconds: float | None) -> None:
        """Count ``check`` as finished. ``seconds``: its duration, for the estimate; None if it was not measured."""
        if check in self._unfinished:
            del self._unfinished[check]
            if check in self._typical and seconds is not None:
                self._typical_done += self._typical[check]
                self._measured_done += seconds

    def position(self, check: str) -> str:
        """``3/11``: number of finished checks, and of all; empty for a check that is not in the plan."""
        return f"{self.done_count}/{self.check_count}" if check in self._checks else ""

    def seconds(self, now: float) -> float:
        """The expected remaining time, without the checks of unknown duration. ``now``: by the monotonic clock."""
        scale = self._measured_done / self._typical_done if self._typical_done > MIN_TYPICAL_DONE_S else 1.0
        expected = {check: scale * self._typical.get(check, 0.0) for check in self._unfinished}
        if self._running in expected:
            expected[self._running] = max(0.0, expected[self._running] - (now - self._running_since))
        return sum(expected.values())

    def _late_text(self, now: float) -> str:
        """By how much the running check takes longer than expected; empty up to LATE_S."""
        late_s = now - self._running_since - self._typical.get(self._running, math.inf)
        is_late = self._running in self._unfinished and late_s > LATE_S
        return f"{self._running} takes {duration_text(late_s)} longer than expected" if is_late else ""

    def text(self, now: float) -> str:
        """The number of finished checks and the remaining time: ``3 of 11 checks, about 4 min left``."""
        if not self.check_count:
            return ""
        return f"{self.done_count} of {plural(self.check_count, 'check')}{self.estimate(now)}"

    def estimate(self, now: float) -> str:
        """The expected remaining time as text; empty after the last check."""
        unknown = [check for check in self._unfinished if check not in self._typical]
        seconds, late_text, parts = self.seconds(now), self._late_text(now), list[str]()
        if seconds >= SECONDS_BELOW_S:
            parts = [f"about {round(seconds / 60)} min left"]
        elif len(unknown) < len(self._unfinished) and (seconds or not late_text):
            parts = [f"about {10 * math.ceil(max(seconds, 1) / 10)} s left"]
        parts += [f"{plural(len(unknown), 'check')} of unknown duration"] if unknown else []
        return "".join(f", {part}" for part in (" and ".join(parts), late_text) if part)


def duration_text(seconds: float) -> str:
    """``45 s``, ``2 min 10 s`` or ``1 h 5 min``."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{int(seconds)} s"


def _clock_text(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
