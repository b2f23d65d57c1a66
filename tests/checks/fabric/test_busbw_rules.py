"""The rules on bus bandwidth: one size for each number of nodes, and the setting that point-to-point depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bench import collectives
from seatrial.bench.collectives import CollectiveResult, Timings
from seatrial.bench.operations import OPERATIONS
from seatrial.checks import catalog
from seatrial.checks.declare import Value
from seatrial.checks.fabric._collective import CHANNELS_PER_PEER, NET_PEER_CHANNELS, _Modes
from seatrial.checks.fabric._sizes import MANY_NODES, CollectiveOptions
from seatrial.hardware.links import Links, RdmaPorts
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome
from tests.checks.training.check_helpers import make_context


def test_each_number_of_nodes_is_judged_at_one_size() -> None:
    few, many = (rule for rule in catalog()["collectives.all_to_all"].rules if rule.reference)
    assert (few.metric, few.when.min_nodes, few.when.max_nodes) == ("busbw.1GiB", 1, MANY_NODES - 1)
    assert (many.metric, many.when.min_nodes, many.when.max_nodes) == ("busbw.8GiB", MANY_NODES, None)


@pytest.mark.parametrize(("operation", "named"), [("all_to_all", True), ("send_receive", True), ("all_gather", False)])
def test_the_setting_of_channels_per_peer_is_named_before_a_fault(
    operation: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rule,) = (rule for rule in catalog()[f"collectives.{operation}"].rules if rule.metric == "busbw.1GiB")
    assert (CHANNELS_PER_PEER in rule.fix) is named
    timings = Timings(windows=((0.1, 0.1),), per_window=1, warmup=1)
    monkeypatch.setattr(
        collectives, "measure_back_to_back", lambda _, *, size, **_how: CollectiveResult(size, timings, {})
    )
    for channels, text in ((None, " is not set: NCCL's default"), ("4", "=4")):
        monkeypatch.delenv(CHANNELS_PER_PEER, raising=False)
        if channels:
            monkeypatch.setenv(CHANNELS_PER_PEER, channels)
        for nodes in (1, 2):
            subjects = [f"n{rank % nodes}/gpu{rank}" for rank in range(2)]
            settings = CollectiveOptions(sizes=(2**20,)), make_context(tmp_path), subjects
            answers = _Modes(OPERATIONS[operation], (), *settings).run()
            evidence = {answer.name: answer.evidence for answer in answers if isinstance(answer, Value)}
            expected = {NET_PEER_CHANNELS: f"{CHANNELS_PER_PEER}{text}"} if named and nodes > 1 else None
            assert evidence["busbw.1MiB"] == expected
            assert evidence["latency.1MiB"] is None


@pytest.mark.parametrize(("nodes", "judged"), [(2, "busbw.1GiB"), (15, "busbw.1GiB"), (16, "busbw.8GiB")])
def test_only_the_size_of_this_number_of_nodes_has_a_verdict(nodes: int, judged: str) -> None:
    """1 GiB measures latency on many nodes: 150 of 400 GB/s there is no fault."""
    facts = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 8 * nodes, "nodes": nodes}
    values = {"busbw.1GiB": 370 if nodes < MANY_NODES else 150, "busbw.8GiB": 370}
    metrics = tuple(Metric(name=name, value=value, unit="GB/s", subject="cluster") for name, value in values.items())
    measurement = Measurement(check="collectives.all_gather", subject="n0/gpu0", metrics=metrics, facts=facts)
    links = Links(network="rdma", ports=RdmaPorts("ib", 8, 400.0))
    found = judge_check(
        catalog()["collectives.all_gather"], [measurement], {}, "t", References(None, skus(), links=links)
    )
    outcomes = {verdict.metric: verdict.outcome for verdict in found if verdict.metric.startswith("busbw")}
    assert outcomes == {judged: Outcome.PASS}
