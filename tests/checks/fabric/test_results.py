"""Metrics, facts and rules that the collective checks share; on real ranks: test_all_reduce.py."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.bench.collectives import CollectiveResult, Timings
from seatrial.bench.data_check import Mismatch
from seatrial.bench.pairs import PairTiming
from seatrial.checks.declare import NoValue, Value, value
from seatrial.checks.fabric import _results, _wrong_data
from seatrial.model import Outcome, Why

SUBJECTS = ("n/gpu0", "n/gpu1")
WRONG = Mismatch(7, 5, "1.0", "2.0", "0x1")


def timings(*seconds: float) -> Timings:
    """Windows of two ranks; the second takes 1 ms longer."""
    return Timings(windows=tuple((window, window + 0.001) for window in seconds), per_window=1, warmup=1)


def test_back_to_back_values_are_of_the_median_window() -> None:
    # with two ranks busbw is half of algbw
    result = CollectiveResult(10**9, timings(0.009, 0.019, 0.029), mismatches={}, operation="all_gather")
    by_name = {metric.name: metric for metric in _results.speed_values(2**30, result)}
    assert by_name.keys() == {"busbw.1GiB", "latency.1GiB", "latency_max.1GiB"}
    assert by_name["busbw.1GiB"].value == pytest.approx(1e9 / 0.0195 / 1e9 / 2)
    assert by_name["latency.1GiB"].value == pytest.approx(19_500)
    assert by_name["latency_max.1GiB"].value == pytest.approx(20_000)  # of the slower rank
    assert len(by_name["busbw.1GiB"].samples) == 3


def percentiles(size: int, result: CollectiveResult) -> dict[str, float]:
    answers = _results.percentile_values(size, result, SUBJECTS)
    return {answer.name: answer.value for answer in answers if isinstance(answer, Value)}


def test_percentiles_need_enough_samples() -> None:
    few, enough = (
        CollectiveResult(size=8, timings=timings(*[number / 1000 for number in range(count)]), mismatches={})
        for count in (58, 100)
    )
    assert percentiles(8, few).keys() == {"p50.8B", "cv.8B"}
    values = percentiles(8, enough)  # 1 to 100 ms, on the slower rank
    assert values.keys() == {"p50.8B", "p95.8B", "cv.8B"}
    assert values["p50.8B"] == pytest.approx(50_500)
    assert values["p95.8B"] == pytest.approx(95_000)


@pytest.mark.parametrize("count", [299, 298])
def test_p99_ratio_needs_enough_operations(count: int) -> None:
    result = CollectiveResult(size=2**30, timings=timings(*[0.003] * count), mismatches={})
    by_name: dict[str, Value | NoValue] = {}
    for answer in _results.percentile_values(2**30, result, SUBJECTS):
        if isinstance(answer, Value):
            by_name[answer.name] = answer
        elif isinstance(answer, NoValue):
            by_name |= dict.fromkeys(answer.names, answer)
    ratio = by_name["p99_ratio.1GiB"]
    if isinstance(ratio, Value):
        assert count == 299
        assert ratio.value == pytest.approx(1)
        assert isinstance(ratio.evidence, dict)
        assert ratio.evidence["slowest_rank"] == "n/gpu1"
    else:
        assert ratio is by_name["p99.1GiB"]
        assert (ratio.why, ratio.reason) == (Why.DOES_NOT_APPLY, "p99 needs 299 operations, 298 were timed")


def test_wrong_data_counts_elements_and_locates_them() -> None:
    wrong = _wrong_data.wrong_data([({"rank": 1}, WRONG), ({"rank": 2}, WRONG)])
    assert (wrong.name, wrong.value) == ("wrong_elements", 14)
    first = {"rank": 1, "wrong": 7, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    assert wrong.evidence == {"wrong_data": [first, {**first, "rank": 2}]}
    assert _wrong_data.wrong_data([])[:2] == ("wrong_elements", 0)
    assert _wrong_data.wrong_data([]).evidence is None


def test_wrong_data_of_a_pair_names_sender_and_receiver() -> None:
    pair_timings = (PairTiming(0, 1, (0.1,), None), PairTiming(1, 0, (0.1,), WRONG))
    subjects = ("node0/gpu0", "node1/gpu0")
    wrong = _wrong_data.wrong_data(_wrong_data.in_pairs(pair_timings, subjects))
    assert isinstance(wrong.evidence, dict)
    assert isinstance(wrong.evidence["wrong_data"], list)
    (entry,) = wrong.evidence["wrong_data"]
    assert isinstance(entry, dict)
    assert (entry["from"], entry["to"], entry["wrong"]) == ("node0/gpu0", "node1/gpu0", 7)


def test_sizes_not_allocated_are_the_evidence() -> None:
    reasons: dict[str, JsonValue] = {"8GiB": "n/gpu1: out of memory"}
    assert _results.sizes_not_allocated(reasons, "n") == value(
        "sizes_not_allocated", 1, "n", evidence={"not_allocated": reasons}
    )
    assert _results.sizes_not_allocated({}) == value("sizes_not_allocated", 0)


def test_shared_rules() -> None:
    for metric, outcome in (
        (_wrong_data.wrong_data_metric("see the evidence"), Outcome.FAIL),
        (_results.allocation_metric("all_gather", "sizes=[1MiB]"), Outcome.ERROR),
    ):
        (rule,) = metric.rules
        (limit,) = rule.limits
        assert (limit.is_met_by(0), limit.is_met_by(1), limit.outcome) == (True, False, outcome)


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
    bad = CollectiveResult(8, timings, {3: Mismatch(2, 5, "1.0", "2.0", "0x1")})
    good = CollectiveResult(8, timings, {})
    wrong = _wrong_data.wrong_data(_wrong_data.in_groups({"rail0": good, "rail1": bad}))
    assert wrong.value == 2
    assert wrong.evidence == {
        "wrong_data": [
            {"group": "rail1", "rank": 3, "wrong": 2, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
        ]
    }
