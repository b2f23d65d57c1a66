from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from seatrial.model.telemetry import HOST_GAUGES
from seatrial.telemetry import host_gauges
from seatrial.telemetry.host_gauges import HostGauges
from tests.processes import until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(host_gauges, "time", clock)
    return clock


def looked(gauges: HostGauges) -> dict[str, float | None]:
    return dict(zip([gauge.name for gauge in HOST_GAUGES], gauges.read(), strict=True))


def port(root: Path, received: int, sent: int) -> None:
    folder = root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "port_rcv_data").write_text(f"{received}\n")
    (folder / "port_xmit_data").write_text(f"{sent}\n")


def test_rdma_counters_are_in_words_of_four_octets(tmp_path: Path, clock: SimpleNamespace) -> None:
    port(tmp_path, 1000, 5)
    gauges = HostGauges(tmp_path)
    clock.now += 2
    port(tmp_path, 1000 + 12_500_000_000, 5)
    row = looked(gauges)
    assert (row["rdma_rx_gbs"], row["rdma_tx_gbs"]) == (25.0, 0.0)
    assert gauges.unreadable == {}


def test_a_node_without_rdma_says_so_once(tmp_path: Path) -> None:
    gauges = HostGauges(tmp_path)
    assert looked(gauges)["rdma_rx_gbs"] is None
    assert gauges.unreadable["rdma_rx_gbs"] == "no RDMA port"


@pytest.mark.parametrize(("cards", "expected"), [(("eth0",), 3.0), ((), 10.0)])
def test_a_bridge_does_not_count_the_cards_bytes_again(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, cards: tuple[str, ...], expected: float
) -> None:
    """Where there is no card, in a container, all interfaces count but the loopback."""
    for card in cards:
        (tmp_path / "sys/class/net" / card / "device").mkdir(parents=True)
    counted = {"eth0": 0, "br0": 0, "lo": 0}
    monkeypatch.setattr(
        psutil,
        "net_io_counters",
        lambda pernic: {n: SimpleNamespace(bytes_recv=b, bytes_sent=0) for n, b in counted.items()},
    )
    gauges = HostGauges(tmp_path)
    counted |= {"eth0": 3_000_000, "br0": 7_000_000, "lo": 90_000_000}
    clock.now += 1
    assert looked(gauges)["network_rx_mbs"] == expected


def test_two_looks_at_once_give_levels_and_no_rates(clock: SimpleNamespace) -> None:
    row = looked(HostGauges())
    assert row["memory_used_bytes"]
    assert (row["cpu_util"], row["network_rx_mbs"]) == (None, None)


def test_this_node_is_busy_when_it_is() -> None:
    gauges = HostGauges()
    assert until(lambda: sum(range(10**6)) and (looked(gauges)["cpu_util"] or 0) > 0)
