from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.hardware import links
from seatrial.hardware.links import (
    Links,
    RdmaPorts,
    TcpInterfaces,
    network_to_busbw_ratio,
    nvlink_to_busbw_ratio,
)
from seatrial.model import Measurement


def read(measurements: Sequence[Measurement]) -> Links:
    return links.read(measurements, catalog())


def measurement(check: str, subject: str = "n0", **facts: Any) -> Measurement:
    return Measurement(check=check, subject=subject, facts=facts)


def gpus(*active: int, mig: bool = False) -> Measurement:
    inventory = [
        {
            "index": index,
            "name": "NVIDIA H200",
            "mig_mode": mig,
            "nvlinks": [{"link": link, "active": link < count, "speed_gb_s": 26.562} for link in range(18)],
        }
        for index, count in enumerate(active)
    ]
    return measurement("gpu.inventory", gpus=inventory, gpus_used=list(range(len(active))))


def hosts(ports: list[dict[str, Any]], nodes: int = 2) -> list[Measurement]:
    rdma = {"devices": [{"name": "mlx5", "ports": ports}], "peermem": True, "unreadable": {}}
    return [measurement("host.inventory", f"n{node}", rdma=rdma) for node in range(nodes)]


def port(rate: str = "400 Gb/sec (4X NDR)", layer: str = "InfiniBand", state: str = "ACTIVE") -> dict[str, Any]:
    return {"port": "1", "state": state, "rate": rate, "link_layer": layer}


def path(*transports: str) -> Measurement:
    return measurement("collectives.transport", transports=dict.fromkeys(transports, 1))


HALF = port("200 Gb/sec (2X NDR)")
DOWN = port("10 Gb/sec (4X SDR)", state="DOWN")
SLOW = port("100 Gb/sec (4X EDR)", "Ethernet")
IB = path("P2P/CUMEM", "NET/IB/GDRDMA")


@pytest.mark.parametrize(
    ("measurements", "fabric"),
    [
        ([*hosts([port()] * 8 + [SLOW]), IB], "ib-8x400"),
        ([*hosts([port(layer="Ethernet")] * 8), IB], "roce-8x400"),
        ([*hosts([port()] * 7 + [port(state="DOWN")]), IB], "ib-7x400"),
        ([*hosts([port()] * 8), path("NET/Socket", "NET/IB/GDRDMA")], "tcp"),
        ([*hosts([]), path("NET/Libfabric/GDRDMA")], "efa"),
        ([*hosts([port()] * 4), path("P2P/CUMEM", "P2P/MNNVL")], "mnnvl"),
        ([*hosts([]), path("NET/GPUDirectTCPX_v7")], "tcpx"),
        ([*hosts([]), path("NET/FasTrak")], "tcpxo"),
        ([*hosts([port()] * 8)], ""),  # NCCL's log names no transport
        ([*hosts([port()] * 8, 1), *hosts([port()] * 4, 1), IB], ""),  # nodes with different numbers of ports
        ([*hosts([port()] * 8, 1), *hosts([port()] * 7 + [HALF], 1), IB], "ib-8x400"),  # one port at half its rate
        ([*hosts([port()] * 8, 1), *hosts([port()] * 7 + [DOWN], 1), IB], ""),
        ([*hosts([port()] * 8 + [HALF] * 2), IB], "ib-8x400"),  # two ports for storage on each node
        ([IB], ""),
        ([*hosts([port("unreadable")] * 8), IB], ""),
    ],
)
def test_the_fabric_class_combines_transport_and_ports(measurements: list[Measurement], fabric: str) -> None:
    assert read(measurements).fabric == fabric


def efa(rate: str) -> list[Measurement]:
    return [*hosts([port(rate, "Unspecified")] * 16), path("NET/AWS Libfabric/GDRDMA")]


def test_ports_of_efa() -> None:
    assert read(efa("200 Gb/sec (4X HDR)")).ports == RdmaPorts("efa", 16, 200)
    assert read(efa("100 Gb/sec (4X EDR)")).ports is None  # drivers report this rate where they know none


def sockets(*speeds: int | None, interfaces: Sequence[str] = ("eth0",)) -> list[Measurement]:
    """One node for each speed of eth0."""
    names = [f"n{number}" for number in range(len(speeds))]
    nics = [{"interfaces": [{"name": "eth0", "speed_mbit_s": speed}, {"name": "eth1"}]} for speed in speeds]
    hosts_ = [measurement("host.inventory", name, nics=nic) for name, nic in zip(names, nics, strict=True)]
    used = {name: list(interfaces) for name in names}
    return [*hosts_, measurement("collectives.transport", transports={"NET/Socket": 2}, socket_interfaces=used)]


@pytest.mark.parametrize(
    ("measurements", "expected"),
    [
        (sockets(100_000, 100_000), TcpInterfaces(("eth0",), 100.0)),
        (sockets(None, None), TcpInterfaces(("eth0",), None)),
        (sockets(100_000, interfaces=("eth0", "eth1")), TcpInterfaces(("eth0", "eth1"), None)),
        (sockets(100_000, 25_000), None),  # the nodes differ
        (sockets(100_000)[1:], TcpInterfaces(("eth0",), None)),
        ([], None),
    ],
)
def test_interfaces_of_sockets(measurements: list[Measurement], expected: TcpInterfaces | None) -> None:
    assert read(measurements).tcp == expected


def test_logged_algorithms() -> None:
    by_size = {"1GiB": {"algorithm": "RING"}, "8GiB": {"algorithm": "NVLS_TREE"}, "1MiB": {"algorithm": "not logged"}}
    choices = {"all_reduce": {"by_size": by_size}, "all_to_all": {"by_size": 5}, "unavailable": "no memory"}
    algorithms = read([measurement("collectives.transport", nccl_choices=choices)]).algorithms
    assert algorithms == {("all_reduce", "1GiB"): "Ring", ("all_reduce", "8GiB"): "NVLSTree"}


@pytest.mark.parametrize(("nodes", "sent"), [(2, 1.0), (3, 1.5), (4, 2.0), (8, 2.0)])
def test_a_tree_sends_more_with_more_nodes(nodes: int, sent: float) -> None:
    """S, 1.5 S and 2 S leave the node with the most links of NCCL's two trees; SHARP sends S."""
    ranks = 8 * nodes
    factor = 2 * (ranks - 1) / ranks
    assert network_to_busbw_ratio("all_reduce", "NVLSTree", ranks, nodes) == pytest.approx(sent / factor)
    assert network_to_busbw_ratio("all_reduce", "CollNetDirect", ranks, nodes) == pytest.approx(1 / factor)


def test_the_gpu_with_the_fewest_links_counts() -> None:
    trial_links = read([gpus(18, 17)])
    assert trial_links.nvlinks == 17
    assert trial_links.nvlink_gb_s == pytest.approx(17 * 26.562)
    assert read([gpus(18, 0)]) == Links()


@pytest.mark.parametrize("shape", ["x", 5, ["x"], [None], [{"active": True, "speed_gb_s": "fast"}], {"a": 1}])
def test_malformed_facts_are_ignored(shape: Any) -> None:
    gpu = {"index": 0, "nvlinks": shape}
    port_ = {"state": "ACTIVE", "rate": shape, "link_layer": shape}
    measurements = (
        measurement("gpu.inventory", gpus=[gpu], gpus_used=[0]),
        measurement("gpu.inventory", gpus=shape, gpus_used=shape),
        measurement("host.inventory", rdma=shape),
        measurement("host.inventory", rdma={"devices": shape}),
        measurement("host.inventory", rdma={"devices": [{"ports": [port_]}]}),
    )
    assert read(measurements) == Links()
    assert not read([measurement("collectives.transport", transports=shape)]).network


@pytest.mark.parametrize(
    ("transports", "network"),
    [({"NET/Socket": 32}, "tcp"), ({"P2P/CUMEM": 8, "NET/IB/GDRDMA": 2}, ""), ({"P2P/CUMEM": 8}, ""), ({}, "")],
)
def test_without_the_transport_check_only_sockets_are_read_from_a_collective(
    transports: dict[str, int], network: str
) -> None:
    """RDMA needs the ports that NCCL uses, which the log of a collective does not list."""
    reduced = measurement("collectives.all_reduce", transports=transports)
    assert read([reduced]).network == network
    assert read([reduced, path("P2P/CUMEM")]).network == ""  # the transport check precedes


def test_models_in_mig_mode_are_listed() -> None:
    assert read([gpus(18, mig=True)]).mig_models == {"NVIDIA H200"}
    assert read([gpus(18)]).mig_models == frozenset()


def test_tree_between_two_nodes_matches_the_published_formula() -> None:
    """stas00/ml-engineering, network/README.md: a rail carries busbw·(k−1)/(n−1) for k nodes: 29 of 435 GB/s."""
    ratio = network_to_busbw_ratio("all_reduce", "Tree", 16, 2)
    assert ratio is not None
    assert 435 * ratio / 8 == pytest.approx(435 * (2 - 1) / (16 - 1))
    assert network_to_busbw_ratio("all_reduce", "Ring", 16, 2) == 1.0
    assert network_to_busbw_ratio("broadcast", "Ring", 16, 2) == 1.0
    assert network_to_busbw_ratio("send_receive", "Ring", 16, 2) is None  # it loads the ports of one GPU only


def test_all_to_all_sends_most_of_its_data_to_other_nodes() -> None:
    """A GPU sends 8 of its 15 blocks to the other node: 8 GPUs send 8/15 of the bus bandwidth each."""
    assert network_to_busbw_ratio("all_to_all", "", 16, 2) == pytest.approx(8 * 8 / 15)


def test_a_gpu_sends_less_with_nvls_than_with_ring() -> None:
    """Each of eight GPUs sends 2·7/8 of the buffer with Ring, 1 + 1/8 of it with NVLS."""
    assert nvlink_to_busbw_ratio("all_reduce", "NVLS", 8) == pytest.approx((1 + 1 / 8) / (2 * 7 / 8))
    assert nvlink_to_busbw_ratio("all_reduce", "NVLSTree", 16, 2) == pytest.approx(
        (1 + 1 / 8) / (2 * 15 / 16)
    )  # 8 GPUs per node
    assert nvlink_to_busbw_ratio("all_reduce", "Tree", 16, 2) == pytest.approx(2 / (2 * 15 / 16))
    assert nvlink_to_busbw_ratio("all_reduce", "Tree", 8) == pytest.approx(2 / (2 * 7 / 8))
    assert nvlink_to_busbw_ratio("all_gather", "NVLS", 8) == nvlink_to_busbw_ratio("all_reduce", "Ring", 8) == 1


def host_with_storage_ports(node: int, rate: str = "400 Gb/sec (4X NDR)") -> Measurement:
    """A node with eight ports for collectives and two equally fast ports for storage."""
    devices = [{"name": f"mlx5_{number}", "ports": [port(rate)]} for number in range(10)]
    return measurement("host.inventory", f"n{node}", rdma={"devices": devices, "peermem": True, "unreadable": {}})


def ports_in_log(**rdma_ports: Any) -> Measurement:
    return measurement("collectives.transport", transports={"NET/IB/GDRDMA": 1}, rdma_ports=rdma_ports)


def test_only_ports_that_nccl_uses_count() -> None:
    eight = [f"mlx5_{number}/1" for number in range(8)]
    hosts = [host_with_storage_ports(0), host_with_storage_ports(1)]
    assert read([*hosts, ports_in_log(n0=eight, n1=eight)]).fabric == "ib-8x400"
    assert read([*hosts, ports_in_log()]).fabric == "ib-10x400"  # the log does not list the ports
    assert read([*hosts, ports_in_log(n0=eight, n1=eight[:4])]).fabric == ""
    assert read([*hosts, ports_in_log(n0=["mlx5_77/1"], n1=["mlx5_77/1"])]).fabric == ""
    assert read([*hosts, ports_in_log(n0="x", n1=5)]).fabric == "ib-10x400"


@pytest.mark.parametrize(("channels", "nvls"), [(16, True), (0, False), (None, None)])
def test_nvls_channels_of_the_log(channels: int | None, nvls: bool | None) -> None:
    facts: dict[str, Any] = {} if channels is None else {"nvls_channels": channels}
    assert read([measurement("collectives.transport", transports={"P2P/CUMEM": 1}, **facts)]).nvls is nvls
