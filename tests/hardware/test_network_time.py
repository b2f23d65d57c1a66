"""Expected seconds of collectives over TCP, and the sizes that are not timed on a slow network."""

from __future__ import annotations

import pytest

from seatrial.bench.operations import OPERATIONS
from seatrial.hardware.network_limits import find_limit
from seatrial.hardware.network_time import MAX_SIZE_S, TcpNetwork, busbw_factor, limit_with_network
from seatrial.model import parse_bytes

GIB, GIB8 = parse_bytes("1GiB"), parse_bytes("8GiB")
SLOW = TcpNetwork(nodes=4, gpus=8, gbps=10)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("ranks", [2, 32])
def test_factors_are_those_of_the_measurement(operation: str, ranks: int) -> None:
    assert busbw_factor(operation, ranks) == pytest.approx(OPERATIONS[operation].busbw_factor(ranks))


def test_a_ring_sends_its_bus_bandwidth_over_the_ports() -> None:
    limit = find_limit("all_reduce", "tcp", 4)
    assert limit
    busbw = limit.warn_below * 10e9 / 8  # bytes/s
    assert SLOW.operation_s("all_reduce", GIB8) == pytest.approx(GIB8 * 2 * 31 / 32 / busbw)
    assert SLOW.operation_s("all_gather", GIB8) == pytest.approx(GIB8 * 31 / 32 / busbw)
    assert SLOW.operation_s("all_to_all", GIB8) == pytest.approx(8 * SLOW.operation_s("all_gather", GIB8))
    assert TcpNetwork(4, 8, 100).operation_s("reduce", GIB) == pytest.approx(SLOW.operation_s("reduce", GIB) / 10)


@pytest.mark.parametrize(("gbps", "too_slow"), [(100, []), (20, []), (10, [GIB8]), (0.1, [GIB8])])
def test_slow_sizes_above_the_smallest_judged_one_are_not_timed(gbps: float, too_slow: list[int]) -> None:
    network = TcpNetwork(4, 8, gbps)
    assert network.too_slow_sizes("all_reduce", [parse_bytes("1MiB"), GIB, GIB8]) == too_slow
    assert all(network.size_s("all_reduce", size) > MAX_SIZE_S for size in too_slow)


def test_time_limits_grow_with_the_time_on_the_network() -> None:
    assert limit_with_network(120, None, "all_reduce", GIB8, 5) == 120
    operation_s = SLOW.operation_s("all_reduce", GIB8)
    assert limit_with_network(120, SLOW, "all_reduce", GIB8, 5) == pytest.approx(120 + 4 * 5 * operation_s)
