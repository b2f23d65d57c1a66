from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from seatrial.checks.declare import Value
from seatrial.checks.training.ddp import CHECK, _scaling_answers
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Fact, Measurement, Outcome, Threshold
from seatrial.train.markov import ENTROPY
from seatrial.worker import measure
from tests.checks.training.check_helpers import make_context
from tests.train import driver, ranks

RANKS = 3  # two ranks have no majority
SMALL = {"parity_steps": 4, "steps": 3, "batch": 2, "seq_len": 16, "dim": 64, "layers": 1}
SCENARIOS = {
    "healthy": None,
    "flipped_bit": "flipped_bit",
    "dropped_sample": "dropped_sample",
    "frozen_order": "frozen_order",
    "not_reduced": "not_reduced",
    "sum_not_mean": "sum_not_mean",
    "exploding": "exploding",
    "wrong_local_rank": "wrong_local_rank",
    "slow_without_ddp": "slow_without_ddp",
}
Runs = dict[str, list[Measurement]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def runs(out: Path) -> Runs:
    """Scenario → the measurement of each rank, from one start of three processes."""
    scenarios = {name: {"fault": fault, "options": SMALL} for name, fault in SCENARIOS.items()}
    records = [json.loads(text) for text in ranks.require_success(ranks.run(RANKS, driver.main, scenarios, out))]
    return {name: [Measurement.model_validate(record[name]) for record in records] for name in SCENARIOS}


def outcomes(measurements: list[Measurement]) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, measurements, {}, "t")}


def failed(measurements: list[Measurement]) -> set[str]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    return {metric for metric, outcome in outcomes(measurements).items() if outcome is Outcome.FAIL}


def value(measurements: list[Measurement], name: str) -> float:
    (metric,) = (metric for metric in measurements[0].metrics if metric.name == name)
    assert metric.unit == CHECK.units[name]
    return metric.value


def evidence(measurements: list[Measurement], name: str) -> Any:
    return next(metric.evidence for metric in measurements[0].metrics if metric.name == name)


GPU_RULES = ("shared_gpus", "tokens_per_second_per_gpu", "scaling_noise")


def pop_gpu_rules(verdicts: dict[str, Outcome]) -> set[Outcome]:
    """Remove the outcomes of rules for GPUs and return them."""
    return {verdicts.pop(name) for name in GPU_RULES}


def ignore_scaling(verdicts: dict[str, Outcome]) -> None:
    """Remove the outcome on an efficiency above 100 %: three steps of a tiny model scale randomly."""
    assert verdicts.pop("scaling_above_limit") in (Outcome.PASS, Outcome.WARN)


@pytest.mark.training
def test_healthy_processes_pass_all_rules_on_a_cpu(runs: Runs) -> None:
    verdicts = outcomes(runs["healthy"])
    assert pop_gpu_rules(verdicts) == {Outcome.SKIP}
    assert set(verdicts) == {rule.metric for rule in CHECK.rules} - set(GPU_RULES)
    ignore_scaling(verdicts)
    assert verdicts.pop("rank_slowdown") is Outcome.SKIP  # 3 steps are too few
    assert set(verdicts.values()) == {Outcome.PASS}


@pytest.mark.training
def test_rank_0_reports_the_cluster_and_each_rank_its_step_times(runs: Runs) -> None:
    step_times = {"step_time", "step_time_max", "step_time_without_communication"}
    for rank, measurement in enumerate(runs["healthy"]):
        of_rank = {metric.name for metric in measurement.metrics if metric.subject == f"node0/rank{rank}"}
        cluster = {metric.name for metric in measurement.metrics if metric.subject == CLUSTER}
        assert of_rank == step_times | ({"rank_data_wait"} if rank == 0 else set())  # rank 0 reports that of all ranks
        cluster.discard("scaling_efficiency")  # reported only if the noise is small
        expected = (
            set(CHECK.units) - step_times - {"shared_gpus", "scaling_efficiency", "rank_slowdown", "rank_data_wait"}
        )
        assert cluster == (expected if rank == 0 else set())
        assert bool(measurement.facts) is (rank == 0)


@pytest.mark.training
def test_fact_processes(runs: Runs) -> None:
    processes = runs["healthy"][0].facts["processes"]
    assert isinstance(processes, list)
    assert [(p["rank"], p["local_rank"], p["gpu_uuid"]) for p in processes] == [(r, r, None) for r in range(RANKS)]  # type: ignore[index,call-overload]


@pytest.mark.training
def test_indivisible_samples_are_dropped(runs: Runs) -> None:
    facts = runs["healthy"][0].facts
    assert facts["sampler_samples"] == RANKS * 4 * 4 + 1
    assert facts["sampler_dropped_samples"] == 1


@pytest.mark.training
def test_losses_equal_those_of_one_process_and_fall(runs: Runs) -> None:
    ddp, single_process = runs["healthy"][0].series
    assert (ddp.name, single_process.name) == ("loss.ddp", "loss.single_process")
    assert ddp.y == pytest.approx(single_process.y, rel=1e-5)
    assert len(ddp.y) == SMALL["parity_steps"]
    healthy = runs["healthy"]
    assert value(healthy, "loss_drop") == pytest.approx(ddp.y[0] - ddp.y[-1])
    assert value(healthy, "loss_above_entropy_bound") == pytest.approx(ddp.y[-1] - ENTROPY)


@pytest.mark.training
def test_speed_counts_tokens_of_all_ranks(runs: Runs) -> None:
    healthy = runs["healthy"]
    total, each = value(healthy, "tokens_per_second"), value(healthy, "tokens_per_second_per_gpu")
    assert total == pytest.approx(RANKS * each)
    slowest = max(m.value for run in healthy for m in run.metrics if m.name == "step_time_max")
    assert total > RANKS * 2 * 16 / slowest * 0.99
    assert len(next(m for m in healthy[0].metrics if m.name == "tokens_per_second").samples) == SMALL["steps"]
    assert len(evidence(healthy, "scaling_above_limit")["pairs_of_windows"]) == SMALL["steps"]
    shape = cast("dict[str, int]", healthy[0].facts["training"])
    assert shape["flops_per_token"] == 6 * shape["parameters"] + 12 * shape["layers"] * shape["dim"] * shape["seq_len"]
    assert {"method", "cpu_only"} <= healthy[0].facts.keys()


@pytest.mark.training
def test_flipped_bit_names_its_rank(runs: Runs) -> None:
    assert failed(runs["flipped_bit"]) == {"parameter_digests_differing"}
    assert value(runs["flipped_bit"], "parameter_digests_differing") == 1
    ((reason, ranks),) = evidence(runs["flipped_bit"], "parameter_digests_differing").items()
    assert "from the majority" in reason
    assert [rank["subject"] for rank in ranks] == ["node0/rank1"]


@pytest.mark.training
def test_dropped_sample_breaks_sampler_and_parity(runs: Runs) -> None:
    assert failed(runs["dropped_sample"]) == {
        "sampler_missing",
        "sampler_unexpected_duplicates",
        "parity_max_relative_difference",
    }
    assert value(runs["dropped_sample"], "sampler_missing") == 1


@pytest.mark.training
def test_same_order_in_all_epochs_fails(runs: Runs) -> None:
    assert failed(runs["frozen_order"]) == {"sampler_order_errors"}


@pytest.mark.training
def test_missing_all_reduce_breaks_parity_and_digests(runs: Runs) -> None:
    assert failed(runs["not_reduced"]) == {"parity_max_relative_difference", "parameter_digests_differing"}
    assert "without a majority" in str(evidence(runs["not_reduced"], "parameter_digests_differing"))


@pytest.mark.training
def test_sum_instead_of_mean_breaks_parity_only(runs: Runs) -> None:
    assert failed(runs["sum_not_mean"]) == {"parity_max_relative_difference"}


@pytest.mark.training
def test_nonfinite_loss_fails_without_hanging(runs: Runs) -> None:
    assert "nonfinite_losses" in failed(runs["exploding"])
    assert all(map(math.isfinite, runs["exploding"][0].series[0].y))


@pytest.mark.training
def test_wrong_local_rank_is_named(runs: Runs) -> None:
    assert failed(runs["wrong_local_rank"]) == {"rank_mismatches"}
    assert evidence(runs["wrong_local_rank"], "rank_mismatches").keys() == {"rank 1"}


@pytest.mark.training
def test_efficiency_above_100_percent_is_not_reported(runs: Runs) -> None:
    measured = runs["slow_without_ddp"]
    assert failed(measured) == set()
    assert outcomes(measured)["scaling_above_limit"] is Outcome.WARN
    thresholds = {"scaling_efficiency": Threshold.parse("> 90 %")}
    verdicts = {verdict.metric: verdict for verdict in judge_check(CHECK, measured, thresholds, "t")}
    assert verdicts["scaling_efficiency"].outcome is Outcome.ERROR
    assert "range" in verdicts["scaling_efficiency"].message  # too few windows for an interval
    assert "range" in verdicts["scaling_above_limit"].evidence


@pytest.mark.parametrize(("device", "noise"), [("cuda", Outcome.WARN), ("cpu", Outcome.SKIP)])
def test_noisy_efficiency_warns_on_gpus(tmp_path: Path, device: str, noise: Outcome) -> None:
    """On a CPU ranks share cores: the noise is recorded, and a threshold on the efficiency is an ERROR."""
    given = [*_scaling_answers([99, 140, 120, 60, 110, 105]), Fact(name="device", value=device)]
    measured = [measure(replace(CHECK, measure=lambda context, options: iter(given)), make_context(tmp_path), {})]
    verdicts = outcomes(measured)
    assert (verdicts["scaling_above_limit"], verdicts["scaling_noise"]) == (Outcome.PASS, noise)
    thresholds = {"scaling_efficiency": Threshold.parse("> 90 %")}
    efficiency = [each for each in judge_check(CHECK, measured, thresholds, "t") if each.metric == "scaling_efficiency"]
    assert [each.outcome for each in efficiency] == [Outcome.ERROR]


@pytest.mark.parametrize(
    ("percent", "above_limit", "reported"),
    [
        ([92, 95, 93, 94, 96, 95], 0, True),
        ([99, 118, 110, 100, 110, 105], 0, True),  # above 100 % within the noise
        ([99, 140, 120, 60, 110, 105], 0, False),  # too noisy
        ([101, 103, 102, 101, 104, 103], 1, True),
        ([150, 103, 120, 197, 104, 106], 3, False),
        ([197.6], 97.6, False),
    ],
)
def test_scaling_limits(percent: list[float], above_limit: float, reported: bool) -> None:
    values = {item.name: item for item in _scaling_answers(percent) if isinstance(item, Value)}
    assert values["scaling_above_limit"].value == pytest.approx(above_limit)
    assert ("scaling_efficiency" in values) is reported
    assert not reported or values["scaling_efficiency"].samples == tuple(percent)


@pytest.fixture
def single_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group with one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, text in {**names, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, text)
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_process_group")
def test_single_process_passes(tmp_path: Path) -> None:
    measured = measure(CHECK, make_context(tmp_path, ranks=1), dict(SMALL))
    assert measured.error is None
    verdicts = outcomes([measured])
    assert pop_gpu_rules(verdicts) == {Outcome.SKIP}
    ignore_scaling(verdicts)
    assert verdicts.pop("rank_slowdown") is Outcome.SKIP  # no other rank
    assert set(verdicts.values()) == {Outcome.PASS}
    assert measured.facts["sampler_dropped_samples"] == 0


@pytest.mark.parametrize(
    "options", [{"dim": 100}, {"parity_steps": 1}, {"steps": 0}, {"seqlen": 5}, {"min_seconds": -1}]
)
def test_invalid_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CHECK.options.model_validate(options)
