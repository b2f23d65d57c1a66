"""Changes of records: fewer checks, other values, retries, and the intents of mutations."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, get_args

from pydantic import JsonValue
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.checks.check import Check
from seatrial.model import Absent, Measurement, Metric, Scope, Trial, Why
from seatrial.pipeline.run_directory import load_trial

Kind = Literal["dropped", "does_not_apply", "cannot_be_read", "times_0.5", "times_2"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_FACTORS: dict[Kind, float] = {"times_0.5": 0.5, "times_2": 2.0}
_REASON = "the guard says so"


@lru_cache(maxsize=4)
def record(name: str) -> Trial:
    return load_trial(record_path(name))


def only_checks(trial: Trial, names: Collection[str]) -> Trial:
    """The trial with these checks only."""
    jobs = tuple(
        job.with_checks(tuple(name for name in job.checks if name in names))
        for job in trial.jobs
        if not set(names).isdisjoint(job.checks)
    )
    checks = {name: settings for name, settings in trial.config["checks"].items() if name in names}
    measurements, retries = (
        tuple(each for each in listed if each.check in names) for listed in (trial.measurements, trial.retries)
    )
    update = {"config": {**trial.config, "checks": checks}, "jobs": jobs}
    return trial.model_copy(update={**update, "measurements": measurements, "retries": retries})


def with_settings(trial: Trial, check: str, **settings: JsonValue) -> Trial:
    """The trial with these settings of one check."""
    checks = trial.config["checks"]
    return with_config(trial, checks={**checks, check: {**checks.get(check, {}), **settings}})


def with_config(trial: Trial, **keys: JsonValue) -> Trial:
    return trial.model_copy(update={"config": {**trial.config, **keys}})


def times(metric: Metric, factor: float) -> Metric:
    samples = tuple(sample * factor for sample in metric.samples)
    return replace(metric, value=metric.value * factor, samples=samples)


Change = Callable[[Metric], Metric | None]  # None: the metric is removed


def with_metrics(measurement: Measurement, change: Change) -> Measurement:
    metrics = tuple(changed for metric in measurement.metrics if (changed := change(metric)))
    return measurement.model_copy(update={"metrics": metrics})


def slowed(factor: float, names: str = "*", subjects: Sequence[str] = ("*",)) -> Change:
    """Multiplies the metrics with these names on these subjects, both as patterns."""

    def change(metric: Metric) -> Metric:
        is_slow = fnmatchcase(metric.name, names) and any(fnmatchcase(metric.subject, each) for each in subjects)
        return times(metric, factor) if is_slow else metric

    return change


def with_facts(measurement: Measurement, **facts: JsonValue) -> Measurement:
    return measurement.model_copy(update={"facts": {**measurement.facts, **facts}})


def retries(measurements: Sequence[Measurement], number: int, change: Change) -> list[Measurement]:
    """The measurements once more, as retry ``number``."""
    return [with_metrics(each, change).model_copy(update={"retry": number}) for each in measurements]


@dataclass(frozen=True)
class Intent:
    """What a check did not measure, or measured otherwise; without ``metric`` the whole check on the subject."""

    check: str
    subject: str
    metric: str
    kind: Kind

    def apply(self, trial: Trial) -> Trial:
        """The record as if the check had said so, in the first measurement and in all retries."""
        update = {name: tuple(self._changed(getattr(trial, name))) for name in ("measurements", "retries")}
        return trial.model_copy(update=update)

    def _changed(self, measurements: Sequence[Measurement]) -> Iterator[Measurement]:
        of_all_ranks = self.check in catalog() and catalog()[self.check].scope is Scope.CLUSTER
        for each in measurements:
            if each.check != self.check:
                yield each
            elif self.metric:
                group = [other for other in measurements if other.check == self.check] if of_all_ranks else [each]
                values = [metric for other in group for metric in other.metrics if metric.name == self.metric]
                yield self._with_changed_metric(each, any(metric.subject != self.subject for metric in values))
            elif each.subject != self.subject:
                yield each
            elif self.kind != "dropped":
                field = "skipped" if self.kind == "does_not_apply" else "error"
                yield each.model_copy(update={"metrics": (), field: _REASON})

    def _with_changed_metric(self, measurement: Measurement, beside: bool) -> Measurement:
        """``beside``: another subject has a value of the metric."""
        if not any(self._is_meant(metric) for metric in measurement.metrics):
            return measurement
        factor = _FACTORS.get(self.kind)
        changed = with_metrics(
            measurement,
            lambda metric: metric if not self._is_meant(metric) else times(metric, factor) if factor else None,
        )
        whys = {"does_not_apply": Why.DOES_NOT_APPLY, "cannot_be_read": Why.UNREADABLE}
        if (why := whys.get(self.kind)) is None:
            return changed
        if why is Why.DOES_NOT_APPLY and not beside:
            return changed  # the records of the golden files could say so only beside a value of another subject
        absent = Absent(metric=self.metric, why=why, reason=_REASON, subject=self.subject)
        return changed.model_copy(update={"absent": (*changed.absent, absent)})

    def _is_meant(self, metric: Metric) -> bool:
        return (metric.name, metric.subject) == (self.metric, self.subject)


def intents(key: str, trial: Trial, count: int) -> list[Intent]:
    """``count`` intents for a record, the same for the same key: most on metrics that a rule or threshold judges."""
    possible: list[Intent] = []
    for measurement in trial.measurements:
        if (check := catalog().get(measurement.check)) is None or measurement.error or measurement.skipped:
            continue
        settings = trial.config["checks"].get(check.name, {})
        judged = {rule.metric for rule in check.rules} | settings.get("expect", {}).keys()
        kinds: tuple[Kind, ...] = ("dropped", "does_not_apply", "cannot_be_read")
        possible += [Intent(check.name, measurement.subject, "", kind) for kind in kinds]
        for metric in measurement.metrics:
            if metric.name in judged:
                possible += [
                    Intent(check.name, metric.subject, metric.name, kind)
                    for kind in KINDS
                    if (kind not in _FACTORS or metric.value)
                    and (kind != "does_not_apply" or _may_be_exempt(check, metric.name))
                ]
    return random.Random(key).sample(possible, min(count, len(possible)))


def _may_be_exempt(check: Check, metric: str) -> bool:
    """Whether a mutation may say that the metric does not apply to one subject: it has values of ranks or GPUs."""
    declared = check.declaration(metric)
    return declared is not None and declared.per in ("rank", "gpu")
