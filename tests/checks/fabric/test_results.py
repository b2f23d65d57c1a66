"""Metrics, facts and rules that the collective checks share; on real ranks: test_all_reduce.py."""

from __future__ import annotations

import pytest

from seatrial.bench.collectives import CollectiveResult, Timings
from seatrial.bench.data_check import Mismatch
from seatrial.bench.operations import OPERATIONS
from seatrial.bench.pairs import PairResults, PairTiming
from seatrial.bench.subgroups import GroupResult
from seatrial.checks.fabric import _results
from seatrial.model import Fact, Metric, Outcome

WRONG = Mismatch(7, 5, "1.0", "2.0", "0x1")


def timings(*seconds: float) -> Timings:
    """Windows of two ranks; the second takes 1 ms longer."""
    return Timings(windows=tuple((window, window + 0.001) for window in seconds), per_window=1, warmup=1)


def test_back_to_back_metrics_are_of_the_median_window() -> None:
    operation = OPERATIONS["all_gather"]  # with two ranks busbw is half of algbw
    result = CollectiveResult(size=10**9, timings=timings(0.009, 0.019, 0.029), mismatches={})
    by_name = {metric.name: metric for metric in _results.back_to_back_metrics(2**30, result, operation)}
    assert by_name.keys() == {"busbw.1GiB", "algbw.1GiB", "latency.1GiB", "latency_max.1GiB"}
    assert by_name["algbw.1GiB"].value == pytest.approx(1e9 / 0.0195 / 1e9)
    assert by_name["busbw.1GiB"].value == pytest.approx(by_name["algbw.1GiB"].value / 2)
    assert by_name["latency.1GiB"].value == pytest.approx(19_500)
    assert by_name["latency_max.1GiB"].value == pytest.approx(20_000)  # of the slower rank
    assert len(by_name["busbw.1GiB"].samples) == 3


def test_percentiles_need_enough_samples() -> None:
    few, enough = (
        CollectiveResult(size=8, timings=timings(*[number / 1000 for number in range(count)]), mismatches={})
        for count in (58, 100)
    )
    assert {metric.name for metric in _results.percentile_metrics(8, few)} == {"p50.8B", "cv.8B"}
    values = {
        metric.name: metric.value for metric in _results.percentile_metrics(8, enough)
    }  # 1 to 100 ms, on the slower rank
    assert values.keys() == {"p50.8B", "p95.8B", "cv.8B"}
    assert values["p50.8B"] == pytest.approx(50_500)
    assert values["p95.8B"] == pytest.approx(95_000)


@pytest.mark.parametrize(
    ("size", "count", "value"),
    [
        (2**30, 299, "yes"),
        (2**30, 298, "no: p99 needs 299 operations of 1GiB, 298 were timed"),
        (2**20, 299, "no: p99 needs 299 operations of 1GiB, 0 were timed"),
    ],
)
def test_p99_ratio_is_judged_at_1gib_with_enough_operations(size: int, count: int, value: str) -> None:
    result = CollectiveResult(size=size, timings=timings(*[0.003] * count), mismatches={})
    assert _results.p99_ratio_fact({size: result}).value == value
    names = {metric.name for metric in _results.percentile_metrics(size, result)}
    assert ("p99_ratio.1GiB" in names) is (value == "yes")


def test_rank_time_is_in_microseconds_with_samples() -> None:
    metric = _results.rank_time_metric("node0/gpu1", 2**20, (0.002, 0.004))
    assert (metric.name, metric.subject, metric.unit) == ("rank_time.1MiB", "node0/gpu1", "us")
    assert metric.samples == pytest.approx((2000, 4000))
    assert metric.value == pytest.approx(3000)


def test_wrong_data_counts_elements_and_locates_them() -> None:
    metric, fact = _results.wrong_data_results([({"rank": 1}, WRONG), ({"rank": 2}, WRONG)])
    assert isinstance(metric, Metric)
    assert isinstance(fact, Fact)
    assert (metric.name, metric.value) == ("wrong_elements", 14)
    first = {"rank": 1, "wrong": 7, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    assert fact.value == [first, {**first, "rank": 2}]
    (metric,) = _results.wrong_data_results([])
    assert isinstance(metric, Metric)
    assert metric.value == 0


def test_wrong_data_of_a_pair_names_sender_and_receiver() -> None:
    pair_timings = (PairTiming(0, 1, (0.1,), None), PairTiming(1, 0, (0.1,), WRONG))
    subjects = ("node0/gpu0", "node1/gpu0")
    _, fact = _results.pair_wrong_data_results(
        PairResults(pair_timings, 2**20, {"node0": (0,), "node1": (1,)}, subjects)
    )
    assert isinstance(fact, Fact)
    assert isinstance(fact.value, list)
    (entry,) = fact.value
    assert isinstance(entry, dict)
    assert (entry["from"], entry["to"], entry["wrong"]) == ("node0/gpu0", "node1/gpu0", 7)


def test_shared_rules() -> None:
    wrong_data, allocation = (
        _results.wrong_data_rule("see the fact"),
        _results.allocation_rule("all_gather", "sizes=[1MiB]"),
    )
    assert wrong_data.expect
    assert allocation.expect
    assert (wrong_data.expect.is_met_by(0), wrong_data.expect.is_met_by(1), wrong_data.outcome_if_violated) == (
        True,
        False,
        Outcome.FAIL,
    )
    assert (allocation.expect.is_met_by(0), allocation.expect.is_met_by(1), allocation.outcome_if_violated) == (
        True,
        False,
        Outcome.ERROR,
    )


def test_transport_text_is_from_the_log() -> None:
    nccl = {"backend": "nccl", "nccl_version": "2.28.9"}
    assert _results.transport_text({**nccl, "transports": {"P2P/CUMEM": 8, "NET/IB": 2}}) == (
        "NCCL 2.28.9 over P2P/CUMEM + NET/IB"
    )
    assert "no log" in _results.transport_text({**nccl, "transports": {}})
    gloo = {"backend": "gloo", "backend_environment": {"GLOO_SOCKET_IFNAME": "eth1"}}
    assert _results.transport_text(gloo) == "gloo over eth1"
    assert "not set" in _results.transport_text({"backend": "gloo", "backend_environment": {}})


def test_wrong_data_of_groups_is_located() -> None:
    timings = Timings(windows=((1.0, 1.0),), per_window=1, warmup=1)
    bad, good = GroupResult((1, 3), timings, {3: Mismatch(2, 5, "1.0", "2.0", "0x1")}), GroupResult((0, 2), timings, {})
    metric, fact = _results.group_wrong_data_results({"rail0": good, "rail1": bad})
    assert isinstance(metric, Metric)
    assert isinstance(fact, Fact)
    assert metric.value == 2
    assert fact.value == [
        {"group": "rail1", "rank": 3, "wrong": 2, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    ]
