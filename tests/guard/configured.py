"""Records judged with other thresholds, options and selections of checks, and with baselines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.checks.check import Check
from seatrial.config.schema import Config
from seatrial.hardware.references import skus
from seatrial.judge import site_baseline
from seatrial.model import (
    Absent,
    Baseline,
    Measurement,
    Metric,
    Outcome,
    Rule,
    Trial,
    UsageError,
    Why,
)
from seatrial.pipeline.plan import NodeGpus, make_plan
from seatrial.pipeline.rejudge import rejudge
from tests.baselines import learned_runs
from tests.guard import clusters
from tests.guard.changes import only_checks, record, slowed, with_metrics, with_settings
from tests.guard.observed import Observed
from tests.guard.retried import CONTEXT

BASE = "2026-11-28-2xh200/acceptance"
LEARNED_FROM = (
    "2026-11-22-2xh200-restructured/before-acceptance",
    "2026-11-23-2xh200/acceptance",
    "2026-11-28-2xh200/acceptance",
)
JUDGED_BY_BASELINE = "2026-11-22-2xh200-restructured/final-acceptance"
BASELINE_CHECKS = ("device.gemm", "device.memory", "transfer.peers", "collectives.all_reduce", "collectives.gpu_pairs")
GPUS, MODEL, OTHER_MODEL = 2, "NVIDIA H200", "NVIDIA B200"  # GPUS, MODEL: of BASE


def shapes() -> Iterator[tuple[str, Trial]]:
    """Records with other thresholds and options of one check, and with other selections of checks."""
    whole = record(BASE)
    for name, settings in whole.config["checks"].items():
        trial, check = only_checks(whole, (*CONTEXT, name)), catalog()[name]
        yield from thresholds(trial, check)
        yield from _changed_options(trial, check)
        yield from _near_limits(trial, check)
        if settings.get("expect"):
            skipped = _skipped(trial, name)
            yield f"{name} skipped with a threshold", skipped
            yield f"{name} may_skip", with_settings(skipped, name, may_skip=True)
            yield f"{name} not required", with_settings(skipped, name, required=False)
    yield from _sizes(only_checks(whole, (*CONTEXT, "collectives.all_reduce", "collectives.all_gather")))
    yield from _selections(record("2026-11-27-2xh200/quick"))
    for required in (True, False):
        unknown = with_settings(only_checks(whole, CONTEXT), "host.unheard_of", required=required)
        yield f"unknown check, required: {required}", unknown


class _Judged(NamedTuple):
    """A measured metric and the rule on it."""

    metric: Metric
    rule: Rule


def _judged_metrics(trial: Trial, check: Check) -> Iterator[_Judged]:
    """The first measured metric with a reference value, and the first with a fixed threshold."""
    measured = {
        metric.name: metric for each in trial.measurements if each.check == check.name for metric in each.metrics
    }
    for rules in ([rule for rule in check.rules if rule.reference], [rule for rule in check.rules if rule.threshold]):
        yield from [_Judged(measured[rule.metric], rule) for rule in rules if rule.metric in measured][:1]


def thresholds(trial: Trial, check: Check) -> Iterator[tuple[str, Trial]]:
    for metric, rule in _judged_metrics(trial, check):
        op = rule.threshold.op if rule.threshold else ">"
        is_lower = op[0] == ">"
        bound = ">" if is_lower else "<"
        wide = 0.5 * metric.value if is_lower else 2 * metric.value + 1
        tight = (1.02 if is_lower else 0.98) * metric.value or (1.0 if is_lower else -1.0)
        family, _, size = metric.name.rpartition(".")
        texts = {
            "stricter": f"{op} {tight:.9g} {metric.unit}",
            "laxer": f"{op} {wide:.9g} {metric.unit}",
            "of another unit": f"{op} {wide:.9g} furlongs",
            "impossible": f"{op} {100 * metric.value + 1 if is_lower else -1:.9g} {metric.unit}",
            "at the value": f"{bound} {metric.value!r} {metric.unit}",
            "at the value, or equal": f"{bound}= {metric.value!r} {metric.unit}",
            "very lax": f"{op} {0.001 * metric.value if is_lower else 1e6 * metric.value + 1e6:.9g} {metric.unit}",
        }
        with_threshold = partial(with_settings, trial, check.name)
        for name, text in texts.items():
            yield f"{check.name} {metric.name} {name}", with_threshold(expect={metric.name: text})
        for name in ("stricter", "laxer", "very lax"):
            overridden = with_threshold(expect={metric.name: texts[name]}, override=True)
            yield f"{check.name} {metric.name} override {name}", overridden
        if family and size.endswith("iB"):
            other = with_threshold(expect={f"{family}.3GiB": texts["laxer"]})
            yield f"{check.name} {metric.name} size not timed", other


def _near_limits(trial: Trial, check: Check) -> Iterator[tuple[str, Trial]]:
    """Values a little below and above the shares of the published value below which a rule fails and warns."""
    sku = next(sku for sku in skus() if MODEL in sku.nvml_names)
    for metric, rule in _judged_metrics(trial, check):
        for published in sku.expected.get(rule.reference, ()):
            if published.gpus > GPUS:
                continue
            fails = published.required or (rule.share("reference") or 0.0) * published.value
            warns = (rule.share("reference", Outcome.WARN) or 0.0) * published.value
            for limit, value in {"fail": fails, "warn": warns}.items():
                for side, factor in {"below": 1 - 1e-6, "above": 1 + 1e-6}.items():
                    change = partial(_with_value, name=metric.name, value=factor * value)
                    changed = (
                        with_metrics(each, change) if each.check == check.name else each for each in trial.measurements
                    )
                    name = f"{check.name} {metric.name} {side} the limit of {limit}, {published.gpus} GPUs"
                    yield name, trial.model_copy(update={"measurements": tuple(changed)})


def _with_value(metric: Metric, name: str, value: float) -> Metric:
    return replace(metric, value=value, samples=()) if metric.name == name else metric


def _changed_options(trial: Trial, check: Check) -> Iterator[tuple[str, Trial]]:
    """Each option that a rule needs at its default value, with another value."""
    for option in dict.fromkeys(name for rule in check.rules for name in rule.when.default_options):
        default: object = check.options.model_fields[option].default
        other: JsonValue = [*default, "other"] if isinstance(default, tuple) else "other"
        other = 2 * default if isinstance(default, int) else 4 if default is None else other
        yield f"{check.name} option {option}", with_settings(trial, check.name, options={option: other})


def _skipped(trial: Trial, check: str) -> Trial:
    skipped = (
        each.model_copy(update={"metrics": (), "skipped": "no GPU"}) if each.check == check else each
        for each in trial.measurements
    )
    return trial.model_copy(update={"measurements": tuple(skipped)})


def _sizes(trial: Trial) -> Iterator[tuple[str, Trial]]:
    """A size that the options leave out, and one for which the network is too slow."""
    check, metric, smaller = "collectives.all_reduce", "busbw.8GiB", "1GiB"

    def without_size(why: Why, reason: str, instead: str = "") -> Trial:
        def change(each: Measurement) -> Measurement:
            if each.check != check or not any(metric == has.name for has in each.metrics):
                return each
            without = with_metrics(each, lambda has: None if has.name == metric else has)
            absent = Absent(metric=metric, why=why, reason=reason, instead=instead)
            return without.model_copy(update={"absent": (*without.absent, absent)})

        return trial.model_copy(update={"measurements": tuple(map(change, trial.measurements))})

    omitted = without_size(Why.NOT_REQUESTED, "not in the options")
    yield "size left out", omitted
    yield "size left out, threshold on another", with_settings(omitted, check, expect={"busbw.1GiB": "> 100 GB/s"})
    yield "size left out, threshold on it", with_settings(omitted, check, expect={metric: "> 100 GB/s"})
    too_slow = without_size(Why.DOES_NOT_APPLY, "the network is too slow", f"busbw.{smaller}")
    yield "another size judged instead", too_slow


def _selections(trial: Trial) -> Iterator[tuple[str, Trial]]:
    """--only, --skip and --time-limit, as the plan applies them."""
    plan = partial(make_plan, Config.model_validate(trial.config), catalog(), NodeGpus(2, expected_gpus=2))
    plans = {
        "--only collectives": plan(only=("collectives.*", "host.inventory")),
        "--skip train": plan(skip=("train.*",)),
        "--only and --skip": plan(only=("collectives.*",), skip=("collectives.pairs",)),
        "--time-limit 20": plan(time_limit_s=20),
        "--time-limit 40": plan(time_limit_s=40),
    }
    for name, selected in plans.items():
        kept = tuple(each for each in trial.measurements if each.check not in selected.excluded_checks)
        update = {"excluded_checks": selected.excluded_checks, "jobs": selected.jobs}
        yield name, trial.model_copy(update={**update, "measurements": kept})
        yield f"{name}, but measured", trial.model_copy(update=update)


def baseline_shapes() -> Iterator[tuple[str, Trial]]:
    """A run and a cluster judged with baselines of other runs and of the run itself."""
    good = good_baseline()
    run = only_checks(record(JUDGED_BY_BASELINE), (*CONTEXT, *BASELINE_CHECKS))
    itself = site_baseline.learned_run("run", run.host, run.started, run.measurements)
    baselines = {
        **_baselines(good),
        "of this run": good.model_copy(update={"learned_from": (itself,)}),
        "of this run, override": good.model_copy(update={"learned_from": (itself,), "override": True}),
        "of this run and others": good.model_copy(update={"learned_from": (itself, *learned_runs())}),
    }
    slow = run.model_copy(
        update={"measurements": tuple(with_metrics(each, slowed(0.85, "*")) for each in run.measurements)}
    )
    for name, baseline in baselines.items():
        yield f"baseline {name}", run.model_copy(update={"baseline": baseline})
        yield f"baseline {name}, slow run", slow.model_copy(update={"baseline": baseline})
    cluster = only_checks(clusters.healthy("infiniband", 2), (*CONTEXT, "collectives.all_gather"))
    values = ({"gpus": 16, "nodes": 2, "fabric": fabric} for fabric in ("ib-8x400", "roce-8x400"))
    for update in values:
        between = changed_baseline(good, 1.6, **update)
        yield f"baseline between nodes, {update['fabric']}", cluster.model_copy(update={"baseline": between})


def good_baseline() -> Baseline:
    """A baseline a little above the published values, without the judge, which decides what can be learned."""
    sku = next(sku for sku in skus() if MODEL in sku.nvml_names)
    expected = {
        key: tuple(
            each.model_copy(update={"gpu": MODEL, "runs": 3, "required": None, "value": 1.01 * each.value})
            for each in published
            if each.gpus <= GPUS
        )
        for key, published in sku.expected.items()
    }
    expected = {key: values for key, values in expected.items() if values}
    return Baseline(name="guard", learned_from=learned_runs(), expected=expected)


def _baselines(good: Baseline) -> dict[str, Baseline]:
    return {
        "good": good,
        "good, override": good.model_copy(update={"override": True}),
        "of few runs": changed_baseline(good, 1.0, runs=1),
        "too high": changed_baseline(good, 1.15),
        "lax": changed_baseline(good, 0.5),
        "lax, override": changed_baseline(good, 0.5).model_copy(update={"override": True}),
        "beyond physical limits": changed_baseline(good, 20.0),
        "of another model": changed_baseline(good, 1.0, gpu=OTHER_MODEL),
    }


def changed_baseline(baseline: Baseline, factor: float, **update: str | int) -> Baseline:
    """The baseline with all values multiplied, and with other fields of all values."""
    expected = {
        key: tuple(value.model_copy(update={"value": factor * value.value, **update}) for value in values)
        for key, values in baseline.expected.items()
    }
    return baseline.model_copy(update={"expected": expected})


def baselines() -> Iterator[tuple[str, Observed]]:
    """The values that are learned from three runs, and whether a run can be judged with a file of each baseline."""
    yield "learned baseline", _learned_values()
    run = only_checks(record(JUDGED_BY_BASELINE), (*CONTEXT, "device.gemm"))
    for name, baseline in _baselines(good_baseline()).items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "site.yaml"
            file.write_text(site_baseline.dump(baseline), encoding="utf-8")
            try:
                decision = rejudge(run, file).decision.value.value
            except UsageError:
                decision = "refused"
        yield f"baseline file {name}", {"decision": decision}


def _learned_values() -> Observed:
    try:
        learned = site_baseline.learn("guard", {name: rejudge(record(name)) for name in LEARNED_FROM}, catalog())
    except UsageError:
        return {"refused": "UsageError"}
    return {
        f"{key} {value.gpu} {value.gpus} {value.nodes} {value.fabric}": f"{value.value:.6g} {value.unit} {value.runs}"
        for key, listed in learned.expected.items()
        for value in listed
    }
