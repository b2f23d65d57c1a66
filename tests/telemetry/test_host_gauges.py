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


def read_row(gauges: HostGauges) -> dict[str, float | None]:
    return dict(zip([gauge.name for gauge in HOST_GAUGES], gauges.read(), strict=True))


def port(root: Path, received: int, sent: int) -> None:
    folder = root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "port_rcv_data").write_text(f"{received}\n")
    (folder / "port_xmit_data").write_text(f"{sent}\n")


def test_rdma_counters_count_units_of_four_bytes(tmp_path: Path, clock: SimpleNamespace) -> None:
    port(tmp_path, 1000, 5)
    gauges = HostGauges(tmp_path)
    clock.now += 2
    port(tmp_path, 1000 + 12_500_000_000, 5)
    row = read_row(gauges)
    assert (row["rdma_rx_gbs"], row["rdma_tx_gbs"]) == (25.0, 0.0)
    assert gauges.unreadable == {}


def test_node_without_rdma_reports_the_gauges_as_unreadable(tmp_path: Path) -> None:
    gauges = HostGauges(tmp_path)
    assert read_row(gauges)["rdma_rx_gbs"] is None
    assert gauges.unreadable["rdma_rx_gbs"] == "no RDMA port"


@pytest.mark.parametrize(("nics", "expected"), [(("eth0",), 3.0), ((), 10.0)])
def test_bridge_does_not_count_the_nics_bytes_again(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, nics: tuple[str, ...], expected: float
) -> None:
    """Without a NIC, as in a container, all interfaces except loopback count."""
    for nic in nics:
        (tmp_path / "sys/class/net" / nic / "device").mkdir(parents=True)
    counted = {"eth0": 0, "br0": 0, "lo": 0}
    monkeypatch.setattr(
        psutil,
        "net_io_counters",
        lambda pernic: {n: SimpleNamespace(bytes_recv=b, bytes_sent=0) for n, b in counted.items()},
    )
    gauges = HostGauges(tmp_path)
    counted |= {"eth0": 3_000_000, "br0": 7_000_000, "lo": 90_000_000}
    clock.now += 1
    assert read_row(gauges)["network_rx_mbs"] == expected


def test_two_reads_at_once_have_no_rates(clock: SimpleNamespace) -> None:
    row = read_row(HostGauges())
    assert row["memory_used_bytes"]
    assert (row["cpu_util"], row["network_rx_mbs"]) == (None, None)


def test_cpu_utilisation_of_this_node() -> None:
    gauges = HostGauges()
    assert until(lambda: sum(range(10**6)) and (read_row(gauges)["cpu_util"] or 0) > 0)
