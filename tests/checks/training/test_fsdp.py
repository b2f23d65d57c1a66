"""train.fsdp: sharding, memory, speed."""

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

SLOW = 1 / 0.85  # seconds per step at 85 % of the reference; below 90 % is a FAIL


@pytest.mark.parametrize(
    ("gib", "unsharded", "outcome"), [(20.3, 0, Outcome.PASS), (23.0, 0, Outcome.FAIL), (20.3, 1, Outcome.FAIL)]
)
def test_memory_and_sharding(gib: float, unsharded: int, outcome: Outcome) -> None:
    metrics = {
        "parameter_tensors": 21,
        "sharded_tensors": 21 - unsharded,
        "params_and_optimizer_gib": gib,
        "params_and_optimizer_expected_gib": 20.23,
        "world_size": 2,
        "loss_entropy_bound": 1.3,
    }
    observed = [*fsdp._sharding_observations({"native": TrainingResult(metrics, Path(), "")})]
    names = ("unsharded_tensors", "memory_excess")
    rules = tuple(rule for rule in fsdp.CHECK.rules if rule.metric in names)
    measurement = Measurement(
        check="train.fsdp",
        subject="n0/gpu0",
        metrics=tuple(item for item in observed if isinstance(item, Metric)),
        facts={"device": "cuda", "trained": "yes", "cpu_offload": "no"},
    )
    check = Check(**{**vars(fsdp.CHECK), "rules": rules})
    verdicts = judge_check(check, [measurement], {}, "t")
    assert max(verdicts, key=lambda verdict: verdict.outcome is Outcome.FAIL).outcome is outcome


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [
        ((SLOW, 1.01 * SLOW, 0.99 * SLOW) * 3, Outcome.FAIL),
        ((1.05, 1.15, 1.14) * 3, Outcome.UNJUDGED),  # around the limit of 90 %
        ((1.0, 1.4) * 4 + (1.0,), Outcome.FAIL),  # many steps are far slower
        ((1.0, 1.0, 1.0, 3.0) * 16, Outcome.FAIL),  # occasional stalls, enough steps for certainty
        ((1.0, 1.01, 0.99) * 3, Outcome.PASS),
    ],
)
def test_slow_steps_fail_and_steps_around_the_limit_are_inconclusive(
    seconds: tuple[float, ...], outcome: Outcome
) -> None:
    result = timed_result(*seconds, measured=len(seconds), tokens=2 * 11954)  # speed per GPU of 4 H200 in data/skus
    facts = {"gpu": "NVIDIA H200", "device": "cuda", "trained": "yes", "settings": "shipped", "world_size": 4}
    facts |= {"nodes": 1, "layers": "all", "cpu_offload": "no", "data": "rows"}
    measured = Measurement(
        check="train.fsdp", subject="n0/gpu0", metrics=tuple(metrics_by_name(result).values()), facts=facts
    )
    verdicts = judge_check(fsdp.CHECK, [measured], {}, "t", References(skus=skus()))
    (verdict,) = (verdict for verdict in verdicts if verdict.metric == "tokens_per_second_per_gpu.native")
    assert verdict.outcome is outcome, verdict.message
