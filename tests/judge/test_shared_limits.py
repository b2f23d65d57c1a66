"""Limits of one rule: shared by subjects of one model; test_limits.py and test_groups.py test the verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seatrial.checks.declare import metric
from seatrial.hardware.references import References
from seatrial.judge import limits
from seatrial.judge.groups import MeasurementGroup
from seatrial.judge.limits import RuleLimits
from seatrial.judge.rules import judge_check
from seatrial.model import BasisKind, Metric, Outcome, Reason, Scope, Verdict
from tests.judge.test_rules import BY_REFERENCE, FOUR, SKU, SPEED, check, measured


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The limits that are made in the test."""
    all_made: list[object] = []
    make = limits._Limits

    def recorded(*arguments: object) -> object:
        all_made.append(make(*arguments))  # type: ignore[arg-type]
        return all_made[-1]

    monkeypatch.setattr(limits, "_Limits", recorded)
    return all_made


def group(gpu: str = "NVIDIA Test", **facts: int) -> MeasurementGroup:
    return MeasurementGroup([measured(400, facts={**FOUR, "gpu": gpu, **facts})], check(BY_REFERENCE), {"speed": None})


def limits_of(declared: metric) -> RuleLimits:
    (rule,) = declared.rules
    return RuleLimits(check(declared), rule, "", References(None, [SKU]), None)


def verdict_on(of: RuleLimits, measured_group: MeasurementGroup, value: Metric) -> Verdict:
    (verdict,) = of.verdicts(measured_group, [value])
    return verdict


def speed(value: float, unit: str = "GB/s", subject: str = "cluster") -> Metric:
    return Metric(name="speed", value=value, unit=unit, subject=subject)


def test_subjects_of_one_model_and_shape_share_limits(made: list[object]) -> None:
    of = limits_of(BY_REFERENCE)
    for subject in ("n0", "n1", "n2"):
        verdict_on(of, group(), speed(400, subject=subject))
    assert len(made) == 1
    verdict_on(of, group(gpu="NVIDIA Other"), speed(400))
    verdict_on(of, group(nodes=2), speed(400))
    assert len(made) == 3


def test_value_that_passed_on_one_subject_passes_on_the_next() -> None:
    of = limits_of(SPEED)
    first, second, slow = (
        verdict_on(of, group(), speed(value, subject=subject)) for value, subject in ((10, "n0"), (10, "n1"), (9, "n2"))
    )
    assert (first.outcome, second.outcome, slow.outcome) == (Outcome.PASS, Outcome.PASS, Outcome.FAIL)
    assert (second.subject, second.basis) == ("n1", first.basis)
    assert (slow.fix, slow.meaning) == (SPEED.fix, SPEED.meaning)


def test_metric_in_another_unit_is_an_error() -> None:
    verdict = verdict_on(limits_of(SPEED), group(), speed(10, unit="Gbit/s"))
    assert (verdict.outcome, verdict.reasons, verdict.detail) == (Outcome.ERROR, (Reason.UNIT_MISMATCH,), "GB/s")


def test_concurrent_copy_far_below_the_single_one_is_worse() -> None:
    """Two GPUs of a node share a limit of 90 % of the single value, divided by two."""
    declared = replace(BY_REFERENCE, text=(">= 0.90 reference", "> 0.90 single / gpus"))
    names = ("n0/gpu0", "n0/gpu1")
    metrics = [speed(400, subject=name) for name in names]
    metrics += [Metric(name="single", value=900, unit="GB/s", subject=name) for name in names]
    measurement = measured(facts=FOUR).model_copy(update={"metrics": tuple(metrics)})
    concurrent = MeasurementGroup([measurement], check(declared), {"speed": None, "single": None})
    values = [speed(406, subject="n0/gpu0"), speed(404, subject="n0/gpu1")]
    outcomes = [verdict.outcome for verdict in limits_of(declared).verdicts(concurrent, values)]
    assert outcomes == [Outcome.PASS, Outcome.FAIL]


def test_limits_that_did_not_decide_are_listed() -> None:
    """Of four GPUs at the reference value, one is 12 % below its peers: the peers decide, the reference is listed."""
    declared = replace(BY_REFERENCE, text=(">= 0.80 reference", ">= 0.90 peers"), warn=())
    gpus = [
        measured(facts=FOUR).model_copy(
            update={"subject": f"n0/gpu{i}", "metrics": (speed(value, subject=f"n0/gpu{i}"),)}
        )
        for i, value in enumerate((400, 400, 400, 352))
    ]
    verdicts = judge_check(replace(check(declared), scope=Scope.GPU), gpus, {}, "", References(None, [SKU]))
    kinds = [
        (each.outcome, each.basis and each.basis.kind, {one.kind for one in each.other_limits}) for each in verdicts
    ]
    assert kinds[:3] == [(Outcome.PASS, BasisKind.SKU, {BasisKind.PEERS})] * 3
    assert kinds[3] == (Outcome.FAIL, BasisKind.PEERS, {BasisKind.SKU, BasisKind.PEERS})
