"""The all-reduce with NCCL_ALGO=Ring from fake child processes, and its verdicts by the model of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import child_ranks, rank
from seatrial.bench.child_ranks import ChildResult
from seatrial.checks.check import Context
from seatrial.checks.declare import Answer, NoValue, Value
from seatrial.checks.fabric import _forced_ring
from seatrial.checks.fabric._sizes import CollectiveOptions
from seatrial.checks.fabric.collectives import CHECKS
from seatrial.hardware.links import Links, RdmaPorts
from seatrial.hardware.network_time import TcpNetwork
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import BasisKind, Fact, Measurement, Metric, Outcome, SeatrialError, Verdict

CHECK = CHECKS[0]
NODES = ["n0", "n0", "n1", "n1"]
LINE = "n0:9:9 [0] NCCL INFO AllReduce: 8589934592 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}\n"
IB = Links(network="rdma", ports=RdmaPorts("ib", 8, 400.0))


def run(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *results: ChildResult,
    nodes: Sequence[str] = NODES,
    device: str = "cuda:0",
    network: TcpNetwork | None = None,
    size: int = 2**33,
) -> list[Answer]:
    def run_child_ranks(
        module: str, task: Mapping[str, Any], env: Mapping[str, str], **where: Any
    ) -> list[ChildResult]:
        assert (module, env["NCCL_ALGO"]) == ("seatrial.bench.nccl_settings", "Ring")
        assert (task["groups"], task["size"]) == ({"all_ranks": [[0, 1, 2, 3]]}, size)
        assert where["limit_s"] > (60 if network is None else 20 * network.operation_s("all_reduce", size))
        return list(results)

    monkeypatch.setattr(child_ranks, "run_child_ranks", run_child_ranks)
    monkeypatch.setattr(rank, "gather", lambda _value: list(nodes))
    context = Context(
        node="n0",
        rank=0,
        world_size=len(nodes),
        local_rank=0,
        device=device,
        expected_gpus=None,
        artifacts_dir=folder,
        run_dir=folder,
        tcp_network=network,
    )
    return list(_forced_ring.measure(context, CollectiveOptions()))


def child(folder: Path, busbw: float = 380.0) -> ChildResult:
    log = folder / "nccl.log"
    log.write_text(LINE)
    value = {"busbw": {"all_ranks": [[busbw] * 5]}, "wrong_elements": 0, "log": str(log), "log_bytes": len(LINE)}
    return ChildResult(value)


def test_several_nodes_measure_a_ring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    observations = run(monkeypatch, tmp_path, *[child(tmp_path)] * 4)
    metrics = {answer.name: answer.value for answer in observations if isinstance(answer, Value)}
    assert metrics == {"busbw_ring.8GiB": 380.0, "wrong_elements_ring": 0}
    (fact,) = (fact for fact in observations if isinstance(fact, Fact))
    assert "logs RING" in str(fact.value)


def test_a_slow_network_measures_a_smaller_ring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = TcpNetwork(nodes=2, gpus=2, gbps=10)
    observations = run(monkeypatch, tmp_path, *[child(tmp_path, 1.0)] * 4, network=network, size=2**30)
    metrics = {answer.name: answer.value for answer in observations if isinstance(answer, Value)}
    assert metrics == {"busbw_ring.1GiB": 1.0, "wrong_elements_ring": 0}
    assert [(answer.names, answer.instead) for answer in observations if isinstance(answer, NoValue)] == [
        (("busbw_ring.8GiB",), "busbw_ring.1GiB")
    ]


def test_one_node_and_cpus_measure_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not run(monkeypatch, tmp_path, nodes=["n0"] * 4)
    assert not run(monkeypatch, tmp_path, device="cpu")


def test_a_failed_child_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = ChildResult(error="out of memory", exit_code=1, failure_order=1, host="h1")
    with pytest.raises(SeatrialError, match="rank 2 on h1: out of memory"):
        run(monkeypatch, tmp_path, *[child(tmp_path)] * 2, failed)


def verdict(metric: str, value: float, nodes: int, links: Links = IB) -> Verdict | None:
    """The verdict on ``metric`` of 8 H200 on each node."""
    facts = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 8 * nodes, "nodes": nodes}
    metrics = [
        Metric(name="busbw.8GiB", value=430.0, unit="GB/s", subject="cluster"),
        Metric(name="wrong_elements", value=0, unit="count", subject="cluster"),
        Metric(name="sizes_not_allocated", value=0, unit="sizes", subject="cluster"),
        Metric(name=metric, value=value, unit="GB/s", subject="cluster"),
    ]
    if nodes > 1:
        metrics.append(Metric(name="wrong_elements_ring", value=0, unit="count", subject="cluster"))
    measurement = Measurement(check=CHECK.name, subject="n0/gpu0", metrics=tuple(metrics), facts=facts)
    found = judge_check(CHECK, [measurement], {}, "t", References(None, skus(), links=links))
    return next((each for each in found if each.metric == metric), None)


@pytest.mark.parametrize(
    ("value", "outcome"), [(390, Outcome.PASS), (325, Outcome.WARN), (200, Outcome.FAIL), (501, Outcome.UNJUDGED)]
)
def test_the_ring_is_judged_by_the_ports(value: float, outcome: Outcome) -> None:
    """One port at half rate halves a ring on two nodes, while the default algorithm hides it."""
    found = verdict("busbw_ring.8GiB", value, 2)
    assert found
    assert found.outcome is outcome
    assert found.basis
    assert (found.basis.kind, found.basis.expected, found.basis.fail_below) == (BasisKind.FABRIC_MODEL, 400, 0.76)
    assert "8 × 400 Gb/s" in found.basis.arithmetic
    assert found.basis.source


def test_without_port_rates_the_ring_is_unjudged() -> None:
    found = verdict("busbw_ring.8GiB", 390, 2, Links(network="rdma"))
    assert found
    assert found.outcome is Outcome.UNJUDGED


def test_one_node_has_no_verdict_on_the_ring() -> None:
    assert verdict("busbw_ring.8GiB", 390, 1) is None
