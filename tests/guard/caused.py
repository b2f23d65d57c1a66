"""Records in which each known cause of bad verdicts shows, alone and all at once, with slow transfers to explain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from seatrial.checks import catalog
from seatrial.checks.cause import Cause
from seatrial.diagnose.cause_data import causes
from seatrial.model import Measurement, Metric, Rule, Threshold, Trial
from tests.guard.changes import only_checks, record, slowed, with_facts, with_metrics
from tests.guard.retried import CONTEXT

BASES = ("2026-11-28-2xh200/acceptance", "launchers/slurm")
SLOW = ("transfer.peers", "collectives.all_reduce", "collectives.pairs", "train.ddp")
VARIABLES = {"NCCL_P2P_DISABLE": "1", "NCCL_MAX_NCHANNELS": "2", "NCCL_ALGO": "Ring", "NCCL_DEBUG": "TRACE"}


def shapes() -> Iterator[tuple[str, Trial]]:
    for base in BASES:
        trial = record(base)
        evidence = {check for cause in causes() for check in cause.evidence}
        slow = _changed(only_checks(trial, {*CONTEXT, *SLOW, *evidence}), _slowed)
        at_once = slow
        for cause in causes():
            shown = _shown(slow, cause)
            if shown.measurements != slow.measurements or _does_not_apply(slow, cause):
                at_once = _shown(at_once, cause)
                yield f"{base} {cause.id}", only_checks(shown, {*CONTEXT, *SLOW, *cause.evidence})
        yield f"{base} all causes", at_once
        yield f"{base} environment variables", _changed(slow, _with_variables)
        yield f"{base} all causes and environment variables", _changed(at_once, _with_variables)


def _changed(trial: Trial, change: Callable[[Measurement], Measurement]) -> Trial:
    return trial.model_copy(update={"measurements": tuple(map(change, trial.measurements))})


def _slowed(measurement: Measurement) -> Measurement:
    return with_metrics(measurement, slowed(0.5)) if measurement.check in SLOW else measurement


def _with_variables(measurement: Measurement) -> Measurement:
    known = measurement.facts.get("backend_environment")
    return (
        with_facts(measurement, backend_environment={**known, **VARIABLES}) if isinstance(known, dict) else measurement
    )


def _shown(trial: Trial, cause: Cause) -> Trial:
    """The trial with values that violate the rules on the metrics that are evidence of the cause."""

    def change(measurement: Measurement) -> Measurement:
        names = cause.evidence.get(measurement.check, ())
        rules = {rule.metric: rule for rule in catalog()[measurement.check].rules if _is_any(rule.metric, names)}
        return with_metrics(measurement, lambda metric: _violating(metric, rules.get(metric.name)))

    return _changed(trial, change)


def _does_not_apply(trial: Trial, cause: Cause) -> bool:
    """Whether the record says so of a metric that is evidence of the cause; the cause then cannot show."""
    return any(
        _is_any(absent.metric, cause.evidence.get(measurement.check, ()))
        for measurement in trial.measurements
        for absent in measurement.absent
    )


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _violating(metric: Metric, rule: Rule | None) -> Metric:
    if rule is None:
        return metric
    if rule.threshold is None:
        return replace(metric, value=0.3 * metric.value, samples=())
    needs_more = rule.threshold.op[0] == ">" or rule.threshold == Threshold(
        op="==", value=1.0, unit=rule.threshold.unit
    )
    return replace(metric, value=0.0 if needs_more else 10 * rule.threshold.value + 3, samples=())
