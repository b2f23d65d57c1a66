"""train.fsdp: sharding, memory, speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.checks.declare import value
from seatrial.checks.training import _results, fsdp
from seatrial.checks.training._workload import TrainingResult
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Outcome, worst
from tests.checks.training.check_helpers import make_context, measured, outcomes
from tests.checks.training.test_results import timed_result

NO_TENSORS = {"parameter_tensors": 0, "sharded_tensors": 0}
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
    answers = list(fsdp._sharding_observations({"native": TrainingResult(metrics, Path(), "")}))
    assert value("params_and_optimizer", gib * 2**30) in answers
    measurement = measured(fsdp.CHECK, answers, device="cuda", trained="yes", cpu_offload="no")
    verdicts = outcomes(fsdp.CHECK, [measurement])
    assert {verdicts[name] for name in ("unsharded_tensors", "memory_excess")} == {Outcome.PASS, outcome}


@pytest.mark.parametrize("entropy_bound", [None, 1.3])
def test_loss_is_judged_against_the_entropy_of_generated_data_only(entropy_bound: float | None) -> None:
    result = TrainingResult({"loss_entropy_bound": entropy_bound}, Path(), "", steps=({"step": 1, "loss": 4.0},))
    answers = [
        *_results.training_observations(make_context(Path()), result, "native", metrics_only=True),
        *fsdp._sharding_observations({"native": replace(result, metrics={**(result.metrics or {}), **NO_TENSORS})}),
    ]
    verdicts = outcomes(fsdp.CHECK, [measured(fsdp.CHECK, answers, device="cuda", trained="yes")])
    expected = Outcome.SKIP if entropy_bound is None else Outcome.FAIL
    assert verdicts["loss_above_entropy_bound.native"] is expected


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
    facts: dict[str, str | int] = {"gpu": "NVIDIA H200", "device": "cuda", "trained": "yes", "settings": "shipped"}
    facts |= {"world_size": 4, "nodes": 1, "layers": "all", "cpu_offload": "no"}
    work = Fact(name="run.native", value={"precision": "bf16", "flops_per_token": 4.4e10})
    observed = _results.training_observations(make_context(Path()), result, "native", metrics_only=True)
    measurement = measured(fsdp.CHECK, [*observed, work], **facts)
    verdicts = judge_check(fsdp.CHECK, [measurement], {}, "t", References(skus=skus()))
    of_speed = [verdict for verdict in verdicts if verdict.metric == "tokens_per_second_per_gpu.native"]
    assert worst(verdict.outcome for verdict in of_speed if verdict.outcome is not Outcome.SKIP) is outcome, of_speed
