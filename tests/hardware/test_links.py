"""From bus bandwidth to links: what was discovered, and what each link carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.hardware import links
from seatrial.hardware.links import Links, network_to_busbw_ratio, nvlink_to_busbw_ratio
from seatrial.model import Measurement


def read(measurements: Sequence[Measurement]) -> Links:
    return links.read(measurements, catalog())


def of(check: str, subject: str = "n0", **facts: Any) -> Measurement:
    return Measurement(check=check, subject=subject, facts=facts)


def gpus(*active: int, mig: bool = False) -> Measurement:
    found = [
        {
            "index": index,
            "name": "NVIDIA H200",
            "mig_mode": mig,
            "nvlinks": [{"link": link, "active": link < up, "speed_mbps": 26562} for link in range(18)],
        }
        for index, up in enumerate(active)
    ]
    return of("gpu.inventory", gpus=found, gpus_used=list(range(len(active))))


def hosts(ports: list[dict[str, Any]], nodes: int = 2) -> list[Measurement]:
    rdma = {"devices": [{"name": "mlx5", "ports": ports}], "peermem": True, "unread": {}}
    return [of("host.inventory", f"n{node}", rdma=rdma) for node in range(nodes)]


def port(rate: str = "400 Gb/sec (4X NDR)", layer: str = "InfiniBand", state: str = "ACTIVE") -> dict[str, Any]:
    return {"port": "1", "state": state, "rate": rate, "link_layer": layer}


def path(*transports: str) -> Measurement:
    return of("collectives.transport", transports=dict.fromkeys(transports, 1))


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
        ([*hosts([port()] * 8)], ""),  # ports that nobody saw in use
        ([*hosts([port()] * 8, 1), *hosts([port()] * 4, 1), IB], ""),  # unlike nodes
        ([IB], ""),
        ([*hosts([port("unreadable")] * 8), IB], ""),
    ],
)
def test_the_class_of_the_fabric_is_what_was_used_and_discovered(measurements: list[Measurement], fabric: str) -> None:
    assert read(measurements).fabric == fabric


def test_the_gpu_with_the_fewest_links_counts() -> None:
    found = read([gpus(18, 17)])
    assert found.nvlinks == 17
    assert found.nvlink_gbps == pytest.approx(17 * 26.562)
    assert read([gpus(18, 0)]) == Links()


@pytest.mark.parametrize("shape", ["x", 5, ["x"], [None], [{"active": True, "speed_mbps": "fast"}], {"a": 1}])
def test_facts_of_another_shape_are_not_known_and_stop_no_judge(shape: Any) -> None:
    gpu = {"index": 0, "nvlinks": shape}
    port_ = {"state": "ACTIVE", "rate": shape, "link_layer": shape}
    told = (
        of("gpu.inventory", gpus=[gpu], gpus_used=[0]),
        of("gpu.inventory", gpus=shape, gpus_used=shape),
        of("host.inventory", rdma=shape),
        of("host.inventory", rdma={"devices": shape}),
        of("host.inventory", rdma={"devices": [{"ports": [port_]}]}),
    )
    assert read(told) == Links()
    assert not read([of("collectives.transport", transports=shape)]).network


def test_slices_are_known() -> None:
    assert read([gpus(18, mig=True)]).mig_models == {"NVIDIA H200"}
    assert read([gpus(18)]).mig_models == frozenset()


def test_two_nodes_by_tree_ask_little_of_a_rail_as_the_public_formula_has_it() -> None:
    """stas00/ml-engineering, network/README.md: a rail carries busbw·(k−1)/(n−1), with k nodes: 29 of 435 GB/s."""
    share = network_to_busbw_ratio("all_reduce", "Tree", 16, 2)
    assert share is not None
    assert 435 * share / 8 == pytest.approx(435 * (2 - 1) / (16 - 1))
    assert network_to_busbw_ratio("all_reduce", "Ring", 16, 2) == 1.0
    assert network_to_busbw_ratio("broadcast", "Ring", 16, 2) is None


def test_all_to_all_sends_most_of_its_data_away() -> None:
    """Of the 15 blocks that a GPU sends, 8 go to the other node: 8 GPUs send 8/15 of the bus bandwidth each."""
    assert network_to_busbw_ratio("all_to_all", "", 16, 2) == pytest.approx(8 * 8 / 15)


def test_in_the_switch_a_gpu_sends_less_than_in_a_ring() -> None:
    """Eight GPUs send 2·7/8 of the buffer in a ring, 1 + 1/8 of it with NVLS."""
    assert nvlink_to_busbw_ratio("all_reduce", "NVLS", 8) == pytest.approx((1 + 1 / 8) / (2 * 7 / 8))
    assert nvlink_to_busbw_ratio("all_reduce", "NVLSTree", 16, 2) == pytest.approx(
        (1 + 1 / 8) / (2 * 15 / 16)
    )  # of 8 of a node
    assert nvlink_to_busbw_ratio("all_reduce", "Tree", 16, 2) == pytest.approx(2 / (2 * 15 / 16))
    assert nvlink_to_busbw_ratio("all_reduce", "Tree", 8) == pytest.approx(2 / (2 * 7 / 8))
    assert nvlink_to_busbw_ratio("all_gather", "NVLS", 8) == nvlink_to_busbw_ratio("all_reduce", "Ring", 8) == 1


def storage_too(node: int, rate: str = "400 Gb/sec (4X NDR)") -> Measurement:
    """Eight cards for collectives and two, as fast, for storage."""
    devices = [{"name": f"mlx5_{number}", "ports": [port(rate)]} for number in range(10)]
    return of("host.inventory", f"n{node}", rdma={"devices": devices, "peermem": True, "unread": {}})


def using(**hcas: Any) -> Measurement:
    return of("collectives.transport", transports={"NET/IB/GDRDMA": 1}, hcas=hcas)


def test_cards_that_nccl_does_not_use_are_no_rails() -> None:
    eight = [f"mlx5_{number}/1" for number in range(8)]
    hosts = [storage_too(0), storage_too(1)]
    assert read([*hosts, using(n0=eight, n1=eight)]).fabric == "ib-8x400"
    assert read([*hosts, using()]).fabric == "ib-10x400"  # its log does not say
    assert read([*hosts, using(n0=eight, n1=eight[:4])]).fabric == ""
    assert read([*hosts, using(n0=["mlx5_77/1"], n1=["mlx5_77/1"])]).fabric == ""
    assert read([*hosts, using(n0="x", n1=5)]).fabric == "ib-10x400"
