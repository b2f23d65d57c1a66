"""How busy the node itself is: CPU, memory, disks, network and RDMA ports, as rates between two looks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import psutil

from seatrial.discover.file_readers import FieldReader, path_under, read_number
from seatrial.model.telemetry import HOST_GAUGES

# Documentation/ABI/stable/sysfs-class-infiniband: data octets divided by 4 (lanes)
_LANES = 4
_MB, _GB = 1e6, 1e9
MIN_INTERVAL_S = 0.05  # between two looks, for a rate: over less, one packet or one tick of the CPU's clock is a burst


class HostGauges:
    """Counters are read at each look, and compared with those of the look before; the first gives no rates."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._attempt = FieldReader()
        self._ports = sorted(path_under(root, "/sys/class/infiniband").glob("*/ports/*/counters"))
        self._cards = frozenset(card.parent.name for card in path_under(root, "/sys/class/net").glob("*/device"))
        self._before: tuple[float, dict[str, float]] = (time.monotonic(), {})
        if not self._ports:
            self.unreadable.update(dict.fromkeys(("rdma_rx_gbs", "rdma_tx_gbs"), "no RDMA port"))
        self.read()

    @property
    def unreadable(self) -> dict[str, str]:
        return self._attempt.unreadable

    def read(self) -> list[float | None]:
        """The gauges in the order of HOST_GAUGES."""
        now, (then, before) = time.monotonic(), self._before
        counters = self._counters()
        self._before = (now, counters)
        found: dict[str, float | None] = {
            name: max(0.0, counters[name] - before[name]) / (now - then)
            for name in counters
            if name in before and now > then + MIN_INTERVAL_S
        }
        busy = self._attempt("cpu_util", lambda: psutil.cpu_percent(None))
        found["cpu_util"] = busy if now > then + MIN_INTERVAL_S else None
        if memory := self._attempt("memory_used_bytes", psutil.virtual_memory):
            found["memory_used_bytes"] = memory.total - memory.available
        return [found.get(gauge.name) for gauge in HOST_GAUGES]

    def _counters(self) -> dict[str, float]:
        """What only grows: MB or GB since the node was started, under the names of their rates."""
        found: dict[str, float] = {}
        if disks := self._attempt("disk_read_mbs", psutil.disk_io_counters):
            found |= {"disk_read_mbs": disks.read_bytes / _MB, "disk_write_mbs": disks.write_bytes / _MB}
        else:
            self.unreadable.setdefault("disk_read_mbs", "no disk is seen from here")
        if cards := self._attempt("network_rx_mbs", self._of_cards):
            found |= {"network_rx_mbs": cards[0] / _MB, "network_tx_mbs": cards[1] / _MB}
        for name, file in (("rdma_rx_gbs", "port_rcv_data"), ("rdma_tx_gbs", "port_xmit_data")):
            read = partial(_sum, [port / file for port in self._ports])
            if self._ports and (words := self._attempt(name, read)) is not None:
                found[name] = words * _LANES / _GB
        return found

    def _of_cards(self) -> tuple[int, int]:
        """Bytes received and sent: of the cards, since bridges and bonds would count theirs twice; in a container,
        which sees none, of all interfaces but the loopback."""
        every = psutil.net_io_counters(pernic=True)
        chosen = [every[name] for name in self._cards & set(every)] or [
            one for name, one in every.items() if name != "lo"
        ]
        return sum(one.bytes_recv for one in chosen), sum(one.bytes_sent for one in chosen)


def _sum(files: Iterable[Path]) -> int:
    return sum(read_number(file) for file in files)
