"""The reasons why a trial is not ACCEPTED, in at most five lines, for `seatrial judge RUN --why-not`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seatrial.model import TIME_LIMIT, DecisionValue, Explained, Outcome, Trial, Verdict
from seatrial.report.causes import CauseView, causes
from seatrial.report.text import sanitized, single_line
from seatrial.util.text import and_more, plural

MAX_LINES = 5
_MAX_NAMED = 3  # checks, and subjects, in one line
_BLOCKING = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED)
# For verdicts without a fix
_NEXT_STEPS = {
    Outcome.FAIL: "read the evidence: `seatrial judge RUN`",
    Outcome.ERROR: "read the logs in RUN/jobs, then `seatrial run --resume RUN`",
    Outcome.UNJUDGED: "set a threshold in the trial: `seatrial checks NAME` lists the metrics of a check",
}


def lines(trial: Trial) -> list[str]:
    """One line per reason, with check, subjects, value, limit and next step; ``accepted`` for an accepted trial.

    A cause comes before the verdicts that no cause explains, and these before excluded checks.
    """
    if trial.decision.value is DecisionValue.ACCEPTED:
        return ["accepted"]
    trial = sanitized(trial)
    reasons = [*_trial_reasons(trial), *map(_cause_line, causes(trial)), *map(_verdicts_line, _by_reason(trial))]
    reasons = [*reasons, *_excluded(trial)] or [trial.decision.reason]
    if len(reasons) > MAX_LINES:
        more = plural(len(reasons) - MAX_LINES + 1, "more reason")
        reasons[MAX_LINES - 1 :] = [f"{more}: `seatrial judge RUN` lists all"]
    return [single_line(reason) for reason in reasons]


def _trial_reasons(trial: Trial) -> Iterator[str]:
    """The reasons that are not verdicts: no GPU, an early end, missing GPUs."""
    if trial.decision.reason_code:
        yield f"{trial.decision.reason_code}: {trial.decision.reason}"
    if trial.stop_reason:
        yield f"the trial ended early: {trial.stop_reason}. Next: `seatrial run --resume RUN`"
    if trial.gpu_error:
        yield f"GPUs are missing: {trial.gpu_error}"


def _excluded(trial: Trial) -> Iterator[str]:
    if excluded := [
        name for name, option in trial.excluded_checks.items() if option == TIME_LIMIT or _is_required(trial, name)
    ]:
        options = " and ".join(sorted({trial.excluded_checks[name] for name in excluded}))
        names = and_more(excluded, _MAX_NAMED)
        yield f"{plural(len(excluded), 'check')} excluded by {options}: {names}. Next: run without {options}"


def _is_required(trial: Trial, check: str) -> bool:
    return bool(trial.config.get("checks", {}).get(check, {}).get("required", True))


def _cause_line(cause: CauseView) -> str:
    """The line of a cause: its place, the number of verdicts that it explains, its evidence and the first command."""
    finding, number = cause.finding, sum(len(group.verdicts) for group in cause.groups)
    text = f"cause: {finding.title} ({finding.subject}, {finding.confidence} confidence)"
    evidence = finding.evidence.rstrip(".")
    return f"{text}; explains {plural(number, 'verdict')}: {evidence}. Next: `{finding.first_command}`"


def _by_reason(trial: Trial) -> list[list[Verdict]]:
    """The verdicts without a cause that prevent acceptance: FAIL by check, ERROR by text, UNJUDGED by reason."""
    explained = {key for finding in trial.findings for key in finding.explains}
    groups: dict[tuple[object, ...], list[Verdict]] = {}
    for outcome in _BLOCKING:
        for verdict in (verdict for verdict in trial.verdicts if verdict.outcome is outcome):
            is_blocking = outcome is Outcome.FAIL or _is_required(trial, verdict.check)
            if is_blocking and Explained.key(verdict) not in explained:
                reason: object = verdict.check
                if outcome is not Outcome.FAIL:
                    reason = verdict.reasons, verdict.detail if outcome is Outcome.ERROR else ""
                groups.setdefault((outcome, reason), []).append(verdict)
    return list(groups.values())


def _verdicts_line(verdicts: Sequence[Verdict]) -> str:
    """The line of a reason: its first verdict in full, and the names of all checks and subjects."""
    first = verdicts[0]
    checks, subjects = (
        and_more(list(dict.fromkeys(names)), _MAX_NAMED)
        for names in ((verdict.check for verdict in verdicts), (verdict.subject for verdict in verdicts))
    )
    limit = first.basis.fail_below if first.basis else None
    text = f"{first.outcome} {checks} on {subjects}: {first.summary}" + (f", FAIL below {limit:.0%}" if limit else "")
    text += f" (and {plural(len(verdicts) - 1, 'more verdict')})" if len(verdicts) > 1 else ""
    return f"{text}. Next: {first.fix or _NEXT_STEPS[first.outcome]}"
