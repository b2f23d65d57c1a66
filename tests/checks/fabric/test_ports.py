"""The comparison of RDMA ports, of several nodes (fabric.ports) and of one node without torch (fabric.node_ports)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.check import Context
from seatrial.checks.declare import Answer, Value
from seatrial.checks.fabric import ports as ports_module
from seatrial.checks.fabric._compute_ports import NodePorts, select_compute_ports
from seatrial.checks.fabric.ports import CHECKS, compare_ports
from seatrial.config.schema import Config
from seatrial.diagnose.cause_data import causes
from seatrial.discover.rdma_ports import PortDetails
from seatrial.judge.coverage import RecordedPlan, coverage_errors
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict, Why
from seatrial.worker import measure
from tests.checks.fabric.port_details import GIDS, down, eight, port, roce
from tests.checks.fabric.verdicts import measurement, verdicts
from tests.judge.test_coverage import job

CHECK, NODE_CHECK = CHECKS
PORT = "node0/mlx5_4"


def observed(*nodes: tuple[PortDetails, ...], gid_index: int | None = None, hca: str = "") -> list[Answer]:
    found = {f"node{index}": NodePorts(ports, hca, gid_index) for index, ports in enumerate(nodes)}
    return list(compare_ports(select_compute_ports(found), found))


def judged(*nodes: tuple[PortDetails, ...], **settings: Any) -> list[Verdict]:
    """The verdicts on nodes with these ports that are neither PASS nor SKIP."""
    found = verdicts(CHECK, observed(*nodes, **settings))
    return [verdict for verdict in found if verdict.outcome not in (Outcome.PASS, Outcome.SKIP)]


def outcomes(*nodes: tuple[PortDetails, ...], **settings: Any) -> dict[tuple[str, str], Outcome]:
    return {(verdict.metric, verdict.subject): verdict.outcome for verdict in judged(*nodes, **settings)}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_equal_ports_pass(count: int) -> None:
    assert outcomes(*[eight()] * count) == {}
    assert outcomes(*[tuple(roce(f"mlx5_{index}") for index in range(8))] * count) == {}


@pytest.mark.parametrize("bad", [port("mlx5_4", "200 Gb/sec (2X NDR)"), down("mlx5_4")])
def test_a_port_at_half_its_rate_or_down_fails_with_its_place(bad: PortDetails) -> None:
    ports = eight(mlx5_4=bad)
    siblings = [verdict.outcome for verdict in judged(ports)]
    assert siblings == [Outcome.FAIL, Outcome.WARN]
    assert {(verdict.metric, verdict.subject) for verdict in judged(ports)} == {("rate_vs_node_ports", PORT)}
    both = {("rate_vs_nodes", PORT): Outcome.FAIL, ("rate_vs_node_ports", PORT): Outcome.WARN}
    assert outcomes(ports, eight(), eight()) == both


def test_of_two_ports_of_one_node_the_slower_one_warns() -> None:
    ports = (port("mlx5_0"), port("mlx5_1", "200 Gb/sec (2X NDR)"))
    assert outcomes(ports) == {("rate_vs_node_ports", "node0/mlx5_1"): Outcome.WARN}


def test_a_rail_at_half_rate_on_all_nodes_warns_and_one_that_is_down_fails() -> None:
    slow = eight(mlx5_4=port("mlx5_4", "200 Gb/sec (2X NDR)"))
    assert outcomes(slow, slow) == {
        ("rate_vs_node_ports", "node0/mlx5_4"): Outcome.WARN,
        ("rate_vs_node_ports", "node1/mlx5_4"): Outcome.WARN,
    }
    dead = eight(mlx5_4=down("mlx5_4"))
    assert outcomes(dead, dead)["rate_vs_nodes", PORT] is Outcome.FAIL


def test_all_ports_down() -> None:
    dead = tuple(down(f"mlx5_{index}") for index in range(8))
    assert outcomes(dead) == {("active_ports", "node0"): Outcome.WARN}  # one node does not use the network
    assert outcomes(dead, dead) == {("active_ports", f"node{index}"): Outcome.FAIL for index in range(2)}
    one_node = outcomes(dead, eight())
    assert one_node["active_ports", "node0"] is Outcome.FAIL
    assert one_node["rate_vs_nodes", PORT] is Outcome.FAIL
    assert not any(subject.startswith("node1") for _, subject in one_node)


def test_a_node_with_fewer_ports_of_the_same_model_fails() -> None:
    assert outcomes(eight()[:7], eight()) == {("ports_missing", "node0"): Outcome.FAIL}
    no_ports = outcomes((), eight())
    assert no_ports["ports_missing", "node0"] is no_ports["active_ports", "node0"] is Outcome.FAIL


def test_mixed_nic_models_warn() -> None:
    older = tuple(port(f"mlx5_{index}", "200 Gb/sec (4X HDR)", model="MT4123") for index in (8, 9))
    assert outcomes(eight(), older) == {("nic_models", "cluster"): Outcome.WARN}


@pytest.mark.parametrize("changes", [{"state": None}, {"rate": "unknown"}])
def test_a_port_that_cannot_be_read_is_an_error(changes: dict[str, Any]) -> None:
    assert outcomes(eight(mlx5_4=port("mlx5_4").model_copy(update=changes)), eight()) == {
        ("ports_unreadable", "node0"): Outcome.ERROR
    }


@pytest.mark.parametrize(
    ("gids", "index", "usable"),
    [
        (GIDS, None, True),
        (GIDS, 3, True),
        (GIDS, 2, False),
        (GIDS, 1, False),
        (GIDS, 9, False),
        (GIDS[:2], None, False),
    ],
)
def test_gids(gids: Any, index: int | None, usable: bool) -> None:
    ports = (roce("mlx5_0"), roce("mlx5_1", gids=gids))
    one_node, two_nodes = outcomes(ports, gid_index=index), outcomes(ports, ports, gid_index=index)
    place = ("gid_usable", "node0/mlx5_1")
    assert one_node.get(place) is (None if usable else Outcome.WARN)
    assert two_nodes.get(place) is (None if usable else Outcome.FAIL)


def test_the_place_and_the_gid_table_are_in_the_verdict() -> None:
    (verdict,) = judged((roce("mlx5_0"), roce("mlx5_1", gids=GIDS[1:])), (roce("mlx5_0"), roce("mlx5_1", gids=())))
    assert (verdict.metric, verdict.subject, verdict.outcome) == ("gid_usable", "node1/mlx5_1", Outcome.FAIL)
    assert "NCCL_IB_GID_INDEX is not set; no GID" in verdict.evidence
    assert "show_gids" in verdict.fix


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"firmware": "28.38.1000"}, "settings_differing"),
        ({"mtu": 1500}, "settings_differing"),
        ({"active_mtu": 1024}, "settings_differing"),
        ({"capability_gbps": 800.0}, "rate_vs_maximum"),
        ({"pci_gbps": 252.1}, "pci_bandwidth"),
    ],
)
def test_other_settings_and_slower_than_capable_warn(changes: dict[str, Any], metric: str) -> None:
    healthy = [roce(f"mlx5_{index}", capability_gbps=400.0) for index in range(8)]
    other = [*healthy[:4], roce("mlx5_4", **{"capability_gbps": 400.0, **changes}), *healthy[5:]]
    assert outcomes(tuple(other), tuple(healthy)) == {(metric, PORT): Outcome.WARN}


@pytest.mark.parametrize(
    ("name", "ports"),
    [
        ("rate_vs_maximum", eight()),
        ("pci_bandwidth", (port("mlx5_0", pci_gbps=None),)),
        ("pci_bandwidth", (down("mlx5_0"), down("mlx5_1"))),
        ("gid_usable", eight()),
    ],
)
def test_a_comparison_without_its_base_does_not_apply(name: str, ports: tuple[PortDetails, ...]) -> None:
    given = observed(ports, ports)
    (absent,) = [each for each in measurement(CHECK, given, "node0/rank0").absent if each.metric == name]
    assert (absent.why, absent.subject) == (Why.DOES_NOT_APPLY, "")
    assert {verdict.outcome for verdict in verdicts(CHECK, given) if verdict.metric == name} == {Outcome.SKIP}


def test_a_known_capability_of_one_port_is_enough() -> None:
    given = observed((roce("mlx5_0", capability_gbps=400.0), roce("mlx5_1")))
    found = [verdict for verdict in verdicts(CHECK, given) if verdict.metric == "rate_vs_maximum"]
    assert [(verdict.subject, verdict.outcome) for verdict in found] == [("node0/mlx5_0", Outcome.PASS)]


def test_each_port_must_have_its_settings_compared() -> None:
    given = observed(eight(), eight())
    without = [each for each in given if not (isinstance(each, Value) and each.subject == PORT)]
    (error,) = [verdict for verdict in verdicts(CHECK, without) if verdict.outcome is Outcome.ERROR]
    assert error.metric == "settings_differing"
    assert PORT in error.detail


def test_management_ports_are_not_judged() -> None:
    management = roce("mlx5_8", "25 Gb/sec (1X EDR)", model="MT4125", gids=(), has_default_route=True)
    assert outcomes(eight(mlx5_8=management), eight()) == {}


def measured_node(monkeypatch: pytest.MonkeyPatch, *ports: PortDetails) -> Measurement:
    monkeypatch.setattr(ports_module, "read_node_ports", lambda _root: NodePorts(ports))
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
    return measure(NODE_CHECK, context, {})


@pytest.mark.parametrize(
    ("bad", "failed"),
    [(None, set()), (port("mlx5_4", "200 Gb/sec (2X NDR)"), {PORT}), (down("mlx5_4"), {PORT})],
)
def test_ports_of_one_node_without_torch(
    bad: PortDetails | None, failed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_node = measured_node(monkeypatch, *(eight(mlx5_4=bad) if bad else eight()))
    found = judge_check(NODE_CHECK, [on_node], {}, "")
    assert {verdict.subject for verdict in found if verdict.outcome is Outcome.FAIL} == failed
    assert {verdict.metric for verdict in found if verdict.outcome is Outcome.FAIL} <= {"rate_vs_node_ports"}
    assert not [verdict for verdict in found if verdict.outcome in (Outcome.ERROR, Outcome.UNJUDGED)]


def test_a_node_without_ports_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    on_node = measured_node(monkeypatch)
    assert on_node.skipped == "no RDMA port for compute on any node"
    assert on_node.error is None


def test_the_record_of_one_node_agrees_with_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    on_node = measured_node(monkeypatch, *eight())
    config = Config.model_validate(
        {"name": "t", "launcher": "local", "cluster": {"nodes": 1}, "checks": {NODE_CHECK.name: {}}}
    )
    plan = RecordedPlan(config, (job("nodes", 1, 1, NODE_CHECK.name),), {NODE_CHECK.name: [on_node]})
    assert list(coverage_errors(NODE_CHECK, plan, [on_node])) == []


def test_both_checks_show_one_cause() -> None:
    (cause,) = [cause for cause in causes() if cause.id == "gid_unusable"]
    assert dict(cause.evidence) == {CHECK.name: ("gid_usable",), NODE_CHECK.name: ("gid_usable",)}
    assert catalog()[NODE_CHECK.name] is NODE_CHECK
