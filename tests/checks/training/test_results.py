"""Observations and rules of training results, without training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench.child_ranks import ChildResult
from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answer
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import FAILED_RANK, Artifact, Fact, Metric, Outcome, Phase, Scope, Series
from tests.checks.training import check_helpers
from tests.checks.training.check_helpers import measured

CHECK = Check(
    name="train.results",
    title="",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    measure=lambda context, options: iter(()),
    limit_s=1.0,
    declared=(
        *_results.DECLARED,
        *_results.speed("", "all", "native"),
        *_results.ONE_TRAINING,
        *_results.EACH_STAGE,
        _results.memory_metric("cpu_offload == no"),
    ),
)


def make_context(device: str, out: Path = Path()) -> Context:
    return Context(
        node="n0", rank=0, world_size=2, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


def trained(*losses: float | None, max_steps: int = 4, problem: str = "", exit_code: int = 0) -> TrainingResult:
    steps: tuple[dict[str, Any], ...] = tuple(
        {"step": number, "loss": loss, "grad_norm": 1.0} for number, loss in enumerate(losses, 1)
    )
    metrics = None if problem else {"tokens_per_second_per_gpu": 100.0, "mfu_percent": None, "loss_entropy_bound": 1.0}
    return TrainingResult(metrics, Path("none"), problem, exit_code, steps, (0,), max_steps, 9.0)


def observe(answers: Iterable[Answer]) -> tuple[Metric, ...]:
    return measured(CHECK, answers).metrics


def outcomes(answers: Iterable[Answer], **facts: str) -> dict[str, Outcome]:
    return check_helpers.outcomes(CHECK, [measured(CHECK, answers, **facts)])


def test_successful_training_passes() -> None:
    verdicts = outcomes(_results.combined_observations({"a": trained(4, 3, 2, 1)}), device="cpu")
    assert verdicts.pop("memory_excess") is Outcome.SKIP
    assert set(verdicts.values()) == {Outcome.PASS}
    assert len(verdicts) == 4


def test_training_without_two_losses_is_an_error() -> None:
    verdicts = outcomes(_results.combined_observations({"a": trained(4, max_steps=1)}), device="cpu")
    assert verdicts["loss_drop"] is Outcome.ERROR


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, "shipped"),
        ({"overrides": ("max_steps=600",)}, "shipped"),
        ({"overrides": ("max_steps=600", "bsz=1")}, "changed"),
        ({"config": "mine.yaml"}, "changed"),
    ],
)
def test_reference_speeds_apply_to_longer_runs_of_the_shipped_settings(options: dict[str, Any], settings: str) -> None:
    assert _results.settings_fact(_workload.WorkloadOptions.model_validate(options)).value == settings


@pytest.mark.parametrize(
    ("bad", "metric"),
    [
        (trained(4, 3, problem="rank 1: ended by signal 9", exit_code=-9), "exit_code"),
        (trained(4, 3, 2), "steps_missing"),
        (trained(4, 3, None, 2), "nonfinite_losses"),
        (trained(4, 4, 4, 4), "loss_drop"),
    ],
)
def test_one_bad_training_of_two_fails_its_metric(bad: TrainingResult, metric: str) -> None:
    verdicts = outcomes(_results.combined_observations({"good": trained(4, 3, 2, 1), "bad": bad}))
    assert [name for name, outcome in verdicts.items() if outcome is Outcome.FAIL] == [metric]


def test_failed_training_skips_other_rules() -> None:
    verdicts = outcomes(_results.combined_observations({"a": trained(problem="x", exit_code=1)}))
    assert verdicts["exit_code"] is Outcome.FAIL
    assert verdicts["steps_missing"] is verdicts["loss_drop"] is Outcome.SKIP


def with_memory(ranks: int, gib: float, expected: float | None) -> TrainingResult:
    metrics = {"params_and_optimizer_gib": gib, "params_and_optimizer_expected_gib": expected, "world_size": ranks}
    return TrainingResult(metrics, Path("none"), "")


@pytest.mark.parametrize(("gib", "outcome"), [(11.3, Outcome.PASS), (22.5, Outcome.FAIL)])
def test_memory_excess_uses_the_worst_number_of_ranks(gib: float, outcome: Outcome) -> None:
    results = [with_memory(1, 22.4, 22.4), with_memory(1, 22.5, 22.4), with_memory(2, gib, 11.2)]
    measurement = measured(CHECK, _results.memory_excess(results), device="cuda", trained="yes", cpu_offload="no")
    assert check_helpers.outcomes(CHECK, [measurement])["memory_excess"] is outcome
    (metric,) = measurement.metrics
    sizes = {"1": {"used_gib": 22.5, "expected_gib": 22.4}, "2": {"used_gib": gib, "expected_gib": 11.2}}
    assert metric.evidence == {"by_ranks": sizes}


def test_unknown_or_offloaded_memory_gives_no_metric() -> None:
    results = [with_memory(2, 3.0, None), with_memory(2, 3.0, 0.0), trained(problem="x")]
    assert [*_results.memory_excess(results)] == []


def test_rank_that_failed_first_is_a_fact() -> None:
    failed = replace(trained(problem="rank 3 on n1: killed", exit_code=-9), failed_rank=3, failed_node="n1")
    later = replace(failed, failed_rank=0)
    answers = _results.combined_observations({"a": trained(4, 3), "b": failed, "c": later})
    (fact,) = (each for each in answers if isinstance(each, Fact) and each.name == FAILED_RANK)
    assert fact.value == {"rank": 3, "node": "n1"}


def test_evidence_of_the_exit_code_is_the_failure() -> None:
    failed = trained(problem="rank 3: out of memory", exit_code=1)
    (metric,) = (each for each in observe(_results.combined_observations({"a": failed})) if each.name == "exit_code")
    assert (metric.value, metric.evidence) == (1, {"a": "rank 3: out of memory"})


def test_unknown_values_give_no_metric(tmp_path: Path) -> None:
    observed = [*_results.training_observations(make_context("cpu", tmp_path), trained(4, 3, 2, 1), "all")]
    values = {item.name: item.value for item in observe(observed)}
    assert values["tokens_per_second_per_gpu.all"] == 100.0
    assert values["loss_above_entropy_bound.all"] == 0.5  # of the last two steps
    assert "mfu.all" not in values
    assert [item.name for item in observed if isinstance(item, Series)] == ["loss.all", "grad_norm.all"]


def test_log_of_the_failed_rank_comes_before_that_of_the_first(tmp_path: Path) -> None:
    """The logs of all concurrent groups have the same prefix."""
    for rank in range(12):
        (tmp_path / f"gpu-0.rank{rank}.err").write_text("text")
    (tmp_path / "gpu-0.rank8.err").write_text("")
    late, first = (
        ChildResult(error="late", exit_code=-15, failure_order=2),
        ChildResult(error="why", exit_code=1, failure_order=1),
    )

    def logs(children: dict[int, ChildResult], metrics_only: bool = False) -> list[str]:
        result = replace(_workload._result_of_ranks("gpu", tmp_path / "gpu-1", children), log_prefix=tmp_path / "gpu-0")
        observed = _results.training_observations(make_context("cpu", tmp_path), result, metrics_only=metrics_only)
        return [item.path for item in observed if isinstance(item, Artifact)]

    both = ["gpu-0.rank10.err", "gpu-0.rank2.err"]
    assert logs({2: late, 10: first}) == logs({2: late, 10: first}, metrics_only=True) == both
    assert logs({2: first, 10: late}) == ["gpu-0.rank2.err"]
    assert logs({8: late, 10: first}) == ["gpu-0.rank10.err"]  # the log of rank 8 is empty
    good = {2: ChildResult({}), 10: ChildResult({})}
    assert (logs(good), logs(good, metrics_only=True)) == (["gpu-0.rank2.err"], [])


def test_duplicate_step_does_not_replace_a_missing_step() -> None:
    missing, extra = trained(4, 3, 2), trained(4, 3, 2, 1, 1)
    duplicate = TrainingResult(**{**vars(extra), "steps": (*missing.steps, missing.steps[0])})
    for results in ({"a": duplicate}, {"a": missing, "b": extra}):
        assert outcomes(_results.combined_observations(results))["steps_missing"] is Outcome.FAIL


@pytest.mark.parametrize("loss", ["1.0", True, 10**400, float("nan"), float("inf"), [1.0], {}])
def test_loss_that_is_not_a_finite_float_fails(loss: Any) -> None:
    verdicts = outcomes(_results.combined_observations({"a": trained(4, 3, loss, 1)}))
    assert verdicts["nonfinite_losses"] is Outcome.FAIL


def timed_result(*seconds: float, measured: int, tokens: int = 8192, ranks: int = 2) -> TrainingResult:
    """A result as metrics.py reports it: tokens over seconds of the last ``measured`` steps."""
    steps = tuple({"step": n, "loss": 5.0 - n, "tokens": tokens, "seconds": s} for n, s in enumerate(seconds, 1))
    speed = tokens * measured / sum(sorted(seconds[-measured:])) / ranks
    metrics = {
        "tokens_per_second_per_gpu": speed,
        "mfu_percent": 40.0,
        "steps_measured": measured,
        "world_size": ranks,
    }
    return TrainingResult(metrics, Path("none"), "", 0, steps, (0, 1), len(steps), 9.0)


def metrics_by_name(result: TrainingResult) -> dict[str, Metric]:
    observed = _results.training_observations(make_context("cuda:0"), result, "native", metrics_only=True)
    return {metric.name: metric for metric in observe(observed)}


def test_speed_has_samples_of_the_measured_steps() -> None:
    metrics = metrics_by_name(timed_result(30.0, 9.0, 1.0, 2.0, 1.0, measured=3))  # without the first two steps
    speed, mfu = metrics["tokens_per_second_per_gpu.native"], metrics["mfu.native"]
    assert speed.value == pytest.approx(3 * 4096 / 4)
    assert speed.samples == pytest.approx((4096, 2048, 4096))
    assert mfu.samples == pytest.approx((40 * 4 / 3, 40 * 2 / 3, 40 * 4 / 3))
    assert metrics["wall_seconds.native"].samples == ()


def test_many_steps_are_grouped_into_16_samples() -> None:
    seconds = [1 + (number % 7) / 10 for number in range(1000)]
    speed = metrics_by_name(timed_result(*seconds, measured=900))["tokens_per_second_per_gpu.native"]
    assert len(speed.samples) == 16  # of 57 steps each
    assert min(speed.samples) < speed.value < max(speed.samples)
    assert speed.samples[0] == pytest.approx(57 * 4096 / sum(seconds[100:157]))


@pytest.mark.parametrize("change", [{"steps_measured": 4}, {"world_size": 3}, {"steps_measured": None}])
def test_steps_that_do_not_match_the_speed_give_no_samples(change: dict[str, Any]) -> None:
    result = timed_result(30.0, 9.0, 1.0, 2.0, 1.0, measured=3)
    changed = replace(result, metrics={**(result.metrics or {}), **change})
    assert metrics_by_name(changed)["mfu.native"].samples == ()
    without_last_step = replace(result, steps=result.steps[:-1])
    assert metrics_by_name(without_last_step)["tokens_per_second_per_gpu.native"].samples == ()
