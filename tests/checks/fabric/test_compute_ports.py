from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.fabric._compute_ports import NodePorts, read_node_ports, select_compute_ports
from seatrial.discover.rdma_ports import PortDetails
from seatrial.model import NotApplicable, SeatrialError
from tests.checks.fabric.port_details import down, eight, port, roce
from tests.discover import trees

EIGHT = [f"mlx5_{index}" for index in range(8)]
MANAGEMENT: dict[str, Any] = {"model": "MT4125", "board": "MT_0000000359"}


def selected(*nodes: tuple[PortDetails, ...], hca: str = "") -> dict[str, list[str]]:
    names = [f"node{index}" for index in range(len(nodes))]
    compute = select_compute_ports({name: NodePorts(node, hca) for name, node in zip(names, nodes, strict=True)})
    every_port = {f"{name}/{each.name}" for name, node in zip(names, nodes, strict=True) for each in node}
    chosen = {f"{node}/{each.name}" for node, each in compute}
    assert chosen | compute.others.keys() == every_port
    assert not chosen & compute.others.keys()
    return {node: [each.name for each in ports] for node, ports in compute.by_node.items()}


@pytest.mark.parametrize(
    "management",
    [
        roce("mlx5_8", "100 Gb/sec (4X EDR)", **MANAGEMENT),  # another model and link layer
        roce("mlx5_8", has_default_route=True),
        port("mlx5_8", "200 Gb/sec (2X NDR)", board="MT_0000000844"),  # a storage NIC
    ],
)
def test_ports_for_management_and_storage_are_no_compute_ports(management: PortDetails) -> None:
    assert selected(eight(mlx5_8=management)) == {"node0": EIGHT}


def test_a_roce_port_with_the_default_route_is_a_management_port_unless_it_is_the_only_one() -> None:
    ports = (roce("mlx5_0"), roce("mlx5_1", has_default_route=True))
    assert selected(ports) == {"node0": ["mlx5_0"]}
    assert selected(ports[1:]) == {"node0": ["mlx5_1"]}


def test_a_management_port_is_used_if_only_the_other_port_of_its_nic_is_left_and_is_down() -> None:
    management = roce("mlx5_0", has_default_route=True, pci_path=("0000:15:01.0", "0000:20:00.0"))
    other_port = down("mlx5_1", pci_path=("0000:15:01.0", "0000:20:00.1"))
    assert selected((management, other_port)) == {"node0": ["mlx5_0"]}
    assert selected((management, down("mlx5_1"))) == {"node0": ["mlx5_1"]}  # of another NIC, which may be faulty


def test_ports_that_are_all_down_stay_compute_ports_beside_an_active_management_port() -> None:
    ports = (*(down(name) for name in EIGHT), roce("mlx5_8", "100 Gb/sec (4X EDR)", **MANAGEMENT))
    assert selected(ports) == {"node0": EIGHT}
    assert selected(ports, eight()) == {"node0": EIGHT, "node1": EIGHT}


def test_ports_are_in_natural_order() -> None:
    assert selected((port("mlx5_10"), port("mlx5_9")))["node0"] == ["mlx5_9", "mlx5_10"]


@pytest.mark.parametrize(
    ("hca", "names"),
    [
        ("mlx5_0,mlx5_3", ["mlx5_0", "mlx5_3"]),
        ("=mlx5_1:1", ["mlx5_1"]),
        ("mlx5", [*EIGHT, "mlx5_8"]),
        ("^mlx5_0", EIGHT[1:]),
        ("^=mlx5_0,mlx5_1", EIGHT[2:]),
    ],
)
def test_nccl_ib_hca_decides(hca: str, names: list[str]) -> None:
    assert selected(eight(mlx5_8=roce("mlx5_8", **MANAGEMENT)), hca=hca) == {"node0": names}


def test_a_setting_that_selects_no_port_is_an_error() -> None:
    with pytest.raises(SeatrialError, match=r"NCCL_IB_HCA==mlx5_1:2 on node0 selects none"):
        selected(eight(), hca="=mlx5_1:2")


def test_with_sockets_there_are_no_compute_ports() -> None:
    with pytest.raises(NotApplicable) as skipped:
        select_compute_ports({"node0": NodePorts(eight(), rdma_off="NCCL_IB_DISABLE=1")})
    assert all(f"node0/{name}: NCCL_IB_DISABLE=1" in str(skipped.value) for name in EIGHT)


def test_ports_of_one_node_are_enough() -> None:
    with pytest.raises(NotApplicable, match="no RDMA port"):
        select_compute_ports({"node0": NodePorts(())})
    assert select_compute_ports({"node0": NodePorts(eight()), "node1": NodePorts(())}).by_node["node1"] == ()


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("NCCL_IB_DISABLE", "1", "NCCL_IB_DISABLE=1"),
        ("NCCL_IB_DISABLE", "0", ""),
        ("NCCL_NET", "Socket", "NCCL_NET=Socket"),
        ("NCCL_NET", "IB", ""),
    ],
)
def test_settings_that_keep_nccl_from_rdma(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, off: str
) -> None:
    trees.node(tmp_path)
    monkeypatch.setenv(name, value)
    assert read_node_ports(tmp_path) == NodePorts((), rdma_off=off)


def test_a_port_that_is_down_is_judged_if_it_is_active_elsewhere_or_most_others_are_active() -> None:
    one_down = eight(mlx5_4=down("mlx5_4"))
    assert selected(one_down) == {"node0": EIGHT}
    assert selected(one_down, eight())["node0"] == EIGHT
    assert selected(one_down, one_down)["node0"] == EIGHT  # a leaf switch without power


def test_the_second_port_of_a_nic_may_be_unused() -> None:
    first, second = ("0000:15:01.0", "0000:18:00.0"), ("0000:15:01.0", "0000:18:00.1")
    node = eight(mlx5_0=port("mlx5_0", pci_path=first), mlx5_8=down("mlx5_8", pci_path=second))
    assert selected(node, node) == {"node0": EIGHT, "node1": EIGHT}
    assert selected(node, eight(mlx5_8=port("mlx5_8")))["node0"] == [*EIGHT, "mlx5_8"]


def test_on_a_node_with_half_of_its_ports_down_they_are_unused_unless_nccl_ib_hca_lists_them() -> None:
    ports = (port("mlx5_0"), down("mlx5_1"))
    assert selected(ports) == {"node0": ["mlx5_0"]}
    assert selected(ports, hca="mlx5_0,mlx5_1") == {"node0": ["mlx5_0", "mlx5_1"]}


def test_mixed_nic_models_have_compute_ports_of_their_own() -> None:
    older = tuple(port(name, "200 Gb/sec (4X HDR)", model="MT4123", board=None) for name in EIGHT[:4])
    assert selected(eight(), older, ()) == {"node0": EIGHT, "node1": EIGHT[:4], "node2": []}
