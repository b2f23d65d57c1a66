"""The reasons why a trial is not ACCEPTED, at most five, for `seatrial judge RUN --why-not`."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.model import TIME_LIMIT, DecisionValue, Outcome, Trial, Verdict, VerdictKey
from seatrial.report.causes import CauseView, causes
from seatrial.report.text import sanitized, single_line
from seatrial.util.text import and_more, plural

MAX_REASONS = 5
_MAX_NAMED = 3  # checks listed in one line, and subjects listed
_MAX_TEXT = 1000  # characters of one text
_BLOCKING = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED)
_NEXT_STEPS = {  # outcome → next step after a verdict without a fix
    Outcome.FAIL: "read the evidence: `seatrial judge RUN`",
    Outcome.ERROR: "read the logs in RUN/jobs, then `seatrial run --resume RUN`",
    Outcome.UNJUDGED: "set a threshold in the trial: `seatrial checks NAME` shows the rules of a check",
}
# Commands in which RUN is a placeholder for the run directory
_RUN = re.compile(r"(\bjudge |--resume |\bin )RUN\b")


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
        text = textwrap.shorten(self.text, _MAX_TEXT, placeholder=" …; `seatrial judge RUN` shows the whole text")
        next_step = [f"  next: {single_line(self.next_step)}"] if self.next_step else []
        return [single_line(self.title), *([f"  {text}"] if text else []), *next_step]


def lines(trial: Trial, run_dir: Path | None = None) -> list[str]:
    """One line per reason, with check, subjects, value, limit and next step; ``accepted`` for an accepted trial.

    ``run_dir`` replaces the placeholder RUN in commands; None: the placeholder stays.
    """
    return [_with_run_dir(reason.line, run_dir) for reason in reasons(trial)] or ["accepted"]


def paragraphs(trial: Trial, run_dir: Path | None = None) -> list[str]:
    """The decision, then the title of each reason, with its text and next step indented on lines of their own.

    ``accepted`` for an accepted trial. ``run_dir``: as for ``lines``.
    """
    all_reasons = reasons(trial)
    if not all_reasons:
        return ["accepted"]
    texts = [_with_run_dir(line, run_dir) for reason in all_reasons for line in reason.paragraph]
    return [f"{trial.decision.value}, because:", *texts]


def _with_run_dir(line: str, run_dir: Path | None) -> str:
    return _RUN.sub(lambda match: match[1] + shlex.quote(str(run_dir)), line) if run_dir else line


def reasons(trial: Trial) -> list[NotAcceptedReason]:
    """At most MAX_REASONS reasons; none for an accepted trial.

    The order: reasons that are not verdicts, causes, verdicts that no cause explains, excluded checks.
    """
    if trial.decision.value is DecisionValue.ACCEPTED:
        return []
    trial = sanitized(trial)
    all_reasons = [
        *_trial_reasons(trial),
        *map(_cause_reason, causes(trial)),
        *map(_verdicts_reason, _unexplained_verdicts(trial)),
        *_excluded(trial),
    ]
    if not all_reasons:
        return [NotAcceptedReason(trial.decision.reason)]
    if len(all_reasons) <= MAX_REASONS:
        return all_reasons
    shown = all_reasons[: MAX_REASONS - 1]
    more = plural(len(all_reasons) - len(shown), "more reason")
    return [*shown, NotAcceptedReason(more, "`seatrial judge RUN` lists all")]


def _trial_reasons(trial: Trial) -> Iterator[NotAcceptedReason]:
    """The reasons that are not verdicts: no GPU, an early end, missing GPUs."""
    if trial.decision.reason_code:
        yield NotAcceptedReason(trial.decision.reason)  # the reason contains the next step
    if trial.stop_reason:
        yield NotAcceptedReason("the trial ended early", trial.stop_reason, "`seatrial run --resume RUN`")
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


def _cause_reason(cause: CauseView) -> NotAcceptedReason:
    """A cause: its place, the number of verdicts that it explains, its evidence and the first command."""
    finding, verdict_count = cause.finding, sum(len(group.verdicts) for group in cause.groups)
    title = f"cause: {finding.title} ({finding.subject}, {finding.confidence} confidence)"
    title += f"; explains {plural(verdict_count, 'verdict')}"
    return NotAcceptedReason(title, finding.evidence.rstrip("."), f"`{finding.first_command}`")


def _unexplained_verdicts(trial: Trial) -> list[list[Verdict]]:
    """The verdicts that prevent acceptance and that no cause explains, in groups.

    FAILs are grouped by check, ERRORs by text, UNJUDGED by reason. ERROR and UNJUDGED prevent acceptance only for
    required checks.
    """
    explained = {key for finding in trial.findings for key in finding.explains}
    groups: dict[tuple[object, ...], list[Verdict]] = {}
    for outcome in _BLOCKING:
        for verdict in (verdict for verdict in trial.verdicts if verdict.outcome is outcome):
            is_blocking = outcome is Outcome.FAIL or _is_required(trial, verdict.check)
            if is_blocking and VerdictKey.from_verdict(verdict) not in explained:
                key: tuple[object, ...] = (outcome, verdict.check)
                if outcome is not Outcome.FAIL:
                    key = (outcome, verdict.reasons, verdict.detail if outcome is Outcome.ERROR else "")
                groups.setdefault(key, []).append(verdict)
    return list(groups.values())


def _verdicts_reason(verdicts: Sequence[Verdict]) -> NotAcceptedReason:
    """The names of the checks and subjects, and the first verdict in full."""
    first = verdicts[0]
    checks = and_more(list(dict.fromkeys(verdict.check for verdict in verdicts)), _MAX_NAMED)
    subjects = and_more(list(dict.fromkeys(verdict.subject for verdict in verdicts)), _MAX_NAMED)
    limit = first.basis.fail_below if first.basis else None
    text = first.summary + (f", FAIL below {limit:.0%}" if limit else "")
    text += f" (and {plural(len(verdicts) - 1, 'more verdict')})" if len(verdicts) > 1 else ""
    return NotAcceptedReason(f"{first.outcome} {checks} on {subjects}", text, first.fix or _NEXT_STEPS[first.outcome])
