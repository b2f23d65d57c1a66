"""Steps of the search → partners and rates of ranks; test_real_groups.py measures them."""

from __future__ import annotations

import pytest

from seatrial.bench.pairs import PairTiming
from seatrial.checks.fabric.localization import _rates, default_size
from seatrial.hardware.network_time import TcpNetwork
from seatrial.hardware.pair_rates import PairStep
from seatrial.model import parse_bytes

MEMBERS = {"n0": (0, 1), "n1": (2, 3), "n2": (4, 5)}
SIZE = 10**9


# segments per rank of which none or 10 % were sent again: with losses a transfer takes at least 0.2 s
NO_LOSS, LOSS = [(1000, 5)] * 6, [(1000, 200), *[(1000, 5)] * 5]


@pytest.mark.parametrize(("segments", "expected"), [(NO_LOSS, (1.0, 0.5)), (LOSS, (1.0, 0.5)), (None, (0.5, 0.5))])
def test_rate_is_that_of_the_slower_rank(segments: list[tuple[int, int]] | None, expected: tuple[float, float]) -> None:
    """A sender may be done before its data has arrived."""
    timings = [PairTiming(0, 4, (0.1, 0.1, 0.1), None), PairTiming(4, 0, (1.0, 2.0, 4.0), None)]
    timings += [PairTiming(1, 5, (2.0, 2.0, 2.0), None), PairTiming(5, 1, (0.1, 0.1, 0.1), None)]
    step = PairStep("directions", (("n0", "n2"),), unidirectional=True)
    (rate,) = _rates(step, MEMBERS, timings, SIZE, segments)
    assert (rate.first, rate.second, rate.unidirectional) == ("n0", "n2", True)
    assert rate.gb_s == pytest.approx(expected)


def test_a_link_that_loses_packets_is_slow_also_if_a_transfer_has_no_timeout_by_chance() -> None:
    """Times and counters of the drill lossy-link on the test cluster: n1 loses 20 % of the packets that it receives."""
    members = {"n0": (0,), "n1": (1,), "n2": (2,)}
    steps = [
        (("n1", "n2"), 13.8e-3, [(867, 40), (15783, 5), (19020, 3438)]),
        (("n0", "n2"), 4.2e-3, [(153112, 81), (1860, 10), (153144, 171)]),
        (("n0", "n1"), 4.3e-3, [(18335, 2963), (15773, 2), (860, 31)]),
    ]
    rates = []
    for pair, seconds, segments in steps:
        timings = [PairTiming(rank, 0, (seconds, 0.4), None) for node in pair for rank in members[node]]
        rates += _rates(PairStep("rounds", (pair,)), members, timings, 1 << 22, segments)
    assert [round(rate.gb_s[0], 3) for rate in rates] == [0.021, 0.999, 0.021]
    assert [round(rate.retransmitted, 3) for rate in rates] == [0.099, 0.001, 0.087]


@pytest.mark.parametrize(("gbps", "size"), [(100, "256MiB"), (10, "64MiB"), (1, "4MiB"), (0.01, "4MiB")])
def test_a_step_takes_a_second_also_on_a_slow_network(gbps: float, size: str) -> None:
    assert default_size(True, TcpNetwork(4, 1, gbps)) == parse_bytes(size)


def test_size_where_the_network_is_not_tcp_or_its_rate_unknown() -> None:
    assert default_size(True, None) == parse_bytes("256MiB")
    assert default_size(False, None) == parse_bytes("4MiB")
