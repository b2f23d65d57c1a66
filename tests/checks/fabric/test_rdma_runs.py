"""The ranks that run perftest for each port; real programs: test_ports_real_group.py."""

from __future__ import annotations

from seatrial.checks.fabric._rdma_runs import RankPlace, ranks_of_ports
from tests.checks.fabric.port_details import down, port

SWITCHES = [("0000:15:01.0", "0000:16:00.0"), ("0000:40:01.0", "0000:41:00.0")]


def place(node: str, switch: int | None, gpu: int = 0) -> RankPlace:
    path = () if switch is None else (*SWITCHES[switch], f"0000:18:0{gpu}.0")
    return RankPlace(node, gpu, path, 8)


def test_a_port_belongs_to_the_gpu_below_its_switch() -> None:
    places = [place("a", 0, 0), place("a", 1, 1), place("b", 1, 0), place("b", 0, 1)]
    ports = [port(f"mlx5_{index}", pci_path=(*SWITCHES[index], "0000:19:00.0")) for index in (1, 0)]
    assert ranks_of_ports(ports, "a", places) == [1, 0]
    assert ranks_of_ports(ports, "b", places) == [2, 3]


def test_ports_are_spread_over_ranks_at_the_same_distance() -> None:
    places = [place("a", None, index) for index in range(2)]
    ports = [port(f"mlx5_{index}") for index in range(4)]
    assert ranks_of_ports(ports, "a", places) == [0, 1, 0, 1]
    assert ranks_of_ports([None, down("mlx5_1")], "a", places) == [0, 1]
