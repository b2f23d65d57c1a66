"""fabric.node_ports: the ports of one node by the rules of fabric.ports, without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.base import Context
from seatrial.checks.fabric import node_ports
from seatrial.checks.fabric._compute_ports import NodePorts
from seatrial.checks.fabric.node_ports import CHECK
from seatrial.discover.rdma_ports import PortDetails
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure
from tests.checks.fabric.port_details import down, eight, port


def measured(monkeypatch: pytest.MonkeyPatch, *ports: PortDetails) -> Measurement:
    monkeypatch.setattr(node_ports, "read_node_ports", lambda _root: NodePorts(ports))
    folder = Path("/nonexistent")
    context = Context(
        node="node0",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=folder,
        run_dir=folder,
    )
    return measure(CHECK, context, {})


def not_passed(measurement: Measurement) -> set[tuple[str, str, Outcome]]:
    verdicts = judge_check(CHECK, [measurement], {}, "")
    good = (Outcome.PASS, Outcome.SKIP)
    return {(verdict.metric, verdict.subject, verdict.outcome) for verdict in verdicts if verdict.outcome not in good}


def test_equal_ports_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_passed(measured(monkeypatch, *eight())) == set()


@pytest.mark.parametrize("bad", [port("mlx5_4", "200 Gb/sec (2X NDR)"), down("mlx5_4")])
def test_a_port_at_half_its_rate_or_down_fails(bad: PortDetails, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = not_passed(measured(monkeypatch, *eight(mlx5_4=bad)))
    assert ("rate_vs_node_ports", "node0/mlx5_4", Outcome.FAIL) in outcomes


def test_a_node_without_ports_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measured(monkeypatch)
    assert measurement.skipped == "no RDMA port for compute on any node"
    assert measurement.error is None
