"""Error counters before and after a check: of one GPU, and of the node's RDMA ports. What grew becomes a fact.

    {"read": 13,                                             how many were read both times
     "grew": {"gpu3": {"ecc_corrected": [0, 2]}, "mlx5_0/1": {"symbol_error": [7, 9]}},
     "xids": [43],
     "unread": {"gpu3 pcie_replays": "Unknown Error"},       refused for a fault
     "denied": {"Insufficient Permissions": ["gpu3 xid"]},   may not be read
     "lacks": {"Not Supported": ["gpu3 nvlink_replays"]}}    is not there

What is empty is left out: at thousands of ranks the fact of a healthy one has to be small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from seatrial.discover.gpu_counters import GpuErrorCounters
from seatrial.discover.nvml import NvmlUnavailableError, nvml_session
from seatrial.discover.port_counters import PortErrorCounters
from seatrial.hardware.error_counters import counter_definitions, increase
from seatrial.model import Metric


class ErrorCounts:
    """The growth of counters. Complete when the block of ``counted`` is left."""

    def __init__(self) -> None:
        self.gpu: GpuErrorCounters | None = None  # None without a GPU, or where NVML cannot be used
        self._read = 0
        self._grew: dict[str, dict[str, list[int]]] = {}
        self._unread: dict[str, str] = {}
        self._denied: dict[str, list[str]] = {}
        self._lacks: dict[str, list[str]] = {}

    @property
    def _xids(self) -> list[int]:
        return self.gpu.xids if self.gpu else []

    def fact(self) -> dict[str, Any]:
        parts = {
            "grew": self._grew,
            "xids": self._xids,
            "unread": self._unread,
            "denied": self._denied,
            "lacks": self._lacks,
        }
        return {"read": self._read, **{name: part for name, part in parts.items() if part}}

    def metrics(self, gpu: str, node: str) -> Iterator[Metric]:
        """The growth of each counter whose growth may be a fault: of the GPU that is the subject ``gpu``, and of all
        ports of ``node`` together."""
        sums: dict[tuple[str, str], int] = {}
        for place, counters in self._grew.items():
            kind, subject = (counter_definitions().port, node) if "/" in place else (counter_definitions().gpu, gpu)
            for counter, (before, after) in counters.items():
                if kind[counter].level != "info" and (new := increase(before, after)):
                    sums[counter, subject] = sums.get((counter, subject), 0) + new
        if xids := [xid for xid in self._xids if counter_definitions().for_xid(xid).level != "info"]:
            sums["xid", gpu] = len(xids)
        for (counter, subject), new in sums.items():
            yield Metric(name=f"new_errors.{counter}", value=new, unit="errors", subject=subject)

    def start_gpu(self, gpu: int, stack: ExitStack) -> None:
        """Begin to count on NVML's GPU ``gpu``, until ``stack`` is closed."""
        try:
            nvml = stack.enter_context(nvml_session())
        except NvmlUnavailableError as error:
            self._unread[f"gpu{gpu}"] = str(error)
            return
        try:
            self.gpu = GpuErrorCounters(nvml, gpu)
        except nvml.NVMLError as error:
            self._unread[f"gpu{gpu}"] = f"NVML: {error}"
            return
        self.gpu.begin()

    def add_counters(self, counters: GpuErrorCounters | PortErrorCounters, place: str = "") -> None:
        """Take in counters that were read twice; ``place`` is the device of those that do not name it themselves."""

        def name(key: str | tuple[str, ...]) -> tuple[str, ...]:
            return (place, key) if isinstance(key, str) else key

        second: Mapping[Any, int] = counters.after
        for key, before in counters.before.items():
            after = second.get(key)
            self._read += after is not None
            where, counter = name(key)
            limit = counter_definitions().port[counter].limit if counter in counter_definitions().port else None
            # The numbers of Xids are kept instead of their count; a counter at its limit does not show its growth
            if after is not None and counter != "xid" and (after != before or after == limit):
                self._grew.setdefault(where, {})[counter] = [before, after]
        for key, why in counters.unavailable.items():
            (self._denied if key in counters.permission_denied else self._lacks).setdefault(why, []).append(
                " ".join(name(key))
            )
        self._unread |= {" ".join(name(key)): why for key, why in counters.read_errors.items()}


@contextmanager
def count_errors(gpu: int | None, ports: bool, root: Path = Path("/")) -> Iterator[ErrorCounts]:
    """Count while the block runs: on NVML's GPU ``gpu``, and on the RDMA ports under ``root`` if ``ports``.

    Never raises for counters that cannot be read: the window's fact names them.
    """
    window = ErrorCounts()
    with ExitStack() as stack:
        if gpu is not None:
            window.start_gpu(gpu, stack)
        port_counters = PortErrorCounters(root) if ports else None
        if port_counters:
            port_counters.begin()
        yield window
        if port_counters:
            port_counters.end()
            window.add_counters(port_counters)
        if window.gpu:
            window.gpu.end()
            window.add_counters(window.gpu, f"gpu{gpu}")
