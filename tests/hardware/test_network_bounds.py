"""Bounds of the bus bandwidth between nodes, against published figures (benchmarks/published_figures.yaml)."""

from __future__ import annotations

import pytest

from seatrial.hardware.network_bounds import LinkKind, NodeLinks, default_algorithm, network_bound

HOPPER = NodeLinks(8, 8, 400, "RDMA ports ib", nvlink=370.8, pcie=63, busbw=480, nvls=True)


def bound(operation: str, algorithm: str, nodes: int, node: NodeLinks = HOPPER) -> tuple[float, LinkKind]:
    """The bound in GB/s, rounded to 0.001, and its link."""
    found = network_bound(operation, algorithm, nodes, node)
    assert found
    return round(found.value, 3), found.link


@pytest.mark.parametrize(
    ("operation", "algorithm", "nodes", "expected", "link"),
    [
        ("all_reduce", "Ring", 2, 400, LinkKind.PORTS),
        ("all_reduce", "Ring", 16, 400, LinkKind.PORTS),
        ("all_reduce", "NVLSTree", 2, 480, LinkKind.NVLINK),  # below 2 × 400 × 15/16 of the ports
        ("all_reduce", "Tree", 2, 370.8 * 15 / 16, LinkKind.NVLINK),  # NVIDIA/nccl#1221: 330 without NVLS
        ("all_reduce", "NVLSTree", 4, 400 * 31 / 32, LinkKind.PORTS),
        ("all_reduce", "NVLS", 8, 480, LinkKind.NVLINK),  # SHARP: Azure reaches 450
        ("all_gather", "Ring", 4, 400, LinkKind.PORTS),
        ("reduce_scatter", "Ring", 128, 400, LinkKind.PORTS),
        ("broadcast", "Ring", 4, 400, LinkKind.PORTS),
        ("all_to_all", "point to point", 2, 50 * 15 / 8, LinkKind.PORTS),
        ("all_to_all", "point to point", 4, 50 * 31 / 24, LinkKind.PORTS),
        ("send_receive", "point to point", 2, 50, LinkKind.PORTS),
    ],
)
def test_bound_of_each_operation(operation: str, algorithm: str, nodes: int, expected: float, link: LinkKind) -> None:
    assert bound(operation, algorithm, nodes) == (round(expected, 3), link)


def test_a_tree_on_three_nodes_sends_half_as_much_again() -> None:
    """NVIDIA/nccl#1801, GB200 with four GPUs and 4 × 400 Gb/s a node: 234.4 GB/s, above the 200 of the ports."""
    node = NodeLinks(4, 4, 400, "ports", nvlink=721.8)
    assert bound("all_reduce", "NVLSTree", 3, node)[0] == round(200 * 4 / 3 * 11 / 12, 3)


def test_the_network_binds_two_nodes_of_b200() -> None:
    """Published: 684 to 718 GB/s; NVLink switches reach 838."""
    b200 = NodeLinks(8, 8, 400, "ports", nvlink=721.8, busbw=838, nvls=True)
    assert bound("all_reduce", "NVLSTree", 2, b200) == (750, LinkKind.PORTS)


def test_nvlink_binds_a_ring_over_fast_ports() -> None:
    fast = NodeLinks(8, 8, 800, "ports", nvlink=370.8)
    assert bound("all_reduce", "Ring", 4, fast) == (round(370.8 * 8 / 7, 3), LinkKind.NVLINK)


def test_pcie_binds_few_gpus_with_many_ports() -> None:
    two_of_eight = NodeLinks(2, 8, 400, "ports", nvlink=370.8, pcie=63)
    assert bound("all_reduce", "Ring", 2, two_of_eight) == (126, LinkKind.PCIE)
    one = NodeLinks(1, 4, 400, "ports", nvlink=370.8, pcie=63)
    assert bound("all_reduce", "Tree", 2, one)[1] is LinkKind.PCIE


def test_gpus_without_nvlink() -> None:
    """8 × RTX 6000D with 8 × 400 Gb/s: all-to-all 45.7 GB/s, since all blocks pass the ports."""
    pcie = NodeLinks(8, 8, 400, "ports", pcie=63)
    assert bound("all_to_all", "point to point", 2, pcie) == (50, LinkKind.PORTS)
    assert bound("all_reduce", "Ring", 2, pcie)[1] is LinkKind.PCIE  # what good root complexes reach is unknown
    slow_network = NodeLinks(8, 1, 25, "eth0", pcie=63)
    assert bound("all_reduce", "Ring", 2, slow_network) == (round(25 / 8, 3), LinkKind.PORTS)


def test_one_gpu_may_use_a_whole_port() -> None:
    assert bound("send_receive", "point to point", 2, NodeLinks(8, 1, 400, "ports"))[0] == pytest.approx(50)


def test_unknown_operations_have_no_bound() -> None:
    assert network_bound("gpu_pairs", "Ring", 2, HOPPER) is None


def test_arithmetic_has_the_values() -> None:
    found = network_bound("all_reduce", "Ring", 2, HOPPER)
    assert found
    for text in ("8 × 400 Gb/s", "400 GB/s", "binding link: network ports"):
        assert text in found.arithmetic


@pytest.mark.parametrize(
    ("operation", "nodes", "nvls", "algorithm"),
    [
        ("all_reduce", 2, True, "NVLSTree"),
        ("all_reduce", 3, False, "Tree"),
        ("all_reduce", 4, True, "Ring"),
        ("all_gather", 2, True, "Ring"),
        ("all_to_all", 2, True, "point to point"),
    ],
)
def test_usual_algorithm(operation: str, nodes: int, nvls: bool, algorithm: str) -> None:
    assert default_algorithm(operation, nodes, nvls=nvls) == algorithm
