from __future__ import annotations

from pathlib import Path

from seatrial.discover.port_counters import PortErrorCounters


def port(root: Path, name: str = "mlx5_0", **counters: object) -> Path:
    """An RDMA port with these counters; names that end in "err" or "events" go to the driver's hw_counters."""
    folder = root / "sys/class/infiniband" / name / "ports/1"
    for counter, value in counters.items():
        file = folder / ("hw_counters" if counter.endswith(("err", "events")) else "counters") / counter
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_only_error_counters_are_read(tmp_path: Path) -> None:
    port(tmp_path, link_downed=1, port_xmit_data=10**12, port_xmit_wait=5, packet_seq_err=4)
    port(tmp_path, "rdmap0s6", retrans_timeout_events=2)
    ports = PortErrorCounters(tmp_path)
    ports.begin()
    port(tmp_path, link_downed=2, port_xmit_data=10**13)
    ports.end()
    assert ports.before == {
        ("mlx5_0/1", "link_downed"): 1,
        ("mlx5_0/1", "packet_seq_err"): 4,
        ("rdmap0s6/1", "retrans_timeout_events"): 2,
    }
    assert ports.after == {**ports.before, ("mlx5_0/1", "link_downed"): 2}
    assert (ports.unavailable, ports.read_errors) == ({}, {})


def test_a_counter_that_fails_at_begin_is_unavailable_and_at_end_a_read_error(tmp_path: Path) -> None:
    folder = port(tmp_path, symbol_error="N/A (no PMA)", link_downed=0)
    ports = PortErrorCounters(tmp_path)
    ports.begin()
    (folder / "counters/link_downed").unlink()
    ports.end()
    assert "N/A (no PMA)" in ports.unavailable[("mlx5_0/1", "symbol_error")]
    assert ports.read_errors == {("mlx5_0/1", "link_downed"): "No such file or directory"}


def test_a_port_without_error_counters_is_reported(tmp_path: Path) -> None:
    port(tmp_path, "siw0")
    assert set(PortErrorCounters(tmp_path).unavailable) == {("siw0/1", "counters")}


def test_a_node_without_rdma_has_no_ports(tmp_path: Path) -> None:
    assert not PortErrorCounters(tmp_path).ports
