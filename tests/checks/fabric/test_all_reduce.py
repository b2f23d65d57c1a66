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
from seatrial.checks.base import Context
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric import _results as figures
from seatrial.checks.fabric._collective import NO_CUDA_GRAPH, CollectiveOptions, _Modes, default_sizes
from seatrial.checks.fabric.all_reduce import CHECK
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Measurement, NotApplicable, Outcome, Series, Verdict
from tests.bench import driver
from tests.paths import FIXTURES
from tests.train import ranks

TOO = ["float16 64KiB", "bfloat16 64KiB"]  # of float32 the data is checked wherever it is timed
Records = dict[str, list[dict[str, Any]]]  # scenario → one record a rank

SMALL = {"sizes": ["4KiB"], "seconds_per_size": 0.05}
SCENARIOS: dict[str, dict[str, Any]] = {
    "honest": {"options": {"sizes": ["1MiB", "12 B", "64KiB"], "seconds_per_size": 0.3}, "fault": None},
    "half": {"options": {**SMALL, "dtype": "bfloat16"}, "fault": None},
    "wrong_contribution": {"options": SMALL, "fault": "wrong_contribution"},
    "flipped_bit": {"options": SMALL, "fault": "flipped_bit"},
    "late": {"options": SMALL, "fault": "late"},
    "starved": {"options": {"sizes": ["4KiB", "8MiB"], "seconds_per_size": 0.05}, "fault": "starved"},
    "starved_check": {"options": {"sizes": ["4KiB", "8MiB"], "seconds_per_size": 0.05}, "fault": "starved_check"},
    "lasting": {
        "options": {"sizes": ["4KiB", "64KiB"], "seconds_per_size": 0.05, "min_seconds_per_size": 1.0},
        "fault": None,
    },
    "too_large": {"options": {"sizes": ["1024TiB"]}, "fault": None},
    "modes": {
        "options": {
            "modes": ["distribution", "device", "parity"],
            "percentile_sizes": ["4KiB", "64KiB"],
            "placement": "both",
            "seconds_per_size": 0.6,
            "sizes": {"from": "8B", "to": "1KiB", "factor": 128},
        },
        "fault": "late",
    },
    "device_only": {"options": {"modes": ["device"]}, "fault": None},
    "nccl_buffers": {"options": {**SMALL, "buffers": "nccl"}, "fault": None},
    "flipped_one_by_one": {
        "options": {"modes": ["distribution"], "percentile_sizes": ["4KiB"], "seconds_per_size": 0.05},
        "fault": "flipped_bit",
    },
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """All scenarios in one real group of two gloo processes."""
    out = tmp_path_factory.mktemp("all_reduce")
    told = [json.loads(one) for one in ranks.heard(ranks.run(2, driver.main, CHECK.name, SCENARIOS, out, seconds=240))]
    return {name: [rank[name] for rank in told] for name in SCENARIOS}


def metrics(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {metric["name"]: metric for metric in record["metrics"]}


def verdicts(record: dict[str, Any]) -> list[Verdict]:
    measured = Measurement(check=CHECK.name, subject="node0/rank0", metrics=record["metrics"], facts=record["facts"])
    return judge_check(CHECK, [measured], {}, "t")


def test_rank_0_speaks_for_the_cluster_and_every_rank_for_itself(records: Records) -> None:
    lead, other = (metrics(record) for record in records["honest"])
    per_size = {f"{name}.{size}" for name in figures.UNITS for size in ("12B", "64KiB", "1MiB")}
    assert set(lead) == per_size | {"wrong_elements", "sizes_not_allocated", "rank_time.1MiB"}
    assert lead["sizes_not_allocated"]["value"] == 0
    assert set(other) == {"rank_time.1MiB"}
    assert {lead[name]["subject"] for name in per_size | {"wrong_elements"}} == {"cluster"}
    assert [found["rank_time.1MiB"]["subject"] for found in (lead, other)] == ["node0/rank0", "node1/rank1"]
    assert records["honest"][1]["facts"] == {}


def test_every_metric_is_declared_with_its_unit(records: Records) -> None:
    for metric in records["honest"][0]["metrics"]:
        pattern = re.sub(r"\..*", ".*", metric["name"])
        assert CHECK.metrics[pattern] == metric["unit"]


def test_figures_agree_with_each_other_and_with_the_samples(records: Records) -> None:
    found = metrics(records["honest"][0])
    spread = records["honest"][0]["facts"]["spread"]
    for label, size in (("12B", 12), ("64KiB", 65536), ("1MiB", 1048576)):
        us = found[f"latency.{label}"]["value"]
        samples = sorted(found[f"latency.{label}"]["samples"])
        assert 5 < us < 1e6
        assert found[f"algbw.{label}"]["value"] == pytest.approx(size / us * 1e-3)
        assert found[f"busbw.{label}"]["value"] == found[f"algbw.{label}"]["value"]  # 2 (2 - 1) / 2 = 1
        assert (spread[label]["min_us"], spread[label]["max_us"]) == (samples[0], samples[-1])
        assert spread[label]["p50_us"] == pytest.approx(us)
        assert spread[label]["slowest_rank"] in ("node0/rank0", "node1/rank1")


def test_every_rank_reports_its_own_time(records: Records) -> None:
    lead, other = (metrics(record)["rank_time.1MiB"] for record in records["honest"])
    assert lead["samples"] != other["samples"]
    spread = records["honest"][0]["facts"]["spread"]["1MiB"]
    assert spread["slowest_rank_us"] == pytest.approx(max(lead["value"], other["value"]))


def test_sizes_run_downwards_and_are_announced(records: Records) -> None:
    lead, other = records["honest"]
    assert lead["notes"] == other["notes"] == ["1MiB", "64KiB", "12B", *TOO]
    assert lead["facts"]["additional_data_checks"] == TOO
    curve = {series["name"]: series for series in lead["series"]}["busbw"]
    assert (curve["x"], curve["x_unit"], curve["y_unit"]) == ([12, 65536, 1048576], "B", "GB/s")
    assert curve["y"] == [metrics(lead)[f"busbw.{label}"]["value"] for label in ("12B", "64KiB", "1MiB")]


def test_facts_say_how_it_was_measured(records: Records) -> None:
    facts = records["honest"][0]["facts"]
    assert (facts["backend"], facts["world_size"], facts["dtype"], facts["in_place"]) == ("gloo", 2, "float32", True)
    assert facts["sizes"] == {"12B": 12, "64KiB": 65536, "1MiB": 1048576}
    assert "host clock" in facts["timing"]
    assert facts["called"] == "torch's process group"
    assert "called by torch's process group" in facts["how"]
    assert "nccl_version" not in facts
    for label, counts in facts["iterations"].items():
        samples = metrics(records["honest"][0])[f"busbw.{label}"]["samples"]
        assert counts["windows"] == len(samples)
        assert counts["warmup"] >= 3
        assert counts["per_window"] >= 1


def test_time_stays_near_the_cap(records: Records) -> None:
    assert 0.1 < records["honest"][0]["seconds"] < 3 * 0.3 + 10


@pytest.mark.parametrize("scenario", ["honest", "half", "late"])
def test_right_sums_are_found_right(records: Records, scenario: str) -> None:
    lead = records[scenario][0]
    assert metrics(lead)["wrong_elements"]["value"] == 0
    assert "wrong_data" not in lead["facts"]


def expected_sum(position: int) -> int:
    """The sum of both ranks at a position in plain integers: rank 1 adds one, and the period fits 24 bits."""
    period = 2**24 - 1
    pattern = position * 1_000_000_007 % period - period // 2
    return pattern + (pattern + 1)


def test_a_wrong_contribution_is_seen_by_both_ranks(records: Records) -> None:
    lead = records["wrong_contribution"][0]
    assert metrics(lead)["wrong_elements"]["value"] == 6
    right = expected_sum(driver.WRONG_OFFSET)
    wrong = lead["facts"]["wrong_data"]
    assert [found["size"] for found in wrong[::2]] == ["4KiB", *TOO]
    wrong = wrong[:2]
    assert [(found["rank"], found["subject"]) for found in wrong] == [(0, "node0/rank0"), (1, "node1/rank1")]
    for found in wrong:
        assert (found["size"], found["offset"], found["wrong"]) == ("4KiB", driver.WRONG_OFFSET, 1)
        assert (found["expected"], found["got"]) == (f"{right:.1f}", f"{right + 1:.1f}")


def test_a_bit_flipped_after_the_sum_names_rank_offset_and_bit(records: Records) -> None:
    lead = records["flipped_bit"][0]
    assert metrics(lead)["wrong_elements"]["value"] == 3
    found, *others = lead["facts"]["wrong_data"]
    assert [one["size"] for one in others] == TOO
    assert (found["rank"], found["offset"]) == (driver.VICTIM, driver.WRONG_OFFSET)
    assert found["xor"] == f"0x{1 << driver.FLIPPED_BIT:08x}"


def test_a_late_rank_lengthens_the_time(records: Records) -> None:
    for record in records["late"]:
        assert metrics(record)["rank_time.4KiB"]["value"] >= driver.LATE_S * 1e6


def test_a_burn_in_lasts_on_all_ranks(records: Records) -> None:
    lead, other = records["lasting"]
    for label, counts in lead["facts"]["iterations"].items():
        us = metrics(lead)[f"latency.{label}"]["samples"]
        # the mean over two ranks; the slower one decides, and it is at most twice as slow
        assert counts["per_window"] * sum(us) * 1e-6 >= 0.5
    assert other["error"] is None
    assert len(metrics(other)["rank_time.64KiB"]["samples"]) == lead["facts"]["iterations"]["64KiB"]["windows"]


def test_a_size_that_does_not_fit_on_one_rank_fails_and_is_not_waited_for(records: Records) -> None:
    lead, other = records["starved"]
    assert lead["error"] is other["error"] is None
    assert "busbw.4KiB" in metrics(lead)
    assert "busbw.8MiB" not in metrics(lead)
    assert set(metrics(other)) == {"rank_time.4KiB"}
    refusal = "CUDA out of memory. Tried to allocate more"
    assert lead["facts"]["not_allocated"] == {"8MiB": {"node1/rank1": refusal}}
    (verdict,) = (found for found in verdicts(lead) if found.metric == "sizes_not_allocated")
    assert verdict.outcome is Outcome.ERROR
    assert refusal in verdict.evidence


def test_a_size_whose_data_check_does_not_fit_is_refused_before_it_is_timed(records: Records) -> None:
    lead, other = records["starved_check"]
    assert lead["error"] is other["error"] is None
    assert lead["facts"]["not_allocated"] == {"8MiB": {"node1/rank1": "CUDA out of memory. Tried to compare"}}
    assert "busbw.4KiB" in metrics(lead)


def test_the_sizes_that_were_not_asked_for_are_told(records: Records) -> None:
    only = "the trial's options ask for sizes of 4KiB, 8MiB"
    assert records["starved"][0]["facts"]["left_out"] == dict.fromkeys(
        (f"busbw.{size}" for size in ("100MiB", "10MiB", "1MiB", "64KiB")), only
    )


def test_sizes_that_all_fit_pass(records: Records) -> None:
    judged = {found.metric: found.outcome for found in verdicts(records["honest"][0])}
    assert judged["sizes_not_allocated"] is Outcome.PASS


def test_no_size_at_all_that_fits_is_an_error(records: Records) -> None:
    for record in records["too_large"]:
        assert record["error"].startswith("SeatrialError: no buffer could be allocated")
        assert "1024TiB" in record["error"]
        assert record["metrics"] == []


def test_latency_max_is_that_of_the_slowest_rank(records: Records) -> None:
    found = metrics(records["honest"][0])
    for mean, slowest in zip(found["latency.64KiB"]["samples"], found["latency_max.64KiB"]["samples"], strict=True):
        assert mean <= slowest <= 2 * mean


def test_single_operations_have_percentiles_as_far_as_their_number_goes(records: Records) -> None:
    lead, other = records["modes"]
    found, told = metrics(lead), lead["facts"]["distribution"]
    for label, size in (("4KiB", 4096), ("64KiB", 65536)):
        us = found[f"p50.{label}"]["samples"]
        assert (told[label]["bytes"], told[label]["samples"]) == (size, len(us))
        assert 1 <= len(us) <= 0.6 / driver.LATE_S
        assert found[f"p50.{label}"]["value"] >= driver.LATE_S * 1e6
        assert (f"p95.{label}" in found) is (len(us) >= 59)  # as many as a loaded machine allows
        assert f"p99.{label}" not in found
        assert told[label]["p99"] == f"not told: it takes 299 samples, here are {len(us)}"
        assert found[f"cv.{label}"]["unit"] == "%"
    assert set(metrics(other)) == {"rank_time.1KiB"}


def test_all_modes_run_in_their_order_and_gloo_has_no_graph(records: Records) -> None:
    lead = records["modes"][0]
    assert lead["notes"] == ["1KiB", "8B", "distribution 64KiB", "distribution 4KiB", *TOO]
    assert lead["facts"]["cuda_graph"] == NO_CUDA_GRAPH
    assert "; parity: each figure is" in lead["facts"]["how"]
    assert lead["facts"]["how"].endswith(figures.MODE_DESCRIPTIONS["distribution"])
    assert lead["facts"]["in_place_variant"] == (
        "not applicable: torch's process group, which is called here, has this operation in place only"
    )
    assert lead["facts"]["sizes"] == {"8B": 8, "1KiB": 1024}
    assert lead["error"] is None


def test_no_mode_that_applies_is_a_skip(records: Records) -> None:
    assert [record["error"] for record in records["device_only"]] == [f"NotApplicable: {NO_CUDA_GRAPH}"] * 2


def test_buffers_that_do_not_exist_are_an_error_and_no_others_are_taken(records: Records) -> None:
    for record in records["nccl_buffers"]:
        assert record["error"].startswith("SeatrialError: the option buffers asks for NCCL's allocator, and here gloo")
        assert record["metrics"] == []


def test_a_wrong_bit_is_found_in_every_mode(records: Records) -> None:
    lead = records["flipped_one_by_one"][0]
    assert metrics(lead)["wrong_elements"]["value"] == 3
    assert lead["facts"]["wrong_data"][0]["size"] == "distribution 4KiB"


def test_a_p99_is_told_from_299_samples_on_and_counts_the_slowest_rank() -> None:
    windows = tuple((float(number), 1.0) for number in range(1, 300))
    found = {
        metric.name: metric.value
        for metric in figures.percentile_metrics(
            4, CollectiveResult(4, Timings(windows=windows, per_window=1, warmup=2), {})
        )
    }
    assert (found["p50.4B"], found["p95.4B"], found["p99.4B"]) == (150e6, 285e6, 297e6)
    assert found["cv.4B"] == pytest.approx(57.5, abs=0.1)  # of a uniform distribution: 1 / sqrt(3)


def test_drift_is_told_in_words_beyond_what_repeats_differ_by() -> None:
    steady, heating = (
        CollectiveResult(
            4, Timings(windows=tuple((value, value) for value in (1.0, 1.0, 1.0, last)), per_window=1, warmup=3), {}
        )
        for last in (1.019, 1.03)
    )
    path: dict[str, object] = {"backend": "nccl", "nccl_version": "2.28.9", "world_size": 2}
    facts = {"nodes": 1, "dtype": "float32", "buffers": "torch's allocator", "called": "torch's process group"}
    told = figures.method_text(path, facts, ["parity"], {4: steady, 8: heating}, OPERATIONS["all_reduce"])
    assert told.startswith("NCCL 2.28.9 over transports that no log tells, 2 ranks")
    path |= {"transports": {"P2P/CUMEM": 48, "NET/IB/GDRDMA": 2}}
    named = figures.method_text(path, facts, ["parity"], {4: steady, 8: heating}, OPERATIONS["all_reduce"])
    assert named.startswith("NCCL 2.28.9 over P2P/CUMEM + NET/IB/GDRDMA, 2 ranks")
    assert told.endswith("; times drifted from the first third of the windows to the last: +3.0 % at 8B")
    assert "buffers of torch's allocator, called by torch's process group;" in told


def test_a_device_figure_is_named_as_such() -> None:
    timings = Timings(windows=((9e-6, 11e-6, 10e-6, 10e-6),) * 10, per_window=100, warmup=3)
    found = {
        metric.name: metric.value
        for metric in figures.cuda_graph_metrics(2**16, CollectiveResult(2**16, timings, {}), OPERATIONS["all_gather"])
    }
    assert found["cuda_graph_latency.64KiB"] == pytest.approx(10)
    assert found["cuda_graph_busbw.64KiB"] == pytest.approx(0.75 * 2**16 / 10e-6 / 1e9)


def test_what_the_device_needs_is_a_curve_over_all_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = Timings(windows=((10e-6,) * 4,) * 10, per_window=100, warmup=3)
    timed = partial(CollectiveResult, timings=timings, mismatches={})
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
        OPERATIONS["all_gather"], default_sizes("all_gather"), CollectiveOptions(modes=("device",)), context, ["n"]
    )
    curves = {one.name: one for one in modes.on_device() if isinstance(one, Series)}
    assert list(curves["cuda_graph_latency"].x) == [16, 2**10, 2**14, 2**16, 2**18, 2**20]
    assert set(curves["cuda_graph_latency"].y) == {10.0}
    assert curves["cuda_graph_busbw"].y[-1] == pytest.approx(0.75 * 2**20 / 10e-6 / 1e9)


def test_transports_are_counted_over_the_logs_of_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = FIXTURES / "nccl" / "h200-nvlink-2.28.9.log"
    monkeypatch.setattr(group, "nccl_log_path", lambda: log)
    monkeypatch.setattr(rank, "gather", lambda value: [value, {"NET/IB": 1, **value}])
    assert _nccl_log.connections_by_transport("cuda:0") == {"P2P/CUMEM": 112, "NET/IB": 1}
    assert _nccl_log.connections_by_transport("cuda:0", _nccl_log.log_size("cuda:0")) == {"NET/IB": 1}, "nothing since"
    monkeypatch.setattr(group, "nccl_log_path", lambda: tmp_path / "gone")
    assert _nccl_log.connections_by_transport("cuda:0") == {"NET/IB": 1}
    assert _nccl_log.log_size("cuda:0") == _nccl_log.log_size("cpu") == 0
    assert _nccl_log.connections_by_transport("cpu") == {}


def test_bus_bandwidth_counts_the_ranks_and_averages_over_them() -> None:
    timings = Timings(windows=((2.0, 4.0, 3.0, 3.0),) * 3, per_window=1, warmup=3)
    found = {
        metric.name: metric.value
        for metric in figures.back_to_back_metrics(
            2**30, CollectiveResult(2**30, timings, {}), OPERATIONS["all_reduce"]
        )
    }
    assert found["latency.1GiB"] == 3e6
    assert found["algbw.1GiB"] == pytest.approx(2**30 / 3 / 1e9)
    assert found["busbw.1GiB"] == pytest.approx(1.5 * 2**30 / 3 / 1e9)


def test_few_windows_have_no_interval_and_the_slowest_rank_is_named() -> None:
    result = CollectiveResult(4, Timings(windows=((1e-6, 2e-6),), per_window=1, warmup=3), {})
    seen = list(figures.curves_and_counts({4: result}, ["node0/gpu0", "node0/gpu1"], OPERATIONS["all_reduce"]))
    spread = next(item.value for item in seen if isinstance(item, Fact) and item.name == "spread")
    assert isinstance(spread, dict)
    assert spread["4B"] == {
        "p50_us": 1.5,
        "min_us": 1.5,
        "max_us": 1.5,
        "ci95_of_p50_us": None,
        "slowest_rank": "node0/gpu1",
        "slowest_rank_us": 2.0,
    }
    assert [series.name for series in seen if isinstance(series, Series)] == ["busbw", "latency"]


def test_one_process_has_nothing_to_reduce_with(tmp_path: Path) -> None:
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
        ({"sizes": {"from": "8B"}}, "see to"),
        ({"sizes": {"from": "8B", "to": "1KiB", "step": 2}}, "see step"),
        ({"sizes": {"from": "1KiB", "to": "8B"}}, "from 1024 B to 8 B by 2"),
        ({"sizes": {"from": "8B", "to": "1KiB", "factor": 1}}, "a whole factor of 2 or more"),
        ({"sizes": {"from": "6B", "to": "12B"}}, "6 B is not a whole number of float32"),
        ({"cuda_graph_sizes": ["6B"]}, "6 B is not a whole number of float32"),
        ({"modes": []}, "at least 1 item"),
        ({"modes": ["fast"]}, "parity"),
        ({"buffers": "pinned"}, "registered"),
        ({"sizes": ["1 MB"]}, "KiB"),
        ({"dtype": "int8"}, "float32"),
        ({"seconds_per_size": 0}, "greater than 0"),
        ({"min_seconds_per_size": -1}, "min_seconds_per_size"),
        ({"seconds_per_size": float("nan")}, "seconds_per_size"),
        ({"size": ["1MiB"]}, "size"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CollectiveOptions.model_validate(options)


def test_sizes_that_a_short_form_would_round_keep_their_bytes() -> None:
    assert [figures.size_label(size) for size in (2**33, 1000 * 2**20, 1536 * 2**20, 12)] == [
        "8GiB",
        "1000MiB",
        "1610612736B",
        "12B",
    ]


def test_bandwidth_is_judged_on_a_fabric_only() -> None:
    _, wrong, bandwidth = CHECK.rules
    assert wrong.expect
    assert wrong.expect.is_met_by(0)
    assert not wrong.expect.is_met_by(1)
    assert (bandwidth.metric, bandwidth.reference) == ("busbw.8GiB", "all_reduce.busbw.8GiB")
    assert bandwidth.applies_if == {"backend": "nccl"}
