"""The reasons why a trial is not ACCEPTED, at most five, for `seatrial judge RUN --why-not`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.model import TIME_LIMIT, DecisionValue, Outcome, Trial
from seatrial.report.figures import Figure
from seatrial.report.parts import Problem, filled, parts, problems, run_values, with_real_values
from seatrial.report.text import clean, single_line
from seatrial.util.text import and_more, plural

MAX_REASONS = 5
_MAX_NAMED = 3  # checks listed in one line, and subjects listed
_MAX_TEXT = 1000  # characters of one text
_BLOCKING = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED)


@dataclass(frozen=True)
class NotAcceptedReason:
    """A reason why a trial is not ACCEPTED. ``text``: values and evidence; ``next_step`` is empty if there is none."""

    title: str
    text: str = ""
    next_step: str = ""

    @property
    def line(self) -> str:
        """The reason on one line."""
        text = f"{self.title}: {self.text}" if self.text else self.title
        return single_line(f"{text}. Next: {self.next_step}" if self.next_step else text)

    @property
    def paragraph(self) -> list[str]:
        """The title; then, indented, the text, which is cut if it is long, and the next step."""
        text = textwrap.shorten(
            clean(self.text), _MAX_TEXT, placeholder=" …; `seatrial judge RUN -v` shows the whole text"
        )
        next_step = [f"  next: {single_line(self.next_step)}"] if self.next_step else []
        return [single_line(self.title), *([f"  {text}"] if text else []), *next_step]


def lines(trial: Trial, run_dir: Path | None = None) -> list[str]:
    """One line per reason, with check, parts, value, limit and next step; ``accepted`` for an accepted trial.

    ``run_dir`` replaces the placeholder RUN in commands; None: the placeholder stays.
    """
    trial = with_real_values(trial, run_dir)
    return [filled(reason.line, run_values(run_dir)) for reason in reasons(trial)] or ["accepted"]


def paragraphs(trial: Trial, run_dir: Path | None = None) -> list[str]:
    """The decision, then the title of each reason, with its text and next step indented on lines of their own.

    ``accepted`` for an accepted trial. ``run_dir``: as for ``lines``.
    """
    all_reasons = reasons(with_real_values(trial, run_dir))
    if not all_reasons:
        return ["accepted"]
    texts = [filled(line, run_values(run_dir)) for reason in all_reasons for line in reason.paragraph]
    return [f"{trial.decision.value}, because:", *texts]


def reasons(trial: Trial) -> list[NotAcceptedReason]:
    """At most MAX_REASONS reasons; none for an accepted trial.

    The order: reasons that are not verdicts, problems that prevent acceptance, excluded checks.
    """
    if trial.decision.value is DecisionValue.ACCEPTED:
        return []
    all_reasons = [*_trial_reasons(trial), *_problem_reasons(trial, problems(parts(trial))), *_excluded(trial)]
    if not all_reasons:
        return [NotAcceptedReason(trial.decision.reason)]
    if len(all_reasons) <= MAX_REASONS:
        return all_reasons
    shown = all_reasons[: MAX_REASONS - 1]
    more = plural(len(all_reasons) - len(shown), "more reason")
    return [*shown, NotAcceptedReason(more, "`seatrial judge RUN -v` lists all")]


def next_step(trial: Trial, found: Sequence[Problem]) -> str:
    """What to do first if the trial is not ACCEPTED: a command between backticks, or a text; empty if accepted."""
    if trial.decision.value is DecisionValue.ACCEPTED:
        return ""
    for problem in found:
        if problem.first.outcome is Outcome.WARN:
            continue
        if command := problem.first.first_command:
            # commands of causes run on the right node
            is_complete = not problem.first.node or problem.first.has_cause or command.startswith("seatrial ")
            return f"`{command}`" if is_complete else f"on {problem.first.node}: `{command}`"
        if problem.first.outcome:
            return next(iter(problem.first.fixes), "")
    return next((reason.next_step for reason in (*_trial_reasons(trial), *_excluded(trial))), "")


def _trial_reasons(trial: Trial) -> Iterator[NotAcceptedReason]:
    """The reasons that are not verdicts: no GPU, an early end, missing GPUs."""
    if trial.decision.reason_code:
        yield NotAcceptedReason(trial.decision.reason)  # the reason contains the next step
    if trial.stop_reason:
        command = trial.new_run_command or "seatrial run --resume RUN"
        yield NotAcceptedReason("the trial ended early", trial.stop_reason, f"`{command}`")
    if trial.gpu_error:
        yield NotAcceptedReason("GPUs cannot be used", trial.gpu_error)


def _excluded(trial: Trial) -> Iterator[NotAcceptedReason]:
    """At most one reason: required checks that an option excluded, and all checks that the time limit excluded."""
    excluded = [
        name for name, option in trial.excluded_checks.items() if option == TIME_LIMIT or _is_required(trial, name)
    ]
    if excluded:
        options = " and ".join(sorted({trial.excluded_checks[name] for name in excluded}))
        title = f"{plural(len(excluded), 'check')} excluded by {options}"
        yield NotAcceptedReason(title, and_more(excluded, _MAX_NAMED), f"run without {options}")


def _is_required(trial: Trial, check: str) -> bool:
    return bool(trial.config.get("checks", {}).get(check, {}).get("required", True))


def _problem_reasons(trial: Trial, found: Sequence[Problem]) -> Iterator[NotAcceptedReason]:
    """The problems that prevent acceptance; ERROR and UNJUDGED do so only for required checks."""
    for problem in found:
        blocking = [
            figure
            for figure in problem.figures
            if figure.outcome is Outcome.FAIL
            or (figure.outcome in _BLOCKING and any(_is_required(trial, check) for check in figure.checks))
        ]
        if blocking:
            yield _problem_reason(problem, blocking)


def _problem_reason(problem: Problem, blocking: Sequence[Figure]) -> NotAcceptedReason:
    """Outcome, checks, parts and cause; the evidence of the cause, else the worst figure; the first command or fix."""
    part, first = problem.first, blocking[0]
    checks = and_more(list(dict.fromkeys(check for figure in blocking for check in figure.checks)), _MAX_NAMED)
    title = f"{first.outcome} {checks} on {and_more([each.name for each in problem.parts], _MAX_NAMED)}"
    text = first.verdict.summary if first.verdict else ""
    text += f", limit {first.limit_text}" if first.expected is not None and first.limit is not None else ""
    text += f" (and {plural(len(blocking) - 1, 'more figure')})" if len(blocking) > 1 else ""
    step = next(iter(part.fixes), "")
    if part.has_cause:
        finding = part.findings[0]
        title += f": {finding.title} ({finding.confidence} confidence)"
        text = f"{finding.evidence.rstrip('.')}; {text}"
        step = f"`{finding.first_command}`" if finding.first_command else step
    return NotAcceptedReason(title, text, step)
