"""Node counts and efficiencies of the scaling check; real groups: test_real_groups.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.bench.child_ranks import ChildResult
from seatrial.bench.collectives import CollectiveResult, Timings
from seatrial.checks.declare import NoValue, Value
from seatrial.checks.fabric.scaling import (
    CHECK,
    _by_node_count,
    _efficiencies,
    _measure_rings,
    gpu_size,
    ranks_by_node_count,
)
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome, SeatrialError
from tests.checks.fabric.verdicts import outcomes
from tests.checks.training.check_helpers import make_context

TWO_NODES = {"ring_efficiency": "there are only 2 nodes"}


def result(ranks: int, seconds: float) -> CollectiveResult:
    return CollectiveResult(10**9, Timings(windows=((seconds,) * ranks,) * 3, per_window=1, warmup=1), {})


def test_node_counts_are_powers_of_two_and_all_nodes() -> None:
    assert ranks_by_node_count([[node] for node in range(6)]) == {2: [0, 1], 4: [0, 1, 2, 3], 6: [0, 1, 2, 3, 4, 5]}
    assert list(ranks_by_node_count([[2 * node, 2 * node + 1] for node in range(3)])) == [1, 2, 3]


def test_busbw_uses_rank_count_and_efficiency_compares_all_nodes() -> None:
    """1 GB in 10 ms: 100 GB/s algbw, times 2(n-1)/n."""
    observations = list(_by_node_count({1: result(2, 0.01), 2: result(4, 0.01), 4: result(8, 0.02)}))
    values = {answer.name: answer.value for answer in observations if isinstance(answer, Value)}
    assert values == pytest.approx(
        {
            "busbw.1node": 100.0,
            "busbw.2nodes": 150.0,
            "busbw.4nodes": 87.5,
            "efficiency.1node": 0.875,
            "efficiency.2nodes": 87.5 / 150,
        }
    )


def efficiencies(
    rates: dict[int, float], network: list[float], rings: dict[str, list[float]] | None = None
) -> dict[str, Value]:
    """The values of ``_efficiencies`` for rates in GB/s by number of nodes, each node with eight GPUs."""
    results = {count: result(8 * count, 2 * (8 * count - 1) / (8 * count) / rate) for count, rate in rates.items()}
    items = _efficiencies(results, network, rings or {}, {"NET/IB/GDRDMA": 8})
    return {item.name: item for item in items if isinstance(item, Value)}


@pytest.mark.parametrize(
    ("transport", "judged"), [("NET/FastSocket", False), ("NET/Libfabric (tcp)", False), ("NET/gIB/GDRDMA", True)]
)
def test_sockets_have_no_link_efficiency(transport: str, judged: bool) -> None:
    results = {2: result(16, 0.1)}
    answers = [item for item in _efficiencies(results, [1.0], {}, {transport: 8}) if isinstance(item, Value)]
    assert ("link_efficiency" in [item.name for item in answers]) is judged


@pytest.mark.parametrize(
    ("rates", "nics", "expected"),
    [
        ({1: 480, 2: 467}, 384, 467 / 384),  # H100, NVLS: between two nodes a tree sends half of what a ring sends
        ({1: 365, 2: 330}, 384, 330 / 365),  # H100 without NVLS: NVLink is slower than the NICs
        ({1: 480, 2: 96}, 384, 0.25),
        ({2: 23}, 24.0, 23 / 24),  # one GPU per node: no group inside a node
    ],
)
def test_two_nodes_are_compared_with_the_slower_link(rates: dict[int, float], nics: float, expected: float) -> None:
    metrics = efficiencies(rates, [nics])
    assert metrics["link_efficiency"].value == pytest.approx(expected)
    assert "ring_efficiency" not in metrics


def test_ring_over_all_nodes_is_compared_with_a_ring_over_two_nodes() -> None:
    rings = {"2nodes": [380.0, 384.0, 400.0], "all_nodes": [190.0, 192.0, 176.0, 180.0]}
    metric = efficiencies({1: 480, 2: 467, 4: 360}, [384.0], rings)["ring_efficiency"]
    assert metric.value == pytest.approx(185 / 384)
    assert metric.samples == pytest.approx((0.5, 0.5, 0.44))


def test_noise_of_both_measurements_is_in_the_samples() -> None:
    """The same medians: certain without noise, inconclusive if the base alone is noisy."""
    noisy = {"2nodes": [340.0, 352.0] * 6, "all_nodes": [310.0] * 12}
    quiet = {"2nodes": [346.0] * 12, "all_nodes": [310.0] * 12}
    rates = {1: 480.0, 2: 467.0, 4: 360.0}
    outcome_by_noise = {
        name: outcomes_of(efficiencies(rates, [384.0], rings)["ring_efficiency"])
        for name, rings in {"noisy": noisy, "quiet": quiet}.items()
    }
    assert outcome_by_noise == {"noisy": Outcome.UNJUDGED, "quiet": Outcome.FAIL}


def outcomes_of(value: Value) -> Outcome:
    metric = Metric(name=value.name, value=value.value, unit="of the base", subject="cluster", samples=value.samples)
    others = [Metric(name="link_efficiency", value=1, unit="of the base", subject="cluster")]
    others += [Metric(name="wrong_elements", value=0, unit="count", subject="cluster")]
    facts = {"backend": "nccl"}
    measurement = Measurement(check=CHECK.name, subject="node0/gpu0", metrics=(metric, *others), facts=facts)
    return next(
        verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t") if verdict.metric == metric.name
    )


@pytest.mark.parametrize(("ranks", "size"), [(16, 2**30), (64, 2**30), (512, 2**33), (4096, 2**34)])
def test_many_ranks_need_larger_buffers(ranks: int, size: int) -> None:
    assert gpu_size(ranks) == size


def test_judged_are_data_and_the_two_efficiencies() -> None:
    good = {"link_efficiency": 1.2, "ring_efficiency": 0.97, "wrong_elements": 0}
    bad = {"link_efficiency": 0.2, "ring_efficiency": 0.5, "wrong_elements": 2}
    facts = {"backend": "nccl"}
    assert outcomes(CHECK, good, **facts) == dict.fromkeys(good, Outcome.PASS)
    assert outcomes(CHECK, bad, **facts) == dict.fromkeys(bad, Outcome.FAIL)


def test_efficiencies_that_do_not_exist_are_skipped() -> None:
    two_nodes = {"backend": "nccl"}
    assert outcomes(CHECK, {"link_efficiency": 1, "wrong_elements": 0}, TWO_NODES, **two_nodes) == {
        "link_efficiency": Outcome.PASS,
        "ring_efficiency": Outcome.SKIP,
        "wrong_elements": Outcome.PASS,
    }
    gloo = outcomes(CHECK, {"link_efficiency": 0.1, "wrong_elements": 0}, backend="gloo")
    assert (gloo["link_efficiency"], gloo["ring_efficiency"]) == (Outcome.SKIP, Outcome.SKIP)


@pytest.mark.parametrize(
    ("transports", "is_compared"),
    [({}, True), ({"P2P/CUMEM": 8, "NET/IB/GDRDMA": 8}, True), ({"P2P/CUMEM": 8, "NET/Socket": 8}, False)],
)
def test_sockets_are_not_compared_with_the_nics(transports: dict[str, int], is_compared: bool) -> None:
    answers = list(_efficiencies({2: result(16, 0.01)}, [384.0], {}, transports))
    assert ("link_efficiency" in [item.name for item in answers if isinstance(item, Value)]) is is_compared
    not_compared = [item.names for item in answers if isinstance(item, NoValue)]
    assert not_compared == ([] if is_compared else [("link_efficiency",)])


def test_rings_are_measured_with_child_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def run(module: str, task: dict[str, Any], env: dict[str, str], **_: Any) -> list[ChildResult]:
        calls.append({"module": module, **task, "algorithm": env["NCCL_ALGO"]})
        busbw = {name: [[300.0, 301.0]] for name in task["groups"]}
        return [ChildResult(value={"busbw": busbw, "wrong_elements": wrong}) for wrong in wrong_elements]

    monkeypatch.setattr("seatrial.bench.child_ranks.run_child_ranks", run)
    members, wrong_elements = [[0, 3], [1, 4], [2, 5]], [0, 0]
    assert _measure_rings(members, 2**30, make_context(tmp_path), 1.0)["all_nodes"] == [300.0, 301.0]
    assert calls[0]["groups"] == {"2nodes": [[0, 2, 3, 5]], "all_nodes": [[0, 1, 2, 3, 4, 5]]}
    assert (calls[0]["module"], calls[0]["algorithm"]) == ("seatrial.bench.nccl_settings", "Ring")
    wrong_elements = [0, 3]
    with pytest.raises(SeatrialError, match="3 wrong elements"):
        _measure_rings(members, 2**30, make_context(tmp_path), 1.0)


@pytest.mark.parametrize(("nodes", "counts"), [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_node_counts_of_scaling(nodes: int, counts: list[int]) -> None:
    members = [[2 * node, 2 * node + 1] for node in range(nodes)]
    by_count = ranks_by_node_count(members)
    assert list(by_count) == counts
    assert by_count[nodes] == list(range(2 * nodes))
