"""Evaluators of one rule: shared by subjects of one model; test_thresholds.py and test_groups.py test the verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seatrial.checks.declare import metric
from seatrial.hardware.references import References
from seatrial.judge import rule_evaluators
from seatrial.judge.groups import MeasurementGroup
from seatrial.judge.rule_evaluators import RuleEvaluators
from seatrial.judge.thresholds import RuleEvaluator
from seatrial.model import Metric, Outcome, Reason
from tests.judge.test_rules import BY_REFERENCE, FOUR, SKU, SPEED, check, measured


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[RuleEvaluator]:
    """The evaluators that are made in the test."""
    evaluators: list[RuleEvaluator] = []

    def make(*arguments: object) -> RuleEvaluator:
        evaluators.append(RuleEvaluator(*arguments))  # type: ignore[arg-type]
        return evaluators[-1]

    monkeypatch.setattr(rule_evaluators, "RuleEvaluator", make)
    return evaluators


def group(gpu: str = "NVIDIA Test", **facts: int) -> MeasurementGroup:
    return MeasurementGroup([measured(400, facts={**FOUR, "gpu": gpu, **facts})], check(BY_REFERENCE), {"speed": None})


def evaluators_of(declared: metric) -> RuleEvaluators:
    (rule,) = declared.rules
    return RuleEvaluators(check(declared), [rule], rule, "", References(None, [SKU]), None)


def speed(value: float, unit: str = "GB/s", subject: str = "cluster") -> Metric:
    return Metric(name="speed", value=value, unit=unit, subject=subject)


def test_subjects_of_one_model_and_shape_share_an_evaluator(made: list[RuleEvaluator]) -> None:
    evaluators = evaluators_of(BY_REFERENCE)
    for subject in ("n0", "n1", "n2"):
        evaluators.verdict(group(), speed(400, subject=subject))
    assert len(made) == 1
    evaluators.verdict(group(gpu="NVIDIA Other"), speed(400))
    evaluators.verdict(group(nodes=2), speed(400))
    assert len(made) == 3


def test_value_that_passed_on_one_subject_passes_on_the_next() -> None:
    evaluators = evaluators_of(SPEED)
    first, second, slow = (
        evaluators.verdict(group(), speed(value, subject=subject))
        for value, subject in ((10, "n0"), (10, "n1"), (9, "n2"))
    )
    assert (first.outcome, second.outcome, slow.outcome) == (Outcome.PASS, Outcome.PASS, Outcome.FAIL)
    assert (second.subject, second.basis) == ("n1", first.basis)
    assert (slow.fix, slow.meaning) == (SPEED.fix, SPEED.meaning)


def test_metric_in_another_unit_is_an_error() -> None:
    evaluators = evaluators_of(SPEED)
    verdict = evaluators.verdict(group(), speed(10, unit="Gbit/s"))
    assert (verdict.outcome, verdict.reasons, verdict.detail) == (Outcome.ERROR, (Reason.UNIT_MISMATCH,), "GB/s")


def test_concurrent_copy_far_below_the_single_one_is_worse() -> None:
    """Two GPUs of a node share a limit of 90 % of the single value, divided by two."""
    declared = replace(BY_REFERENCE, text=(">= 0.90 reference", "> 0.90 single / gpus"))
    names = ("n0/gpu0", "n0/gpu1")
    metrics = [speed(400, subject=name) for name in names]
    metrics += [Metric(name="single", value=900, unit="GB/s", subject=name) for name in names]
    measurement = measured(facts=FOUR).model_copy(update={"metrics": tuple(metrics)})
    concurrent = MeasurementGroup([measurement], check(declared), {"speed": None, "single": None})
    evaluators = evaluators_of(declared)
    outcomes = [evaluators.verdict(concurrent, speed(value, subject="n0/gpu0")).outcome for value in (406, 404)]
    assert outcomes == [Outcome.PASS, Outcome.FAIL]
