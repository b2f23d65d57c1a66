"""What is told and judged of trainings that a check has started: from what they left, without training anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench.child_ranks import ChildResult
from seatrial.checks.base import Check, Context
from seatrial.checks.training import _results, _workload, throughput
from seatrial.checks.training._workload import TrainingResult
from seatrial.judge.rules import judge_check
from seatrial.model import Artifact, Fact, Measurement, Metric, Observation, Outcome, Series

CHECK = Check(**{**vars(throughput.CHECK), "metrics": _results.metric_units() | {"memory_excess": "%"}})


def place(device: str, out: Path = Path()) -> Context:
    return Context(
        node="n0", rank=0, world_size=2, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


def trained(*losses: float | None, max_steps: int = 4, problem: str = "", exit_code: int = 0) -> TrainingResult:
    steps: tuple[dict[str, Any], ...] = tuple(
        {"step": number, "loss": loss, "grad_norm": 1.0} for number, loss in enumerate(losses, 1)
    )
    metrics = None if problem else {"tokens_per_second_per_gpu": 100.0, "mfu_percent": None, "loss_entropy_bound": 1.0}
    return TrainingResult(metrics, Path("none"), problem, exit_code, steps, (0,), max_steps, 9.0)


def outcomes(*observed: Observation) -> dict[str, Outcome]:
    measurement = Measurement(
        check=CHECK.name,
        subject="n0/rank0",
        metrics=tuple(one for one in observed if isinstance(one, Metric)),
        facts={one.name: one.value for one in observed if isinstance(one, Fact)},
    )
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t")}


def test_a_training_that_ends_well_and_learns_passes() -> None:
    found = outcomes(Fact(name="device", value="cpu"), *_results.combined_observations({"a": trained(4, 3, 2, 1)}))
    assert {name: one for name, one in found.items() if one is not Outcome.PASS} == {"memory_excess": Outcome.SKIP}


@pytest.mark.parametrize(
    ("bad", "metric"),
    [
        (trained(4, 3, problem="rank 1: ended by signal 9", exit_code=-9), "exit_code"),
        (trained(4, 3, 2), "steps_missing"),
        (trained(4, 3, None, 2), "nonfinite_losses"),
        (trained(4, 4, 4, 4), "loss_drop"),
    ],
)
def test_one_of_several_that_goes_wrong_fails_in_its_own_words(bad: TrainingResult, metric: str) -> None:
    found = outcomes(*_results.combined_observations({"good": trained(4, 3, 2, 1), "bad": bad}))
    assert [name for name, outcome in found.items() if outcome is Outcome.FAIL] == [metric]


def test_what_a_training_did_not_reach_is_not_judged() -> None:
    found = outcomes(*_results.combined_observations({"a": trained(problem="x", exit_code=1)}))
    assert found["exit_code"] is Outcome.FAIL
    assert found["steps_missing"] is found["loss_drop"] is Outcome.SKIP


def held(ranks: int, gib: float, due: float | None) -> TrainingResult:
    found = {"params_and_optimizer_gib": gib, "params_and_optimizer_expected_gib": due, "world_size": ranks}
    return TrainingResult(found, Path("none"), "")


@pytest.mark.parametrize(("together", "outcome"), [(11.3, Outcome.PASS), (22.5, Outcome.FAIL)])
def test_memory_is_held_to_its_share_at_every_number_of_ranks(together: float, outcome: Outcome) -> None:
    runs = [held(1, 22.4, 22.4), held(1, 22.5, 22.4), held(2, together, 11.2)]
    observed = [*_results.memory_excess(runs)]
    here = {"device": "cuda", "trained": "yes", "spread": "fsdp2", "offload": "no"}
    facts = [Fact(name=name, value=value) for name, value in here.items()]
    assert outcomes(*observed, *facts)["memory_excess"] is outcome
    (fact,) = (one for one in observed if isinstance(one, Fact))
    shares = {"1": {"held_gib": 22.5, "expected_gib": 22.4}, "2": {"held_gib": together, "expected_gib": 11.2}}
    assert fact.value == {"by_ranks": shares}


def test_memory_that_is_not_known_or_offloaded_has_no_excess() -> None:
    assert [*_results.memory_excess([held(2, 3.0, None), held(2, 3.0, 0.0), trained(problem="x")])] == []


def test_the_last_words_of_a_failure_are_shown() -> None:
    observed = [*_results.combined_observations({"a": trained(problem="rank 3: out of paper", exit_code=1)})]
    assert Fact(name="problems", value={"a": "rank 3: out of paper"}) in observed


def test_figures_are_of_what_is_known(tmp_path: Path) -> None:
    observed = [*_results.training_observations(place("cpu", tmp_path), trained(4, 3, 2, 1), "all")]
    values = {one.name: one.value for one in observed if isinstance(one, Metric)}
    assert values["tokens_per_second_per_gpu.all"] == 100.0
    assert values["loss_above_entropy_bound.all"] == 0.5  # of the last two
    assert "mfu.all" not in values
    assert [one.name for one in observed if isinstance(one, Series)] == ["loss.all", "grad_norm.all"]


def test_the_log_of_who_failed_comes_before_that_of_the_first(tmp_path: Path) -> None:
    """All groups of ranks that train at once keep theirs under one name."""
    for rank in range(12):
        (tmp_path / f"gpu-0.rank{rank}.err").write_text("words")
    (tmp_path / "gpu-0.rank8.err").write_text("")
    late, first = (
        ChildResult(error="late", exit_code=-15, failure_order=2),
        ChildResult(error="why", exit_code=1, failure_order=1),
    )

    def logs(answers: dict[int, ChildResult], brief: bool = False) -> list[str]:
        found = replace(_workload._result_of_ranks("gpu", tmp_path / "gpu-1", answers), log_prefix=tmp_path / "gpu-0")
        observed = _results.training_observations(place("cpu", tmp_path), found, metrics_only=brief)
        return [one.path for one in observed if isinstance(one, Artifact)]

    assert (
        logs({2: late, 10: first}) == logs({2: late, 10: first}, brief=True) == ["gpu-0.rank10.err", "gpu-0.rank2.err"]
    )
    assert logs({2: first, 10: late}) == ["gpu-0.rank2.err"]
    assert logs({8: late, 10: first}) == ["gpu-0.rank10.err"]  # who said nothing has no log
    good = {2: ChildResult({}), 10: ChildResult({})}
    assert (logs(good), logs(good, brief=True)) == (["gpu-0.rank2.err"], [])


def test_a_step_told_twice_makes_up_for_none_that_is_missing() -> None:
    lost, twice = trained(4, 3, 2), trained(4, 3, 2, 1, 1)
    again = TrainingResult(**{**vars(twice), "steps": (*lost.steps, lost.steps[0])})
    for runs in ({"a": again}, {"a": lost, "b": twice}):
        assert outcomes(*_results.combined_observations(runs))["steps_missing"] is Outcome.FAIL


@pytest.mark.parametrize("loss", ["1.0", True, 10**400, float("nan"), float("inf"), [1.0], {}])
def test_what_no_float_holds_is_no_loss(loss: Any) -> None:
    found = outcomes(*_results.combined_observations({"a": trained(4, 3, loss, 1)}))
    assert found["nonfinite_losses"] is Outcome.FAIL


def timed_result(*seconds: float, measured: int, tokens: int = 8192, ranks: int = 2) -> TrainingResult:
    """As metrics.py reports it: tokens over seconds of the last ``measured`` steps."""
    steps = tuple({"step": n, "loss": 5.0 - n, "tokens": tokens, "seconds": s} for n, s in enumerate(seconds, 1))
    speed = tokens * measured / sum(sorted(seconds[-measured:])) / ranks
    found = {"tokens_per_second_per_gpu": speed, "mfu_percent": 40.0, "steps_measured": measured, "world_size": ranks}
    return TrainingResult(found, Path("none"), "", 0, steps, (0, 1), len(steps), 9.0)


def metrics_by_name(one: TrainingResult) -> dict[str, Metric]:
    every = _results.training_observations(place("cuda:0"), one, "native", metrics_only=True)
    return {metric.name: metric for metric in every if isinstance(metric, Metric)}


def test_a_speed_comes_with_those_of_the_very_steps_that_it_is_of() -> None:
    found = metrics_by_name(
        timed_result(30.0, 9.0, 1.0, 2.0, 1.0, measured=3)
    )  # not of the first two, that compile and settle
    speed, mfu = found["tokens_per_second_per_gpu.native"], found["mfu.native"]
    assert speed.value == pytest.approx(3 * 4096 / 4)
    assert speed.samples == pytest.approx((4096, 2048, 4096))
    assert mfu.samples == pytest.approx((40 * 4 / 3, 40 * 2 / 3, 40 * 4 / 3))
    assert found["wall_seconds.native"].samples == ()


def test_very_many_steps_are_told_in_windows_and_the_speed_is_among_them() -> None:
    seconds = [1 + (number % 7) / 10 for number in range(1000)]
    speed = metrics_by_name(timed_result(*seconds, measured=900))["tokens_per_second_per_gpu.native"]
    assert len(speed.samples) == 16  # of 57 steps each
    assert min(speed.samples) < speed.value < max(speed.samples)
    assert speed.samples[0] == pytest.approx(57 * 4096 / sum(seconds[100:157]))


@pytest.mark.parametrize("change", [{"steps_measured": 4}, {"world_size": 3}, {"steps_measured": None}])
def test_lines_of_other_steps_are_no_samples(change: dict[str, Any]) -> None:
    one = timed_result(30.0, 9.0, 1.0, 2.0, 1.0, measured=3)
    assert metrics_by_name(replace(one, metrics={**(one.metrics or {}), **change}))["mfu.native"].samples == ()
    cut = replace(one, steps=one.steps[:-1])
    assert metrics_by_name(cut)["tokens_per_second_per_gpu.native"].samples == ()
