"""The decision on a trial. ACCEPTED requires that every required check was measured, evaluated and is good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from operator import attrgetter

from seatrial.checks.check import Check, Checks
from seatrial.model import (
    CLUSTER,
    TIME_LIMIT,
    Decision,
    DecisionValue,
    Measurement,
    Outcome,
    Reason,
    ReasonCode,
    Verdict,
    worst,
)
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more, plural

Outcomes = Mapping[str, Set[Outcome]]  # check → its outcomes
_MAX_NAMED = 3  # subjects listed per check
_NO_GPU = "no GPU was used: pass --gpus-per-node 0 for a CPU-only run, or --gpus-per-node N if GPUs are expected"
_GOOD = (Outcome.PASS, Outcome.WARN, Outcome.SKIP)


def decide(
    required: Mapping[str, bool],
    verdicts: Sequence[Verdict],
    excluded_checks: Mapping[str, str],
    tested_hardware: str,
    blockers: Sequence[str] = (),
    metrics_without_threshold: Mapping[str, tuple[str, ...]] | None = None,
    cpu_only: bool = False,
    notes: Sequence[str] = (),
    marks: Sequence[str] = (),
    cpu_only_requested: bool = False,
    unknown_gpus: tuple[str, ...] = (),
    untested_nodes: str = "",
) -> Decision:
    """The decision on a trial; ``required`` maps each check to whether the decision needs it.

    ``blockers`` are reasons that prevent acceptance regardless of the verdicts, for example that the trial ended early.
    ``untested_nodes`` is such a reason too; empty if all nodes were tested. The reason of REJECTED names these as well.
    The reason of ACCEPTED lists the thresholds that were not evaluated and counts the checks in
    ``metrics_without_threshold``. A trial that used no GPU (``cpu_only``) is accepted only with ``cpu_only_requested``.
    Every reason ends with the ``notes``, such as the baseline that the verdicts use. ``marks`` are weaknesses of the
    trial, such as overridden rules: a reason that is no rejection starts with them, and with the ``unknown_gpus``.
    """
    outcomes = _outcomes_by_check(verdicts)
    reason_code = None
    unknown = "unknown GPU model {}: no published figures, judged by bounds and by this run"
    marks = [*marks, *map(unknown.format, unknown_gpus)]
    if failed := sorted(name for name, check_outcomes in outcomes.items() if Outcome.FAIL in check_outcomes):
        names = ", ".join(_failed_checks(failed, verdicts))
        value = DecisionValue.REJECTED
        failed_text = f"{plural(len(failed), 'check')} failed: {names}"
        reason = "; ".join(filter(None, [failed_text, untested_nodes, *blockers, *marks]))
    else:
        skipped, errors = (_threshold_messages(verdicts, outcome) for outcome in (Outcome.SKIP, Outcome.ERROR))
        no_gpu = cpu_only and not cpu_only_requested
        blockers = [untested_nodes, *blockers, _NO_GPU if no_gpu else ""]
        if missing := [*filter(None, blockers), *_missing_results(required, verdicts, excluded_checks)]:
            reason_code = ReasonCode.NO_GPU if no_gpu else None
            value, reason = DecisionValue.INCOMPLETE, "; ".join([*marks, *missing, *errors])
        else:
            parts = [*marks, _passed_checks(required, outcomes, excluded_checks), *skipped, *errors]
            if metrics_without_threshold:
                checks = plural(len(metrics_without_threshold), "check")
                has = "has" if len(metrics_without_threshold) == 1 else "have"
                parts.append(f"{checks} {has} metrics without a threshold (listed in the report)")
            value, reason = DecisionValue.ACCEPTED, "; ".join(parts)
    return Decision(
        value=value,
        reason="; ".join([reason, *notes]),
        reason_code=reason_code,
        tested_hardware=tested_hardware,
        cpu_only=cpu_only,
        unknown_gpus=unknown_gpus,
        metrics_without_threshold=dict(metrics_without_threshold or {}),
    )


def metrics_without_threshold(
    checks: Checks, measurements: Iterable[Measurement], verdicts: Iterable[Verdict]
) -> dict[str, tuple[str, ...]]:
    """Check → performance metrics that no rule or threshold evaluated: ``latency.*``, ``busbw.* other than 1GiB``."""
    recorded: dict[str, set[str]] = {}
    performance_checks = {name for name, check in checks.items() if check.speeds}
    for measurement in measurements:
        if measurement.metrics and measurement.check in performance_checks:
            recorded.setdefault(measurement.check, set()).update(map(attrgetter("name"), measurement.metrics))
    distinct = set(map(attrgetter("check", "metric", "outcome"), verdicts))  # far fewer than verdicts
    evaluated = {(check, metric) for check, metric, outcome in distinct if outcome is not Outcome.SKIP}
    families = {name: tuple(_families(checks[name], metrics, evaluated)) for name, metrics in recorded.items()}
    return {name: members for name, members in families.items() if members}


def _families(check: Check, recorded: Iterable[str], evaluated: Set[tuple[str, str]]) -> Iterator[str]:
    """The performance metrics that were not evaluated: a single one by its name, several of a family as one text."""
    families: dict[str, list[str]] = {}
    for pattern in check.speeds:  # in order of importance
        for metric in sorted(metric for metric in recorded if fnmatchcase(metric, pattern)):
            members = families.setdefault(metric.partition(".")[0], [])
            if metric not in members:
                members.append(metric)
    for family, members in families.items():
        not_evaluated = [metric for metric in members if (check.name, metric) not in evaluated]
        evaluated_sizes = sorted(metric.partition(".")[2] for metric in members if metric not in not_evaluated)
        if len(not_evaluated) == 1:
            yield not_evaluated[0]
        elif not_evaluated:
            yield f"{family}.*" + (f" other than {' '.join(evaluated_sizes)}" if evaluated_sizes else "")


def _outcomes_by_check(verdicts: Sequence[Verdict]) -> Outcomes:
    distinct = set(map(attrgetter("check", "outcome"), verdicts))  # far fewer than verdicts
    return {check: set(outcomes) for check, outcomes in grouped(distinct).items()}


def _failed_checks(names: Sequence[str], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Each failed check with its failed subjects, except the cluster."""
    failed = [verdict for verdict in verdicts if verdict.outcome is Outcome.FAIL]
    for name in names:
        subjects = dict.fromkeys(verdict.subject for verdict in failed if verdict.check == name)
        subjects.pop(CLUSTER, None)
        yield f"{name} on {and_more(list(subjects), _MAX_NAMED)}" if subjects else name


def _threshold_messages(verdicts: Sequence[Verdict], outcome: Outcome) -> list[str]:
    """The messages of the verdicts with this outcome whose basis is a threshold."""
    return [
        verdict.message
        for verdict in verdicts
        if verdict.outcome is outcome and verdict.basis and Reason.MEASUREMENT_ERROR not in verdict.reasons
    ]


def _missing_results(
    required: Mapping[str, bool], verdicts: Sequence[Verdict], excluded_checks: Mapping[str, str]
) -> list[str]:
    """The reasons against acceptance: checks that are bad, not measured, excluded or not in the configuration."""
    outcomes = _outcomes_by_check(verdicts)
    not_measured = {verdict.check for verdict in verdicts if Reason.NOT_MEASURED in verdict.reasons}
    needed = {name: worst(outcomes.get(name, ())) for name, is_required in required.items() if is_required}
    reasons = [
        f"{name} is {outcome}"
        for name, outcome in needed.items()
        if outcome not in _GOOD and name not in excluded_checks and name not in not_measured
    ]
    missing = [name for name in needed if name in not_measured]
    applicable = [name for name, outcome in needed.items() if outcome is not Outcome.SKIP]
    if missing and len(missing) < len(applicable):  # if all are missing, the last reason says so
        reasons.append(f"not measured: {and_more(missing, _MAX_NAMED)}")
    # A check that is not required counts here only if --time-limit excluded it, since the user did not name this check
    if excluded := [name for name, option in excluded_checks.items() if name in needed or option == TIME_LIMIT]:
        options = " and ".join(sorted({excluded_checks[name] for name in excluded}))
        reasons.append(f"{plural(len(excluded), 'check')} excluded by {options}: {and_more(excluded, _MAX_NAMED)}")
    # checks that the record has, but its configuration does not
    unplanned = {name: worst(outcomes[name]) for name in sorted(outcomes.keys() - required.keys())}
    reasons += [f"{name} is {outcome}" for name, outcome in unplanned.items() if outcome not in _GOOD]
    if not any(outcomes.get(name, set()) & {Outcome.PASS, Outcome.WARN} for name in needed):
        reasons.append("no required check was measured")
    return reasons


def _passed_checks(required: Mapping[str, bool], outcomes: Outcomes, excluded_checks: Mapping[str, str]) -> str:
    """The number of required checks that passed, and the names of other checks by outcome."""
    outcome_by_check = {name: worst(outcomes.get(name, ())) for name in required}
    skipped = sorted(name for name, outcome in outcome_by_check.items() if outcome is Outcome.SKIP)
    not_applicable = [name for name in skipped if name not in excluded_checks]
    excluded = [name for name in skipped if name in excluded_checks]
    warned = sorted(name for name, outcome in outcome_by_check.items() if outcome is Outcome.WARN)
    inconclusive = [f"{name} is {outcome}" for name, outcome in outcome_by_check.items() if outcome not in _GOOD]
    passed = [name for name, is_required in required.items() if is_required and name not in {*skipped, *warned}]
    reason = f"{plural(len(passed), 'check')} passed"
    if not_applicable:
        reason += f", {len(not_applicable)} not applicable ({and_more(not_applicable, _MAX_NAMED)})"
    reason += f", {len(excluded)} excluded ({and_more(excluded, _MAX_NAMED)})" if excluded else ""
    reason += f", {len(warned)} with warnings ({', '.join(warned)})" if warned else ""
    return reason + (f"; not required and inconclusive: {', '.join(inconclusive)}" if inconclusive else "")
