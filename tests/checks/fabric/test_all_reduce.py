from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.bench import collectives, group, rank
from seatrial.bench.collectives import CollectiveResult, Timings
from seatrial.bench.operations import OPERATIONS
from seatrial.checks.check import Context
from seatrial.checks.declare import Value
from seatrial.checks.fabric import _nccl_log, _results
from seatrial.checks.fabric._collective import NO_CUDA_GRAPH, _Modes
from seatrial.checks.fabric._sizes import CollectiveOptions, default_gpu_sizes
from seatrial.checks.fabric.collectives import CHECKS
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Measurement, NotApplicable, Outcome, Series, Verdict, Why, size_label
from tests.bench import driver
from tests.paths import FIXTURES
from tests.train import ranks

CHECK = CHECKS[0]
QUANTITIES = ("busbw", "latency", "latency_max")
ADDITIONAL = ["float16 64KiB", "bfloat16 64KiB"]  # data checks of the dtypes that are not timed
ADDITIONAL_NOTES = ["float16 64 KiB", "bfloat16 64 KiB"]
Records = dict[str, list[dict[str, Any]]]  # scenario → one record per rank

SMALL = {"sizes": ["4KiB"], "seconds_per_size": 0.05}
SCENARIOS: dict[str, dict[str, Any]] = {
    "no_fault": {"options": {"sizes": ["1MiB", "12 B", "64KiB"], "seconds_per_size": 0.3}, "fault": None},
    "bfloat16": {"options": {**SMALL, "dtype": "bfloat16"}, "fault": None},
    "wrong_contribution": {"options": SMALL, "fault": "wrong_contribution"},
    "flipped_bit": {"options": SMALL, "fault": "flipped_bit"},
    "late": {"options": SMALL, "fault": "late"},
    "no_memory": {"options": {"sizes": ["4KiB", "8MiB"], "seconds_per_size": 0.05}, "fault": "no_memory"},
    "no_memory_for_check": {
        "options": {"sizes": ["4KiB", "8MiB"], "seconds_per_size": 0.05},
        "fault": "no_memory_for_check",
    },
    "min_duration": {
        "options": {"sizes": ["4KiB", "64KiB"], "seconds_per_size": 0.05, "min_seconds_per_size": 1.0},
        "fault": None,
    },
    "too_large": {"options": {"sizes": ["1024TiB"]}, "fault": None},
    "modes": {
        "options": {
            "modes": ["percentiles", "cuda_graph", "back_to_back"],
            "percentile_sizes": ["4KiB", "64KiB"],
            "in_place": "both",
            "seconds_per_size": 0.6,
            "sizes": {"from": "8B", "to": "1KiB", "factor": 128},
        },
        "fault": "late",
    },
    "cuda_graph_only": {"options": {"modes": ["cuda_graph"]}, "fault": None},
    "nccl_buffers": {"options": {**SMALL, "buffers": "nccl"}, "fault": None},
    "flipped_percentiles": {
        "options": {"modes": ["percentiles"], "percentile_sizes": ["4KiB"], "seconds_per_size": 0.05},
        "fault": "flipped_bit",
    },
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """All scenarios in one real group of two gloo processes."""
    out = tmp_path_factory.mktemp("all_reduce")
    results = ranks.run(2, driver.main, CHECK.name, SCENARIOS, out, seconds=240)
    by_rank = [json.loads(line) for line in ranks.require_success(results)]
    return {name: [record[name] for record in by_rank] for name in SCENARIOS}


def metrics(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {metric["name"]: metric for metric in record["metrics"]}


def verdicts(record: dict[str, Any]) -> list[Verdict]:
    fields = {name: record[name] for name in ("metrics", "absent", "facts")}
    return judge_check(CHECK, [Measurement(check=CHECK.name, subject="node0/rank0", **fields)], {}, "t")


def evidence(record: dict[str, Any], metric: str, name: str) -> Any:
    return metrics(record)[metric]["evidence"][name]


def absent(record: dict[str, Any], why: Why) -> dict[str, str]:
    return {each["metric"]: each["reason"] for each in record["absent"] if each["why"] == why}


def test_rank_0_reports_the_cluster_and_every_rank_its_time(records: Records) -> None:
    first_rank, other = (metrics(record) for record in records["no_fault"])
    per_size = {f"{name}.{size}" for name in QUANTITIES for size in ("12B", "64KiB", "1MiB")}
    assert set(first_rank) == per_size | {"wrong_elements", "sizes_not_allocated", "rank_time.1MiB"}
    assert first_rank["sizes_not_allocated"]["value"] == 0
    assert set(other) == {"rank_time.1MiB"}
    assert {first_rank[name]["subject"] for name in per_size | {"wrong_elements"}} == {"cluster"}
    assert [rank_metrics["rank_time.1MiB"]["subject"] for rank_metrics in (first_rank, other)] == [
        "node0/rank0",
        "node1/rank1",
    ]
    assert records["no_fault"][1]["facts"] == {}


def test_every_metric_is_declared_with_its_unit(records: Records) -> None:
    for metric in records["no_fault"][0]["metrics"]:
        pattern = re.sub(r"\..*", ".*", metric["name"])
        assert CHECK.units[pattern] == metric["unit"]


def test_metrics_and_samples_are_consistent(records: Records) -> None:
    by_name = metrics(records["no_fault"][0])
    spread = records["no_fault"][0]["facts"]["spread"]
    for label, size in (("12B", 12), ("64KiB", 65536), ("1MiB", 1048576)):
        us = by_name[f"latency.{label}"]["value"]
        samples = sorted(by_name[f"latency.{label}"]["samples"])
        assert 5 < us < 1e6
        assert by_name[f"busbw.{label}"]["value"] == pytest.approx(
            size / us * 1e-3, rel=1e-5
        )  # factor 2 (2 - 1) / 2 = 1
        stored = [spread[label][name] for name in ("min_us", "max_us", "p50_us")]
        assert stored == pytest.approx([samples[0], samples[-1], us], rel=1e-5)  # samples have seven digits
        assert spread[label]["slowest_rank"] in ("node0/rank0", "node1/rank1")


def test_each_rank_reports_its_time(records: Records) -> None:
    first_rank, other = (metrics(record)["rank_time.1MiB"] for record in records["no_fault"])
    assert first_rank["samples"] != other["samples"]
    spread = records["no_fault"][0]["facts"]["spread"]["1MiB"]
    assert spread["slowest_rank_us"] == pytest.approx(max(first_rank["value"], other["value"]))


def test_sizes_are_measured_in_descending_order_with_progress(records: Records) -> None:
    first_rank, other = records["no_fault"]
    assert first_rank["notes"] == other["notes"] == ["1 MiB", "64 KiB", "12 B", *ADDITIONAL_NOTES]
    assert first_rank["facts"]["additional_data_checks"] == ADDITIONAL
    curve = {series["name"]: series for series in first_rank["series"]}["busbw"]
    assert (curve["x"], curve["x_unit"], curve["y_unit"]) == ([12, 65536, 1048576], "B", "GB/s")
    values = [metrics(first_rank)[f"busbw.{label}"]["value"] for label in ("12B", "64KiB", "1MiB")]
    assert curve["y"] == pytest.approx(values)


def test_facts_describe_the_measurement(records: Records) -> None:
    facts = records["no_fault"][0]["facts"]
    assert (facts["backend"], facts["world_size"], facts["dtype"], facts["in_place"]) == ("gloo", 2, "float32", True)
    assert facts["sizes"] == {"12B": 12, "64KiB": 65536, "1MiB": 1048576}
    assert "host clock" in facts["timing"]
    assert facts["api"] == "torch's process group"
    assert "torch's process group" in facts["method"]
    assert "nccl_version" not in facts
    for label, counts in facts["iterations"].items():
        samples = metrics(records["no_fault"][0])[f"busbw.{label}"]["samples"]
        assert counts["windows"] == len(samples)
        assert counts["warmup"] >= 3
        assert counts["per_window"] >= 1


def test_timing_of_a_size_ends_after_its_seconds(records: Records) -> None:
    record = records["no_fault"][0]
    for label, counts in record["facts"]["iterations"].items():
        us = metrics(record)[f"latency.{label}"]["samples"]  # the times of the slower rank decide, this is their mean
        assert counts["per_window"] * sum(us[:-1]) * 1e-6 < 0.3


@pytest.mark.parametrize("scenario", ["no_fault", "bfloat16", "late"])
def test_correct_sums_have_no_wrong_elements(records: Records, scenario: str) -> None:
    first_rank = records[scenario][0]
    assert metrics(first_rank)["wrong_elements"]["value"] == 0
    assert metrics(first_rank)["wrong_elements"]["evidence"] is None


def expected_sum(position: int) -> int:
    """The sum of both ranks at a position: rank 1 adds one, and the period fits into 24 bits."""
    period = 2**24 - 1
    pattern = position * 1_000_000_007 % period - period // 2
    return pattern + (pattern + 1)


def test_wrong_contribution_is_detected_on_both_ranks(records: Records) -> None:
    first_rank = records["wrong_contribution"][0]
    assert metrics(first_rank)["wrong_elements"]["value"] == 6
    right = expected_sum(driver.WRONG_OFFSET)
    wrong = evidence(first_rank, "wrong_elements", "wrong_data")
    assert [entry["size"] for entry in wrong[::2]] == ["4KiB", *ADDITIONAL]
    wrong = wrong[:2]
    assert [(entry["rank"], entry["subject"]) for entry in wrong] == [(0, "node0/rank0"), (1, "node1/rank1")]
    for entry in wrong:
        assert (entry["size"], entry["offset"], entry["wrong"]) == ("4KiB", driver.WRONG_OFFSET, 1)
        assert (entry["expected"], entry["got"]) == (f"{right:.1f}", f"{right + 1:.1f}")


def test_flipped_bit_is_located_by_rank_offset_and_bit(records: Records) -> None:
    first_rank = records["flipped_bit"][0]
    assert metrics(first_rank)["wrong_elements"]["value"] == 3
    first, *others = evidence(first_rank, "wrong_elements", "wrong_data")
    assert [entry["size"] for entry in others] == ADDITIONAL
    assert (first["rank"], first["offset"]) == (driver.FAULTY_RANK, driver.WRONG_OFFSET)
    assert first["xor"] == f"0x{1 << driver.FLIPPED_BIT:08x}"


def test_late_rank_increases_the_time(records: Records) -> None:
    for record in records["late"]:
        assert metrics(record)["rank_time.4KiB"]["value"] >= driver.LATE_S * 1e6


def test_minimum_duration_holds_on_all_ranks(records: Records) -> None:
    first_rank, other = records["min_duration"]
    for label, counts in first_rank["facts"]["iterations"].items():
        us = metrics(first_rank)[f"latency.{label}"]["samples"]
        # mean over two ranks; the slower one is at most twice as slow
        assert counts["per_window"] * sum(us) * 1e-6 >= 0.5
    assert other["error"] is None
    assert len(metrics(other)["rank_time.64KiB"]["samples"]) == first_rank["facts"]["iterations"]["64KiB"]["windows"]


def test_size_that_does_not_fit_on_one_rank_is_an_error(records: Records) -> None:
    first_rank, other = records["no_memory"]
    assert first_rank["error"] is other["error"] is None
    assert "busbw.4KiB" in metrics(first_rank)
    assert "busbw.8MiB" not in metrics(first_rank)
    assert set(metrics(other)) == {"rank_time.4KiB"}
    reason = "CUDA out of memory. Tried to allocate more"
    assert evidence(first_rank, "sizes_not_allocated", "not_allocated") == {"8MiB": {"node1/rank1": reason}}
    (verdict,) = (verdict for verdict in verdicts(first_rank) if verdict.metric == "sizes_not_allocated")
    assert verdict.outcome is Outcome.ERROR
    assert reason in verdict.evidence


def test_size_whose_data_check_does_not_fit_is_not_timed(records: Records) -> None:
    first_rank, other = records["no_memory_for_check"]
    assert first_rank["error"] is other["error"] is None
    not_allocated = evidence(first_rank, "sizes_not_allocated", "not_allocated")
    assert not_allocated == {"8MiB": {"node1/rank1": "CUDA out of memory. Tried to compare"}}
    assert "busbw.4KiB" in metrics(first_rank)


def test_omitted_default_sizes_are_recorded(records: Records) -> None:
    omitted = absent(records["no_memory"][0], Why.NOT_REQUESTED)
    assert set(omitted) == {f"busbw.{size}" for size in ("10MiB", "1MiB", "64KiB")}
    assert all("4KiB, 8MiB" in reason for reason in omitted.values())


def test_allocated_sizes_pass(records: Records) -> None:
    judged = {verdict.metric: verdict.outcome for verdict in verdicts(records["no_fault"][0])}
    assert judged["sizes_not_allocated"] is Outcome.PASS


def test_no_allocated_size_is_an_error(records: Records) -> None:
    for record in records["too_large"]:
        assert record["error"].startswith("SeatrialError: no buffer could be allocated")
        assert "1024TiB" in record["error"]
        assert record["metrics"] == []


def test_latency_max_is_that_of_the_slowest_rank(records: Records) -> None:
    by_name = metrics(records["no_fault"][0])
    for mean, slowest in zip(by_name["latency.64KiB"]["samples"], by_name["latency_max.64KiB"]["samples"], strict=True):
        assert mean <= slowest <= 2 * mean


def test_percentiles_are_reported_with_enough_samples(records: Records) -> None:
    first_rank, other = records["modes"]
    by_name, not_measured = metrics(first_rank), absent(first_rank, Why.DOES_NOT_APPLY)
    for label, size in (("4KiB", 4096), ("64KiB", 65536)):
        us = by_name[f"p50.{label}"]["samples"]
        assert evidence(first_rank, f"p50.{label}", "bytes") == size
        assert evidence(first_rank, f"p50.{label}", "slowest_rank") in ("node0/rank0", "node1/rank1")
        assert 1 <= len(us) <= 0.6 / driver.LATE_S
        assert by_name[f"p50.{label}"]["value"] >= driver.LATE_S * 1e6
        assert (f"p95.{label}" in by_name) is (len(us) >= 59)  # fewer on a loaded machine
        for name in (f"p99.{label}", f"p99_ratio.{label}"):
            assert not_measured[name] == f"p99 needs 299 operations, {len(us)} were timed"
        assert by_name[f"cv.{label}"]["unit"] == "%"
    assert set(metrics(other)) == {"rank_time.1KiB"}


def test_all_modes_run_in_order_and_gloo_has_no_cuda_graph(records: Records) -> None:
    first_rank = records["modes"][0]
    assert first_rank["notes"] == ["1 KiB", "8 B", "percentiles 64 KiB", "percentiles 4 KiB", *ADDITIONAL_NOTES]
    not_applicable = absent(first_rank, Why.DOES_NOT_APPLY)
    assert not_applicable["cuda_graph_busbw.*"] == not_applicable["cuda_graph_latency.*"] == NO_CUDA_GRAPH
    assert "; back_to_back: median of" in first_rank["facts"]["method"]
    assert first_rank["facts"]["method"].endswith(_results.MODE_DESCRIPTIONS["percentiles"])
    for quantity in QUANTITIES:
        assert not_applicable[f"{quantity}_out_of_place.*"].startswith("torch's process group")
    assert first_rank["facts"]["sizes"] == {"8B": 8, "1KiB": 1024}
    assert first_rank["error"] is None


def test_no_applicable_mode_is_a_skip(records: Records) -> None:
    assert [record["error"] for record in records["cuda_graph_only"]] == [f"NotApplicable: {NO_CUDA_GRAPH}"] * 2


def test_unavailable_buffers_are_an_error(records: Records) -> None:
    for record in records["nccl_buffers"]:
        assert re.match("SeatrialError: .*buffers.*gloo", record["error"])
        assert record["metrics"] == []


def test_wrong_bit_is_detected_in_every_mode(records: Records) -> None:
    first_rank = records["flipped_percentiles"][0]
    assert metrics(first_rank)["wrong_elements"]["value"] == 3
    assert evidence(first_rank, "wrong_elements", "wrong_data")[0]["size"] == "percentiles 4KiB"


def test_p99_needs_299_samples_and_uses_the_slowest_rank() -> None:
    windows = tuple((float(number), 1.0) for number in range(1, 300))
    result = CollectiveResult(4, Timings(windows=windows, per_window=1, warmup=2), {})
    answers = _results.percentile_values(4, result, ["n/gpu0", "n/gpu1"])
    values = {answer.name: answer.value for answer in answers if isinstance(answer, Value)}
    assert (values["p50.4B"], values["p95.4B"], values["p99.4B"]) == (150e6, 285e6, 297e6)
    assert values["cv.4B"] == pytest.approx(57.5, abs=0.1)  # uniform distribution: 1 / sqrt(3)


def test_drift_above_the_limit_is_in_the_method() -> None:
    steady, heating = (
        CollectiveResult(
            4, Timings(windows=tuple((value, value) for value in (1.0, 1.0, 1.0, last)), per_window=1, warmup=3), {}
        )
        for last in (1.019, 1.03)
    )
    group: dict[str, object] = {"backend": "nccl", "nccl_version": "2.28.9", "world_size": 2}
    facts = {"nodes": 1, "dtype": "float32", "buffers": "torch's allocator", "api": "torch's process group"}
    without_log = _results.method_text(
        group, facts, ["back_to_back"], {4: steady, 8: heating}, OPERATIONS["all_reduce"]
    )
    assert without_log.startswith("NCCL 2.28.9 over unknown transports")
    group |= {"transports": {"P2P/CUMEM": 48, "NET/IB/GDRDMA": 2}}
    with_log = _results.method_text(group, facts, ["back_to_back"], {4: steady, 8: heating}, OPERATIONS["all_reduce"])
    assert with_log.startswith("NCCL 2.28.9 over P2P/CUMEM + NET/IB/GDRDMA, 2 ranks")
    assert without_log.endswith("+3.0 % at 8B")
    assert "torch's allocator" in without_log
    assert "torch's process group" in without_log


def test_cuda_graph_metrics() -> None:
    timings = Timings(windows=((9e-6, 11e-6, 10e-6, 10e-6),) * 10, per_window=100, warmup=3)
    values = {
        metric.name: metric.value
        for metric in _results.speed_values(
            2**16, CollectiveResult(2**16, timings, {}, "all_gather"), prefix="cuda_graph_"
        )
    }
    assert values["cuda_graph_latency.64KiB"] == pytest.approx(10)
    assert values["cuda_graph_busbw.64KiB"] == pytest.approx(0.75 * 2**16 / 10e-6 / 1e9)


def test_cuda_graph_curves_over_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = Timings(windows=((10e-6,) * 4,) * 10, per_window=100, warmup=3)
    timed = partial(CollectiveResult, timings=timings, mismatches={}, operation="all_gather")
    monkeypatch.setattr(collectives, "measure_cuda_graph", lambda _operation, *, size, **_how: timed(size))
    context = Context(
        node="n",
        rank=0,
        world_size=4,
        local_rank=0,
        device="cuda:0",
        expected_gpus=None,
        artifacts_dir=tmp_path,
        run_dir=tmp_path,
    )
    modes = _Modes(
        OPERATIONS["all_gather"],
        default_gpu_sizes("all_gather"),
        CollectiveOptions(modes=("cuda_graph",)),
        context,
        ["n"],
    )
    curves = {curve.name: curve for curve in modes.run_cuda_graph() if isinstance(curve, Series)}
    assert list(curves["cuda_graph_latency"].x) == [16, 2**10, 2**14, 2**16, 2**18, 2**20]
    assert set(curves["cuda_graph_latency"].y) == {10.0}
    assert curves["cuda_graph_busbw"].y[-1] == pytest.approx(0.75 * 2**20 / 10e-6 / 1e9)


def test_transports_are_summed_over_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = FIXTURES / "nccl" / "h200-nvlink-2.28.9.log"
    monkeypatch.setattr(group, "nccl_log_path", lambda: log)
    monkeypatch.setattr(rank, "gather", lambda value: [value, {"NET/IB": 1, **value}])
    assert _nccl_log.connections_by_transport() == {"P2P/CUMEM": 112, "NET/IB": 1}
    assert _nccl_log.connections_by_transport(group.nccl_log_size()) == {"NET/IB": 1}, "no connections after the offset"
    monkeypatch.setattr(group, "nccl_log_path", lambda: tmp_path / "gone")
    assert _nccl_log.connections_by_transport() == {"NET/IB": 1}
    assert group.nccl_log_size() == 0


def test_busbw_uses_rank_count_and_mean_over_ranks() -> None:
    timings = Timings(windows=((2.0, 4.0, 3.0, 3.0),) * 3, per_window=1, warmup=3)
    values = {
        metric.name: metric.value for metric in _results.speed_values(2**30, CollectiveResult(2**30, timings, {}))
    }
    assert values["latency.1GiB"] == 3e6
    assert values["busbw.1GiB"] == pytest.approx(1.5 * 2**30 / 3 / 1e9)


def test_one_window_has_no_interval() -> None:
    result = CollectiveResult(4, Timings(windows=((1e-6, 2e-6),), per_window=1, warmup=3), {})
    observations = list(_results.timing_facts({4: result}, ["node0/gpu0", "node0/gpu1"]))
    spread = next(item.value for item in observations if isinstance(item, Fact) and item.name == "spread")
    assert isinstance(spread, dict)
    assert spread["4B"] == {
        "p50_us": 1.5,
        "min_us": 1.5,
        "max_us": 1.5,
        "ci95_of_p50_us": None,
        "slowest_rank": "node0/gpu1",
        "slowest_rank_us": 2.0,
    }
    curves = _results.size_curves({4: result})
    assert [series.name for series in curves] == ["busbw", "latency"]


def test_one_process_is_a_skip(tmp_path: Path) -> None:
    context = Context(
        node="n",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=tmp_path,
        run_dir=tmp_path,
    )
    with pytest.raises(NotApplicable, match="at least 2"):
        next(CHECK.measure(context, CollectiveOptions()))
    assert CHECK.needs.min_ranks == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ["1MiB", "1026 B"]}, "1026 B is not a whole number of float32"),
        ({"sizes": ["3 B"], "dtype": "bfloat16"}, "3 B is not a whole number of bfloat16"),
        ({"sizes": [0]}, "size 0 B"),
        ({"sizes": []}, "at least 1 item"),
        ({"sizes": {"from": "8B"}}, "size sweep: to;"),
        ({"sizes": {"from": "8B", "to": "1KiB", "step": 2}}, "size sweep: step;"),
        ({"sizes": {"from": "1KiB", "to": "8B"}}, "from 1024 B to 8 B by 2"),
        ({"sizes": {"from": "8B", "to": "1KiB", "factor": 1}}, "integer factor >= 2"),
        ({"sizes": {"from": "6B", "to": "12B"}}, "6 B is not a whole number of float32"),
        ({"cuda_graph_sizes": ["6B"]}, "6 B is not a whole number of float32"),
        ({"modes": []}, "at least 1 item"),
        ({"modes": ["fast"]}, "back_to_back"),
        ({"buffers": "pinned"}, "registered"),
        ({"sizes": ["1 MB"]}, "KiB"),
        ({"dtype": "int8"}, "float32"),
        ({"seconds_per_size": 0}, "greater than 0"),
        ({"min_seconds_per_size": -1}, "min_seconds_per_size"),
        ({"seconds_per_size": float("nan")}, "seconds_per_size"),
        ({"size": ["1MiB"]}, "size"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CollectiveOptions.model_validate(options)


def test_size_label_is_exact() -> None:
    assert [size_label(size) for size in (2**33, 1000 * 2**20, 1536 * 2**20, 12)] == [
        "8GiB",
        "1000MiB",
        "1610612736B",
        "12B",
    ]


def test_bandwidth_is_judged_only_with_nccl() -> None:
    wrong, bandwidth = (
        next(rule for rule in CHECK.rules if rule.metric == name) for name in ("wrong_elements", "busbw.8GiB")
    )
    assert wrong.threshold
    assert wrong.threshold.is_met_by(0)
    assert not wrong.threshold.is_met_by(1)
    assert bandwidth.reference == "all_reduce.busbw.8GiB"
    assert str(bandwidth.when) == "backend == nccl"
