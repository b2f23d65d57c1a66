"""The rules on bus bandwidth: one size for each number of nodes, and the setting that point-to-point depends on."""

from __future__ import annotations

import pytest

from seatrial.checks.fabric._busbw_rules import (
    CHANNELS_PER_PEER,
    MANY_NODES,
    NET_PEER_CHANNELS,
    busbw_rule,
    busbw_rules,
)
from seatrial.checks.fabric.all_gather import CHECK
from seatrial.hardware.links import Links, RdmaPorts
from seatrial.hardware.references import select_references
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome


def test_each_number_of_nodes_is_judged_at_one_size() -> None:
    few, many = busbw_rules("all_to_all")
    assert (few.metric, few.min_nodes, few.max_nodes) == ("busbw.1GiB", 1, MANY_NODES - 1)
    assert (many.metric, many.min_nodes, many.max_nodes) == ("busbw.8GiB", MANY_NODES, None)


@pytest.mark.parametrize(("operation", "named"), [("all_to_all", True), ("send_receive", True), ("all_gather", False)])
def test_the_setting_of_channels_per_peer_is_named_before_a_fault(operation: str, named: bool) -> None:
    rule = busbw_rule(operation, "1GiB")
    assert (CHANNELS_PER_PEER in rule.fix) is named
    assert (NET_PEER_CHANNELS in rule.evidence_facts) is named


@pytest.mark.parametrize(("nodes", "judged"), [(2, "busbw.1GiB"), (15, "busbw.1GiB"), (16, "busbw.8GiB")])
def test_only_the_size_of_this_number_of_nodes_has_a_verdict(nodes: int, judged: str) -> None:
    """1 GiB measures latency on many nodes: 150 of 400 GB/s there is no fault."""
    facts = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 8 * nodes, "nodes": nodes}
    values = {"busbw.1GiB": 370 if nodes < MANY_NODES else 150, "busbw.8GiB": 370}
    metrics = tuple(Metric(name=name, value=value, unit="GB/s", subject="cluster") for name, value in values.items())
    measurement = Measurement(check=CHECK.name, subject="n0/gpu0", metrics=metrics, facts=facts)
    links = Links(network="rdma", ports=RdmaPorts("ib", 8, 400.0))
    found = judge_check(CHECK, [measurement], {}, "t", select_references(links, None))
    outcomes = {verdict.metric: verdict.outcome for verdict in found if verdict.metric.startswith("busbw")}
    assert outcomes == {judged: Outcome.PASS}
