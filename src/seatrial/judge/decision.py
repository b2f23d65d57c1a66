"""Verdicts → the decision. It fails closed: only what was measured, judged and found good is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from operator import attrgetter

from seatrial.checks.base import Check
from seatrial.model import CLUSTER, Decision, DecisionValue, Measurement, Outcome, Reason, Verdict, worst
from seatrial.util.text import and_more

Outcomes = Mapping[str, Set[Outcome]]  # which outcomes each check has
_NAMED = 3  # how many places the decision names of a check
_GOOD = (Outcome.PASS, Outcome.WARN, Outcome.SKIP)


def decide(
    required: Mapping[str, bool],
    verdicts: Sequence[Verdict],
    excluded_checks: Mapping[str, str],
    tested_hardware: str,
    blockers: Sequence[str] = (),
    metrics_without_threshold: Mapping[str, tuple[str, ...]] | None = None,
    cpu_only: bool = False,
) -> Decision:
    """The one answer for a trial whose checks are ``required`` (name → whether the decision needs it).

    A SKIP or an ERROR that has a basis says which threshold was not evaluated: the reason of the decision lists both.
    ``obstacles`` stand against acceptance whatever the verdicts are: the trial ended before its time, say.
    ``recorded_only``, see below: nothing is accepted or refused by these metrics, and the reason says that there are
    some.
    """
    outcomes = _outcomes(verdicts)
    if failed := sorted(name for name, given in outcomes.items() if Outcome.FAIL in given):
        value, reason = DecisionValue.REJECTED, f"{_count(failed)} failed: {', '.join(_failed(failed, verdicts))}"
    else:
        skipped, errors = (_without_value(verdicts, outcome) for outcome in (Outcome.SKIP, Outcome.ERROR))
        if missing := [*filter(None, blockers), *_missing(required, outcomes, excluded_checks)]:
            value, reason = DecisionValue.INCOMPLETE, "; ".join([*missing, *errors])
        else:
            parts = [_passed(required, outcomes), *skipped, *errors]
            if metrics_without_threshold:
                parts.append(
                    f"of {_count([*metrics_without_threshold])} the report lists figures that were recorded and judged by nothing"
                )
            value, reason = DecisionValue.ACCEPTED, "; ".join(parts)
    return Decision(
        value=value,
        reason=reason,
        tested_hardware=tested_hardware,
        cpu_only=cpu_only,
        metrics_without_threshold=dict(metrics_without_threshold or {}),
    )


def metrics_without_threshold(
    checks: Mapping[str, Check], measurements: Iterable[Measurement], verdicts: Iterable[Verdict]
) -> dict[str, tuple[str, ...]]:
    """By check, the metrics of performance that no verdict is on: ``algbw.*``, ``busbw.* other than 1GiB``."""
    recorded: dict[str, set[str]] = {}
    with_performance = {name for name, check in checks.items() if check.performance_metrics}
    for one in (one for one in measurements if one.metrics and one.check in with_performance):
        recorded.setdefault(one.check, set()).update(map(attrgetter("name"), one.metrics))
    given = set(map(attrgetter("check", "metric", "outcome"), verdicts))  # few of very many
    judged = {(check, metric) for check, metric, outcome in given if outcome is not Outcome.SKIP}
    families = {name: tuple(_families(checks[name], metrics, judged)) for name, metrics in recorded.items()}
    return {name: members for name, members in families.items() if members}


def _families(check: Check, recorded: Iterable[str], judged: Set[tuple[str, str]]) -> Iterator[str]:
    """The families of metrics that no verdict is on, or not on all of their members."""
    families: dict[str, list[str]] = {}
    for pattern in check.performance_metrics:  # which are in the order of their weight
        for metric in sorted(metric for metric in recorded if fnmatchcase(metric, pattern)):
            members = families.setdefault(metric.partition(".")[0], [])
            members += [metric] if metric not in members else []
    for family, members in families.items():
        held = [metric.partition(".")[2] for metric in members if (check.name, metric) in judged]
        if len(members) == len(held) + 1:
            yield next(metric for metric in members if (check.name, metric) not in judged)
        elif len(members) > len(held):
            yield f"{family}.*" + (f" other than {' '.join(held)}" if held else "")


def _outcomes(verdicts: Sequence[Verdict]) -> Outcomes:
    outcomes: dict[str, set[Outcome]] = {}
    for check, outcome in set(map(attrgetter("check", "outcome"), verdicts)):  # few of very many
        outcomes.setdefault(check, set()).add(outcome)
    return outcomes


def _failed(names: Sequence[str], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Each with the places at fault, where it knows of any but the cluster."""
    bad = [one for one in verdicts if one.outcome is Outcome.FAIL]
    for name in names:
        places = dict.fromkeys(one.subject for one in bad if one.check == name and one.subject != CLUSTER)
        yield f"{name} on {and_more(list(places), _NAMED)}" if places else name


def _without_value(verdicts: Sequence[Verdict], outcome: Outcome) -> list[str]:
    """The reason of each such verdict that is about a threshold."""
    return [
        one.message
        for one in verdicts
        if one.outcome is outcome and one.basis and Reason.ABOVE_PHYSICAL_LIMIT not in one.reasons
    ]


def _missing(required: Mapping[str, bool], outcomes: Outcomes, left_out: Mapping[str, str]) -> list[str]:
    """Every reason why nothing can be accepted yet, in words."""
    needed = [name for name, is_required in required.items() if is_required]
    given = {name: outcomes.get(name, set()) for name in needed}
    reasons = [f"{name} was left out by {flag}" for name, flag in left_out.items() if name in needed]
    for name, of_check in given.items():
        if name not in left_out and worst(of_check) not in _GOOD:
            reasons.append(f"{name} is {worst(of_check)}")
    if not any(outcome in (Outcome.PASS, Outcome.WARN) for of_check in given.values() for outcome in of_check):
        reasons.append("nothing that the decision needs was measured")
    return reasons


def _passed(required: Mapping[str, bool], outcomes: Outcomes) -> str:
    """What passed, what did not apply, and where somebody should look."""
    given = {name: worst(outcomes.get(name, ())) for name in required}
    skipped = sorted(name for name, outcome in given.items() if outcome is Outcome.SKIP)
    warned = sorted(name for name, outcome in given.items() if outcome is Outcome.WARN)
    unknown = [f"{name} is {outcome}" for name, outcome in given.items() if outcome not in _GOOD]
    passed = [name for name, is_required in required.items() if is_required and name not in skipped]
    reason = f"{_count(passed)} passed"
    reason += f", {len(skipped)} did not apply ({', '.join(skipped)})" if skipped else ""
    reason += f", with warnings in {', '.join(warned)}" if warned else ""
    return reason + (f"; not required, and not known: {', '.join(unknown)}" if unknown else "")


def _count(names: Sequence[str]) -> str:
    return "1 check" if len(names) == 1 else f"{len(names)} checks"
