from __future__ import annotations

from typing import Any

import pytest

from seatrial.checks.fabric._compute_ports import NodePorts, port_names, select_compute_ports
from seatrial.checks.fabric.ports import CHECK, compare_ports
from seatrial.discover.rdma_ports import PortDetails
from seatrial.judge.rules import judge_check
from seatrial.model import PORTS_USED, Fact, Measurement, Metric, Outcome, Verdict
from tests.checks.fabric.port_details import GIDS, down, eight, port, roce

PORT = "node0/mlx5_4"


def judged(*nodes: tuple[PortDetails, ...], gid_index: int | None = None, hca: str = "") -> list[Verdict]:
    """The verdicts on nodes with these ports that are neither PASS nor SKIP."""
    found = {f"node{index}": NodePorts(ports, hca, gid_index) for index, ports in enumerate(nodes)}
    compute = select_compute_ports(found)
    observations = [*compare_ports(compute, dict.fromkeys(found, gid_index))]
    facts = {item.name: item.value for item in observations if isinstance(item, Fact)}
    measurement = Measurement(
        check=CHECK.name,
        subject="node0/rank0",
        metrics=tuple(item for item in observations if isinstance(item, Metric)),
        facts={**facts, PORTS_USED: port_names(compute)},
    )
    verdicts = judge_check(CHECK, [measurement], {}, "t")
    return [verdict for verdict in verdicts if verdict.outcome not in (Outcome.PASS, Outcome.SKIP)]


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


def test_an_unknown_capability_is_not_judged_but_named() -> None:
    compute = select_compute_ports({"node0": NodePorts(eight())})
    facts = {item.name: item.value for item in compare_ports(compute, {"node0": None}) if isinstance(item, Fact)}
    assert (facts["capability_known"], facts["pci_link_known"], facts["roce"]) == ("no", "yes", "no")


def test_management_ports_are_not_judged() -> None:
    management = roce("mlx5_8", "25 Gb/sec (1X EDR)", model="MT4125", gids=(), has_default_route=True)
    assert outcomes(eight(mlx5_8=management), eight()) == {}


def test_without_a_port_the_check_does_not_apply() -> None:
    assert "no RDMA port" in select_compute_ports({"node0": NodePorts(())}).absence_reason
    assert not select_compute_ports({"node0": NodePorts(eight()), "node1": NodePorts(())}).absence_reason
