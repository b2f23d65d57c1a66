"""What stands between a trial and ACCEPTED, in at most five lines, for `seatrial judge RUN --why-not`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seatrial.model import TIME_LIMIT, DecisionValue, Outcome, Trial, Verdict
from seatrial.report.text import one_line, plural, sanitized
from seatrial.util.text import and_more

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
    """One line per cause, with check, subjects, value, limit and next step; ``accepted`` for an accepted trial."""
    if trial.decision.value is DecisionValue.ACCEPTED:
        return ["accepted"]
    trial = sanitized(trial)
    causes = [*_of_the_trial(trial), *map(_of_verdicts, _by_cause(trial))] or [trial.decision.reason]
    if len(causes) > MAX_LINES:
        more = plural(len(causes) - MAX_LINES + 1, "more cause")
        causes[MAX_LINES - 1 :] = [f"{more}: `seatrial judge RUN` lists all"]
    return [one_line(cause) for cause in causes]


def _of_the_trial(trial: Trial) -> Iterator[str]:
    """The causes that are not verdicts: no GPU, an early end, excluded checks."""
    if trial.decision.reason_code:
        yield f"{trial.decision.reason_code}: {trial.decision.reason}"
    if trial.stop_reason:
        yield f"the trial ended early: {trial.stop_reason}. Next: `seatrial run --resume RUN`"
    if trial.gpu_error:
        yield f"GPUs are missing: {trial.gpu_error}"
    if excluded := [
        name for name, option in trial.excluded_checks.items() if option == TIME_LIMIT or _is_required(trial, name)
    ]:
        options = " and ".join(sorted({trial.excluded_checks[name] for name in excluded}))
        names = and_more(excluded, _MAX_NAMED)
        yield f"{plural(len(excluded), 'check')} excluded by {options}: {names}. Next: run without {options}"


def _is_required(trial: Trial, check: str) -> bool:
    return bool(trial.config.get("checks", {}).get(check, {}).get("required", True))


def _by_cause(trial: Trial) -> list[list[Verdict]]:
    """The verdicts that prevent acceptance, worst first: FAIL by check, ERROR by text, UNJUDGED by reason."""
    groups: dict[tuple[object, ...], list[Verdict]] = {}
    for outcome in _BLOCKING:
        for verdict in trial.verdicts:
            if verdict.outcome is outcome and (outcome is Outcome.FAIL or _is_required(trial, verdict.check)):
                cause: object = verdict.check
                if outcome is not Outcome.FAIL:
                    cause = verdict.reasons, verdict.detail if outcome is Outcome.ERROR else ""
                groups.setdefault((outcome, cause), []).append(verdict)
    return list(groups.values())


def _of_verdicts(verdicts: Sequence[Verdict]) -> str:
    """The line of a cause: its first verdict in full, and the names of all checks and subjects."""
    first = verdicts[0]
    checks, subjects = (
        and_more(list(dict.fromkeys(names)), _MAX_NAMED)
        for names in ((verdict.check for verdict in verdicts), (verdict.subject for verdict in verdicts))
    )
    limit = first.basis.fail_below if first.basis else None
    text = f"{first.outcome} {checks} on {subjects}: {first.summary}" + (f", FAIL below {limit:.0%}" if limit else "")
    text += f" (and {plural(len(verdicts) - 1, 'more verdict')})" if len(verdicts) > 1 else ""
    return f"{text}. Next: {first.fix or _NEXT_STEPS[first.outcome]}"
