"""Use of the node: CPU, memory, disks, network and RDMA ports. Rates are means since the previous read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import psutil

from seatrial.discover.file_readers import FieldReader, path_under, read_number
from seatrial.model.telemetry import HOST_GAUGES

# port_rcv_data and port_xmit_data count units of 4 bytes (Linux, Documentation/ABI/stable/sysfs-class-infiniband)
_BYTES_PER_COUNT = 4
_MB, _GB = 1e6, 1e9  # bytes
MIN_INTERVAL_S = 0.05  # no rate over a shorter interval, in which one packet or clock tick would look like a burst


class HostGauges:
    """Reads the host's gauges. A rate needs the counters of two reads; the constructor does the first one."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._reader = FieldReader()
        self._ports = sorted(path_under(root, "/sys/class/infiniband").glob("*/ports/*/counters"))
        self._nics = frozenset(device.parent.name for device in path_under(root, "/sys/class/net").glob("*/device"))
        self._previous_time = time.monotonic()
        self._previous_counters: dict[str, float] = {}
        if not self._ports:
            self.unreadable.update(dict.fromkeys(("rdma_rx_gbs", "rdma_tx_gbs"), "no RDMA port"))
        self.read()

    @property
    def unreadable(self) -> dict[str, str]:
        """The gauges that could not be read so far, with the reason."""
        return self._reader.unreadable

    def read(self) -> list[float | None]:
        """Return the values of HOST_GAUGES, in that order."""
        now = time.monotonic()
        counters, previous_counters = self._counters(), self._previous_counters
        interval_s = now - self._previous_time
        self._previous_time, self._previous_counters = now, counters
        values: dict[str, float | None] = {
            name: max(0.0, counter - previous_counters[name]) / interval_s
            for name, counter in counters.items()
            if name in previous_counters and interval_s > MIN_INTERVAL_S
        }
        cpu_util = self._reader("cpu_util", lambda: psutil.cpu_percent(None))
        values["cpu_util"] = cpu_util if interval_s > MIN_INTERVAL_S else None
        if memory := self._reader("memory_used_bytes", psutil.virtual_memory):
            values["memory_used_bytes"] = memory.total - memory.available
        return [values.get(gauge.name) for gauge in HOST_GAUGES]

    def _counters(self) -> dict[str, float]:
        """Return gauge → its counter since boot in MB or GB, for the gauges that are rates."""
        counters: dict[str, float] = {}
        if disks := self._reader("disk_read_mbs", psutil.disk_io_counters):
            counters |= {"disk_read_mbs": disks.read_bytes / _MB, "disk_write_mbs": disks.write_bytes / _MB}
        else:
            self.unreadable.setdefault("disk_read_mbs", "no disk visible to this process")
        if network := self._reader("network_rx_mbs", self._network_bytes):
            received, sent = network
            counters |= {"network_rx_mbs": received / _MB, "network_tx_mbs": sent / _MB}
        for name, file in (("rdma_rx_gbs", "port_rcv_data"), ("rdma_tx_gbs", "port_xmit_data")):
            read_sum = partial(_sum_of_numbers, [port / file for port in self._ports])
            if self._ports and (count := self._reader(name, read_sum)) is not None:
                counters[name] = count * _BYTES_PER_COUNT / _GB
        return counters

    def _network_bytes(self) -> tuple[int, int]:
        """Return the bytes (received, sent) of the NICs, not of bridges and bonds, which count the same bytes again.

        In a container that sees no NIC, return the bytes of all interfaces except loopback.
        """
        interfaces = psutil.net_io_counters(pernic=True)
        nics = [interfaces[name] for name in self._nics & set(interfaces)]
        counted = nics or [interface for name, interface in interfaces.items() if name != "lo"]
        return sum(interface.bytes_recv for interface in counted), sum(interface.bytes_sent for interface in counted)


def _sum_of_numbers(files: Iterable[Path]) -> int:
    return sum(read_number(file) for file in files)
