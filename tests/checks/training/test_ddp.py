from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist

from seatrial.checks.base import Context
from seatrial.checks.training.ddp import CHECK, METRICS, _scaling
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Measurement, Metric, Outcome, Threshold
from seatrial.train.markov import ENTROPY
from seatrial.worker import measure
from tests.train import driver, ranks

RANKS = 3  # with two there is no majority
SMALL = {"parity_steps": 4, "steps": 3, "batch": 2, "seq_len": 16, "dim": 64, "layers": 1}
SCENARIOS = {
    "healthy": None,
    "flipped_bit": "flipped_bit",
    "dropped_sample": "dropped_sample",
    "frozen_order": "frozen_order",
    "not_exchanged": "not_exchanged",
    "sum_not_mean": "sum_not_mean",
    "exploding": "exploding",
    "wrong_local_rank": "wrong_local_rank",
    "slow_alone": "slow_alone",
}
Runs = dict[str, list[Measurement]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def runs(out: Path) -> Runs:
    """Scenario → what each rank measured, all in one start of three real processes."""
    scenarios = {name: {"fault": fault, "options": SMALL} for name, fault in SCENARIOS.items()}
    told = [json.loads(one) for one in ranks.heard(ranks.run(RANKS, driver.main, scenarios, out))]
    return {name: [Measurement.model_validate(rank[name]) for rank in told] for name in SCENARIOS}


def outcomes(measurements: list[Measurement]) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, measurements, {}, "t")}


def broken(measurements: list[Measurement]) -> set[str]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    return {metric for metric, outcome in outcomes(measurements).items() if outcome is Outcome.FAIL}


def value(measurements: list[Measurement], name: str) -> float:
    (found,) = (metric for metric in measurements[0].metrics if metric.name == name)
    assert found.unit == METRICS[name]
    return found.value


def without_noise(verdicts: dict[str, Outcome]) -> None:
    """Three steps of a tiny model, beside other tests, may scale as they like."""
    assert {verdicts.pop("scaling_above_limit"), verdicts.pop("scaling_noise")} <= {Outcome.PASS, Outcome.WARN}


@pytest.mark.training
def test_healthy_processes_pass_every_rule_and_gpus_are_skipped(runs: Runs) -> None:
    verdicts = outcomes(runs["healthy"])
    assert verdicts.pop("shared_gpus") is Outcome.SKIP
    assert set(verdicts) == {rule.metric for rule in CHECK.rules} - {"shared_gpus"}
    without_noise(verdicts)
    assert set(verdicts.values()) == {Outcome.PASS}


def test_rank_0_speaks_for_the_cluster_and_every_rank_for_itself(runs: Runs) -> None:
    own = {"step_time", "step_time_max", "step_time_without_communication"}
    for rank, measurement in enumerate(runs["healthy"]):
        mine = {metric.name for metric in measurement.metrics if metric.subject == f"node0/rank{rank}"}
        cluster = {metric.name for metric in measurement.metrics if metric.subject == CLUSTER}
        assert mine == own
        cluster.discard("scaling_efficiency")  # given where it is not all noise
        assert cluster == (set(METRICS) - own - {"shared_gpus", "scaling_efficiency"} if rank == 0 else set())
        assert bool(measurement.facts) is (rank == 0)


def test_the_processes_are_on_record(runs: Runs) -> None:
    processes = runs["healthy"][0].facts["processes"]
    assert isinstance(processes, list)
    assert [(p["rank"], p["local_rank"], p["gpu_uuid"]) for p in processes] == [(r, r, None) for r in range(RANKS)]  # type: ignore[index,call-overload]
    assert all(p["cpus"] for p in processes)  # type: ignore[index,call-overload]


def test_the_samples_do_not_divide_and_the_last_is_left_out(runs: Runs) -> None:
    facts = runs["healthy"][0].facts
    assert facts["sampler_samples"] == RANKS * 4 * 4 + 1
    assert facts["sampler_dropped_samples"] == 1


def test_losses_are_those_of_one_process_and_fall(runs: Runs) -> None:
    together, alone = runs["healthy"][0].series
    assert (together.name, alone.name) == ("loss.together", "loss.alone")
    assert together.y == pytest.approx(alone.y, rel=1e-5)
    assert len(together.y) == SMALL["parity_steps"]
    healthy = runs["healthy"]
    assert value(healthy, "loss_drop") == pytest.approx(together.y[0] - together.y[-1])
    assert value(healthy, "loss_above_entropy_bound") == pytest.approx(together.y[-1] - ENTROPY)


def test_speed_is_counted_in_tokens_of_all_ranks(runs: Runs) -> None:
    healthy = runs["healthy"]
    total, each = value(healthy, "tokens_per_second"), value(healthy, "tokens_per_second_per_gpu")
    assert total == pytest.approx(RANKS * each)
    slowest = max(m.value for run in healthy for m in run.metrics if m.name == "step_time_max")
    assert total > RANKS * 2 * 16 / slowest * 0.99
    assert len(next(m for m in healthy[0].metrics if m.name == "tokens_per_second").samples) == SMALL["steps"]
    assert len(next(m for m in healthy[0].metrics if m.name == "scaling_above_limit").samples) == SMALL["steps"]
    load = cast("dict[str, int]", healthy[0].facts["load"])
    assert load["flops_per_token"] == 6 * load["parameters"] + 12 * load["layers"] * load["dim"] * load["seq_len"]
    assert "without communication" in str(healthy[0].facts["scaling_baseline"])
    assert "says nothing of any GPU" in str(healthy[0].facts["cpu_only"])


def test_metrics_are_written_once_and_finite(runs: Runs, out: Path) -> None:
    (artifact,) = runs["healthy"][0].artifacts
    assert runs["healthy"][1].artifacts == ()
    written = json.loads((out / artifact.path).read_text())
    assert written["metrics"]["parity_max_relative_difference"] < 1e-5
    assert written["world_size"] == RANKS
    assert written["options"]["parity_steps"] == SMALL["parity_steps"]


def test_one_flipped_bit_is_found_and_its_rank_named(runs: Runs) -> None:
    assert broken(runs["flipped_bit"]) == {"parameter_digests_differing"}
    assert value(runs["flipped_bit"], "parameter_digests_differing") == 1
    odd = runs["flipped_bit"][0].facts["differing_ranks"]
    assert isinstance(odd, dict)
    ((why, ranks),) = odd.items()
    assert why == "differ from the majority"
    assert [rank["subject"] for rank in ranks] == ["node0/rank1"]  # type: ignore[union-attr,index,call-overload]


def test_a_dropped_sample_is_found_and_one_process_that_reads_it_computes_something_else(runs: Runs) -> None:
    assert broken(runs["dropped_sample"]) == {
        "sampler_missing",
        "sampler_unexpected_duplicates",
        "parity_max_relative_difference",
    }
    assert value(runs["dropped_sample"], "sampler_missing") == 1


def test_an_order_that_no_epoch_changes_is_found(runs: Runs) -> None:
    assert broken(runs["frozen_order"]) == {"sampler_order_errors"}


def test_gradients_that_are_not_exchanged_break_parity_and_the_ranks_apart(runs: Runs) -> None:
    assert broken(runs["not_exchanged"]) == {"parity_max_relative_difference", "parameter_digests_differing"}
    assert "no majority" in str(runs["not_exchanged"][0].facts["differing_ranks"])


def test_a_sum_taken_for_a_mean_breaks_parity_while_all_ranks_agree(runs: Runs) -> None:
    assert broken(runs["sum_not_mean"]) == {"parity_max_relative_difference"}


def test_a_loss_that_is_not_finite_fails_and_does_not_hang_or_crash(runs: Runs) -> None:
    assert "nonfinite_losses" in broken(runs["exploding"])
    assert all(map(math.isfinite, runs["exploding"][0].series[0].y))


def test_a_process_in_the_wrong_seat_is_named(runs: Runs) -> None:
    assert broken(runs["wrong_local_rank"]) == {"rank_mismatches"}
    assert runs["wrong_local_rank"][0].facts["rank_errors"] == {"rank 1": "LOCAL_RANK is 0, torch has 1"}


def test_an_efficiency_beyond_100_percent_is_not_given_and_cannot_pass(runs: Runs) -> None:
    measured = runs["slow_alone"]
    assert broken(measured) == set()
    assert outcomes(measured)["scaling_above_limit"] is Outcome.WARN
    wanted = {"scaling_efficiency": Threshold.parse("> 90 %")}
    judged = {verdict.metric: verdict for verdict in judge_check(CHECK, measured, wanted, "t")}
    assert judged["scaling_efficiency"].outcome is Outcome.ERROR
    assert "scaling_efficiency was not measured (its 95 % interval is " in judged["scaling_efficiency"].message
    assert "cannot be trusted" in judged["scaling_above_limit"].message
    assert "95 % interval" in judged["scaling_above_limit"].evidence


def test_an_efficiency_that_is_all_noise_is_told_as_that() -> None:
    metrics = tuple(seen for seen in _scaling([99, 140, 120, 60, 110, 105]) if isinstance(seen, Metric))
    judged = outcomes([Measurement(check=CHECK.name, subject="node0/rank0", metrics=metrics)])
    assert (judged["scaling_above_limit"], judged["scaling_noise"]) == (Outcome.PASS, Outcome.WARN)


@pytest.mark.parametrize(
    ("percent", "excess", "given"),
    [
        ([92, 95, 93, 94, 96, 95], 0, True),
        ([99, 118, 110, 100, 110, 105], 0, True),  # above 100 %, within its noise
        ([99, 140, 120, 60, 110, 105], 0, False),  # so noisy that it says nothing
        ([101, 103, 102, 101, 104, 103], 1, True),
        ([150, 103, 120, 197, 104, 106], 3, False),
        ([197.6], 97.6, False),
    ],
)
def test_noise_explains_an_efficiency_above_100_percent_or_it_does_not(
    percent: list[float], excess: float, given: bool
) -> None:
    found = {seen.name: seen for seen in _scaling(percent) if isinstance(seen, Metric)}
    assert found["scaling_above_limit"].value == pytest.approx(excess)
    assert ("scaling_efficiency" in found) is given
    assert found["scaling_above_limit"].samples == tuple(percent)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, text in {**names, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, text)
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_process_passes_too(tmp_path: Path) -> None:
    context = Context(
        node="node0",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=tmp_path,
        run_dir=tmp_path,
    )
    measured = measure(CHECK, context, dict(SMALL))
    assert measured.error is None
    verdicts = outcomes([measured])
    assert verdicts.pop("shared_gpus") is Outcome.SKIP
    without_noise(verdicts)
    assert set(verdicts.values()) == {Outcome.PASS}
    assert measured.facts["sampler_dropped_samples"] == 0


@pytest.mark.parametrize(
    "options", [{"dim": 100}, {"parity_steps": 1}, {"steps": 0}, {"seqlen": 5}, {"min_seconds": -1}]
)
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CHECK.options.model_validate(options)
