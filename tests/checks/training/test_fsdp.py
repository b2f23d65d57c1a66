"""FSDP2 over all ranks: sharding, memory, speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.base import Check
from seatrial.checks.training import fsdp
from seatrial.checks.training._workload import TrainingResult
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome
from tests.checks.training.test_results import metrics_by_name, timed_result

SLOW = 1 / 0.85  # seconds of a step at 85 % of what is known, which a FAIL is under 90 % of


@pytest.mark.parametrize(
    ("held", "whole", "outcome"), [(20.3, 0, Outcome.PASS), (23.0, 0, Outcome.FAIL), (20.3, 1, Outcome.FAIL)]
)
def test_memory_and_sharding_are_judged(held: float, whole: int, outcome: Outcome) -> None:
    found = {
        "parameter_tensors": 21,
        "sharded_tensors": 21 - whole,
        "params_and_optimizer_gib": held,
        "params_and_optimizer_expected_gib": 20.23,
        "world_size": 2,
        "loss_entropy_bound": 1.3,
    }
    observed = [*fsdp._sharding({"native": TrainingResult(found, Path(), "")})]
    names = ("unsharded_tensors", "memory_excess")
    rules = tuple(rule for rule in fsdp.CHECK.rules if rule.metric in names)
    measurement = Measurement(
        check="train.fsdp",
        subject="n0/gpu0",
        metrics=tuple(one for one in observed if isinstance(one, Metric)),
        facts={"device": "cuda", "trained": "yes", "offload": "no"},
    )
    check = Check(**{**vars(fsdp.CHECK), "rules": rules})
    verdicts = judge_check(check, [measurement], {}, "t")
    assert max(verdicts, key=lambda one: one.outcome is Outcome.FAIL).outcome is outcome


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [
        ((SLOW, 1.01 * SLOW, 0.99 * SLOW) * 3, Outcome.FAIL),
        ((1.0, 1.4) * 4 + (1.0,), Outcome.WARN),
        ((1.0, 1.0, 1.0, 3.0) * 16, Outcome.FAIL),  # a stall now and then, and long enough to know
        ((1.0, 1.01, 0.99) * 3, Outcome.PASS),
    ],
)
def test_a_training_fails_where_its_steps_are_slow_and_not_where_they_leave_it_open(
    seconds: tuple[float, ...], outcome: Outcome
) -> None:
    one = timed_result(*seconds, measured=len(seconds), tokens=2 * 11954)  # of 4 H200 each, in data/skus
    facts = {"gpu": "NVIDIA H200", "device": "cuda", "trained": "yes", "settings": "shipped", "world_size": 4}
    facts |= {"nodes": 1, "layers": "all", "offload": "no", "data": "rows"}
    measured = Measurement(
        check="train.fsdp", subject="n0/gpu0", metrics=tuple(metrics_by_name(one).values()), facts=facts
    )
    verdicts = judge_check(fsdp.CHECK, [measured], {}, "t", References(skus=skus()))
    (verdict,) = (found for found in verdicts if found.metric == "tokens_per_second_per_gpu.native")
    assert verdict.outcome is outcome, verdict.message
