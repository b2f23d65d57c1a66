"""Facts that rules depend on: an invalid one is never a reason to accept, nor to skip a rule on a bad metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.checks.declare import metric
from seatrial.judge.groups import SHAPE_FACTS
from seatrial.judge.rules import judge_check
from seatrial.model import (
    GPUS_USED,
    PORTS_USED,
    DecisionValue,
    Measurement,
    Metric,
    Outcome,
    Reason,
    Rule,
    Threshold,
    Trial,
    Verdict,
)
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from tests.judge.test_rules import FOUR, SPEED, by_reference, check, measured, verdicts

RECORD = load_trial(record_path("2026-11-22-4xh200/acceptance"))
MEASURED = [name for name in RECORD.config["checks"] if any(m.check == name and m.metrics for m in RECORD.measurements)]
DELETED = object()
INVALID: tuple[Any, ...] = (None, "", True, 1, [], "nonsense", DELETED)


def facts_of(rule: Rule) -> set[str]:
    """The facts that a rule depends on."""
    shape = SHAPE_FACTS if rule.reference or rule.only_warns_by_peers else ()
    return {*rule.when.facts, *rule.reference_when, *shape}


def with_only(name: str) -> Trial:
    """The record with one check, judged by the rules of the check only."""
    config = {**RECORD.config, "checks": {name: {**RECORD.config["checks"][name], "expect": {}}}}
    jobs = tuple(job.model_copy(update={"checks": (name,)}) for job in RECORD.jobs if name in job.checks)
    measurements, retries = (
        tuple(map(with_work, (measurement for measurement in group if measurement.check == name)))
        for group in (RECORD.measurements, RECORD.retries)
    )
    return RECORD.model_copy(update={"config": config, "jobs": jobs, "measurements": measurements, "retries": retries})


def with_work(measurement: Measurement) -> Measurement:
    """The measurement with the FLOPs per token of its trainings, which the record does not have."""
    facts = {
        name: {**value, "flops_per_token": 1e10} if name.startswith("run.") and isinstance(value, dict) else value
        for name, value in measurement.facts.items()
    }
    return measurement.model_copy(update={"facts": facts})


def changed(trial: Trial, change: Callable[[Measurement], Measurement]) -> Trial:
    update = {key: tuple(map(change, getattr(trial, key))) for key in ("measurements", "retries")}
    return rejudge(trial.model_copy(update=update))


def with_fact(measurement: Measurement, name: str, value: Any) -> Measurement:
    if name not in measurement.facts:
        return measurement
    facts = {key: old for key, old in measurement.facts.items() if key != name}
    return measurement.model_copy(update={"facts": facts if value is DELETED else {**facts, name: value}})


def with_bad_metrics(measurement: Measurement, rules: list[Rule]) -> Measurement:
    bad = {rule.metric: rule for rule in rules}

    def worse(metric: Metric) -> Metric:
        limit = bad[metric.name].threshold
        value = metric.value / 100 if not limit or limit.op[0] == ">" else limit.value + 1e6
        return replace(metric, value=value, samples=())

    metrics = tuple(worse(metric) if metric.name in bad else metric for metric in measurement.metrics)
    return measurement.model_copy(update={"metrics": metrics})


def mutations(trial: Trial, fact: str) -> Iterator[Any]:
    recorded = [measurement.facts[fact] for measurement in trial.measurements if fact in measurement.facts]
    return (value for value in INVALID if value is DELETED or [type(value), value] != [type(recorded[0]), recorded[0]])


def skipped(verdicts: tuple[Verdict, ...]) -> set[str]:
    """The metrics that a rule skips, and that no other verdict keeps from ACCEPTED."""
    bad = {each.metric for each in verdicts if each.outcome in (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED)}
    return {verdict.metric for verdict in verdicts if verdict.outcome is Outcome.SKIP} - bad


def errors(trial: Trial) -> list[Verdict]:
    """The verdicts that prevent ACCEPTED without a FAIL."""
    return [verdict for verdict in trial.verdicts if verdict.outcome in (Outcome.ERROR, Outcome.UNJUDGED)]


@pytest.mark.parametrize("name", [name for name in MEASURED if any(map(facts_of, catalog()[name].rules))])
def test_invalid_fact_is_never_accepted_and_skips_no_bad_metric(name: str) -> None:
    trial = with_only(name)
    original = rejudge(trial)
    assert not errors(original)
    rules = catalog()[name].rules
    for fact in sorted(set().union(*map(facts_of, rules))):
        dependent = [rule for rule in rules if fact in facts_of(rule)]
        with_bad = changed(trial, partial(with_bad_metrics, rules=dependent))
        evaluated = {rule.metric for rule in dependent} - skipped(original.verdicts)
        for value in mutations(trial, fact):
            if value is DELETED and not evaluated:  # another fact makes these rules not applicable
                continue
            without = changed(trial, partial(with_fact, name=fact, value=value))
            assert without.decision.value is not DecisionValue.ACCEPTED, (fact, value)
            assert errors(without), (fact, value)
            bad = changed(with_bad, partial(with_fact, name=fact, value=value))
            assert bad.decision.value is not DecisionValue.ACCEPTED, (fact, value)
            assert not skipped(bad.verdicts) & evaluated, (fact, value)


def one(declared: metric, **facts: Any) -> Verdict:
    (verdict,) = verdicts(check(declared), measured(1, facts=facts))
    return verdict


CONDITIONAL = replace(SPEED, when="backend == nccl")


@pytest.mark.parametrize(
    "value", [None, "", True, 1, [], "nonsense", "nccl: yes", "not_supported", "permission_denied: root only"]
)
def test_invalid_value_is_an_error_with_name_value_and_expected_values(value: Any) -> None:
    verdict = one(CONDITIONAL, backend=value)
    assert (verdict.outcome, verdict.reasons) == (Outcome.ERROR, (Reason.FACT_INVALID,))
    assert "backend" in verdict.detail
    assert "nccl|gloo|cuda|cpu" in verdict.detail
    missing = one(CONDITIONAL)
    assert (missing.reasons, missing.detail) == ((Reason.FACT_INVALID,), "the record has no fact backend")


def test_missing_fact_of_a_rule_that_does_not_apply_is_no_error() -> None:
    both = replace(SPEED, when="backend == nccl and settings == shipped")
    assert one(both, backend="gloo").outcome is Outcome.SKIP
    assert one(both, backend="gloo", settings=True).outcome is Outcome.ERROR
    assert one(both, backend="nccl").outcome is Outcome.ERROR


def test_failed_check_may_lack_facts_but_not_have_invalid_ones() -> None:
    failed: dict[str, Any] = {"error": "RuntimeError: gone"}
    judged = verdicts(check(CONDITIONAL), measured(1, **failed))
    assert [verdict.outcome for verdict in judged] == [Outcome.ERROR, Outcome.FAIL]
    judged = verdicts(check(CONDITIONAL), measured(1, facts={"backend": True}, **failed))
    assert judged[1].reasons == (Reason.FACT_INVALID,)


BY_PEERS = metric("speed", warn=">= 0.95 peers", unit="GB/s")
OPTIONAL = by_reference("all_reduce", reference_optional=True)


@pytest.mark.parametrize("declared", [OPTIONAL, BY_PEERS])
@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": None},
        {"gpu": ""},
        {"gpu": True},
        {"world_size": "4"},
        {"world_size": 0},
        {"nodes": True},
        {"nodes": 1.0},
    ],
)
def test_facts_that_select_a_reference_value_have_a_type(declared: metric, changes: dict[str, Any]) -> None:
    verdict = one(declared, **FOUR | changes)
    assert (verdict.outcome, verdict.reasons) == (Outcome.ERROR, (Reason.FACT_INVALID,))
    without = {name: value for name, value in FOUR.items() if name not in changes}
    assert one(declared, **without).reasons == (Reason.FACT_INVALID,)


@pytest.mark.parametrize(("world_size", "nodes", "valid"), [(4, 2, True), (2, 2, False), (4, 1, False), (8, 2, False)])
def test_shape_of_a_collective_equals_the_measured_ranks(world_size: int, nodes: int, valid: bool) -> None:
    collective = check(by_reference("x.busbw.1GiB", reference_optional=True))
    shape: dict[str, Any] = {"gpu": "NVIDIA Test", "world_size": world_size, "nodes": nodes}
    others = [Measurement(check="c", subject=f"n{rank // 2}/gpu{rank % 2}", rank=rank) for rank in range(1, 4)]
    first = measured(1, facts=shape, rank=0).model_copy(update={"subject": "n0/gpu0"})
    (verdict,) = verdicts(collective, first, *others)
    assert (verdict.reasons != (Reason.FACT_INVALID,)) is valid


def test_threshold_on_another_size_needs_no_gpu_on_a_cpu() -> None:
    facts = {"backend": "gloo", "world_size": 2, "nodes": 1}
    busbw = Metric(name="busbw.10MiB", value=0.5, unit="GB/s", subject="cluster")
    measurement = Measurement(check="collectives.all_reduce", subject="n0/rank0", metrics=(busbw,), facts=facts)
    expect = {"busbw.10MiB": Threshold.parse("> 0.1 GB/s")}
    judged = judge_check(catalog()["collectives.all_reduce"], [measurement], expect, "mine")
    (verdict,) = [verdict for verdict in judged if verdict.metric == "busbw.10MiB"]
    assert verdict.outcome is Outcome.PASS


@pytest.mark.parametrize("name", [GPUS_USED, PORTS_USED])
@pytest.mark.parametrize("value", [None, "", True, 1, "nonsense", {"cluster": True}, {"cluster": ""}, [True], ["0"]])
def test_facts_of_any_check_have_a_type(name: str, value: Any) -> None:
    judged = verdicts(check(SPEED), measured(11, facts={name: value}))
    assert [verdict.outcome for verdict in judged] == [Outcome.ERROR, Outcome.PASS]
    assert judged[0].reasons == (Reason.FACT_INVALID,)
