"""Figures, facts and rules that the checks of collectives share; more of them, on real ranks, in test_all_reduce.py."""

from __future__ import annotations

import pytest

from seatrial.bench.collectives import CollectiveResult, Timings
from seatrial.bench.data_check import Mismatch
from seatrial.bench.operations import OPERATIONS
from seatrial.bench.pairs import PairResults, PairTiming
from seatrial.checks.fabric import _results
from seatrial.model import Fact, Metric, Outcome

WRONG = Mismatch(7, 5, "1.0", "2.0", "0x1")


def timings(*seconds: float) -> Timings:
    """Windows of two ranks, of which the second takes 1 ms longer."""
    return Timings(windows=tuple((one, one + 0.001) for one in seconds), per_window=1, warmup=1)


def test_parity_has_nccl_tests_figures_of_the_median_window() -> None:
    operation = OPERATIONS["all_gather"]  # of two ranks: busbw is half of algbw
    result = CollectiveResult(size=10**9, timings=timings(0.009, 0.019, 0.029), mismatches={})
    found = {one.name: one for one in _results.back_to_back_metrics(2**30, result, operation)}
    assert found.keys() == {"busbw.1GiB", "algbw.1GiB", "latency.1GiB", "latency_max.1GiB"}
    assert found["algbw.1GiB"].value == pytest.approx(1e9 / 0.0195 / 1e9)
    assert found["busbw.1GiB"].value == pytest.approx(found["algbw.1GiB"].value / 2)
    assert found["latency.1GiB"].value == pytest.approx(19_500)
    assert found["latency_max.1GiB"].value == pytest.approx(20_000)  # of the slower rank
    assert len(found["busbw.1GiB"].samples) == 3


def test_a_percentile_is_the_least_time_that_so_many_do_not_exceed_and_needs_enough_of_them() -> None:
    few, enough = (
        CollectiveResult(size=8, timings=timings(*[number / 1000 for number in range(count)]), mismatches={})
        for count in (58, 100)
    )
    assert {one.name for one in _results.percentile_metrics(8, few)} == {"p50.8B", "cv.8B"}
    found = {one.name: one.value for one in _results.percentile_metrics(8, enough)}  # 1 to 100 ms, on the slower rank
    assert found.keys() == {"p50.8B", "p95.8B", "cv.8B"}
    assert found["p50.8B"] == pytest.approx(50_500)
    assert found["p95.8B"] == pytest.approx(95_000)


def test_a_ranks_own_time_is_in_microseconds_with_its_samples() -> None:
    metric = _results.rank_time_metric("node0/gpu1", 2**20, (0.002, 0.004))
    assert (metric.name, metric.subject, metric.unit) == ("rank_time.1MiB", "node0/gpu1", "us")
    assert metric.samples == pytest.approx((2000, 4000))
    assert metric.value == pytest.approx(3000)


def test_wrong_data_counts_every_element_and_says_where_it_was() -> None:
    metric, fact = _results.wrong_data_results([({"rank": 1}, WRONG), ({"rank": 2}, WRONG)])
    assert isinstance(metric, Metric)
    assert isinstance(fact, Fact)
    assert (metric.name, metric.value) == ("wrong_elements", 14)
    first = {"rank": 1, "wrong": 7, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    assert fact.value == [first, {**first, "rank": 2}]
    (metric,) = _results.wrong_data_results([])
    assert isinstance(metric, Metric)
    assert metric.value == 0


def test_wrong_data_of_an_exchange_names_sender_and_receiver() -> None:
    lines = (PairTiming(0, 1, (0.1,), None), PairTiming(1, 0, (0.1,), WRONG))
    subjects = ("node0/gpu0", "node1/gpu0")
    _, fact = _results.pair_wrong_data_results(PairResults(lines, 2**20, {"node0": (0,), "node1": (1,)}, subjects))
    assert isinstance(fact, Fact)
    assert isinstance(fact.value, list)
    (entry,) = fact.value
    assert isinstance(entry, dict)
    assert (entry["from"], entry["to"], entry["wrong"]) == ("node0/gpu0", "node1/gpu0", 7)


def test_the_rules_that_all_collectives_share() -> None:
    intact, fit = _results.wrong_data_rule("see the fact"), _results.allocation_rule("all_gather", "sizes=[1MiB]")
    assert intact.expect
    assert fit.expect
    assert (intact.expect.is_met_by(0), intact.expect.is_met_by(1), intact.outcome_if_violated) == (
        True,
        False,
        Outcome.FAIL,
    )
    assert (fit.expect.is_met_by(0), fit.expect.is_met_by(1), fit.outcome_if_violated) == (True, False, Outcome.ERROR)


def test_the_carrier_is_what_the_log_tells_and_never_a_guess() -> None:
    nccl = {"backend": "nccl", "nccl_version": "2.28.9"}
    assert _results.transport_text({**nccl, "transports": {"P2P/CUMEM": 8, "NET/IB": 2}}) == (
        "NCCL 2.28.9 over P2P/CUMEM + NET/IB"
    )
    assert "no log" in _results.transport_text({**nccl, "transports": {}})
    gloo = {"backend": "gloo", "backend_environment": {"GLOO_SOCKET_IFNAME": "eth1"}}
    assert _results.transport_text(gloo) == "gloo over eth1"
    assert "not set" in _results.transport_text({"backend": "gloo", "backend_environment": {}})
