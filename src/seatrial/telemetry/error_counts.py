"""Error counters of one GPU and of the node's RDMA ports, before and after a check.

``ErrorCounts.fact`` returns them as a fact of the check, here with an example of each part:

    {"counters_read": 13,                                               number of counters read both times
     "increased": {"gpu3": {"ecc_corrected": [0, 2]}, "mlx5_0/1": {"symbol_error": [7, 9]}},   before, after
     "xids": [43],                                                      Xids reported during the check
     "unreadable": {"gpu3 pcie_replays": "Unknown Error"},              counter → read error
     "permission_denied": {"Insufficient Permissions": ["gpu3 xid"]},   error → counters
     "not_supported": {"Not Supported": ["gpu3 nvlink_replays"]}}       error → counters

Empty parts are omitted, to keep the facts of thousands of healthy ranks small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from seatrial.discover.gpu_counters import GpuErrorCounters
from seatrial.discover.nvml import NvmlUnavailableError, nvml_session
from seatrial.discover.port_counters import PortErrorCounters
from seatrial.hardware.error_counters import counter_definitions, increase
from seatrial.model import Metric

_ERROR_LEVELS = ("FAIL", "WARN")


class ErrorCounts:
    """Increases of error counters; complete after the block of ``count_errors``."""

    def __init__(self) -> None:
        self.gpu_counters: GpuErrorCounters | None = None  # None without a GPU, or if NVML is not available
        self._read_count = 0
        self._increased: dict[str, dict[str, list[int]]] = {}
        self._unreadable: dict[str, str] = {}
        self._permission_denied: dict[str, list[str]] = {}
        self._not_supported: dict[str, list[str]] = {}

    @property
    def _xids(self) -> list[int]:
        return self.gpu_counters.xids if self.gpu_counters else []

    def fact(self) -> dict[str, Any]:
        """Return the fact described at the top of this module."""
        parts = {
            "increased": self._increased,
            "xids": self._xids,
            "unreadable": self._unreadable,
            "permission_denied": self._permission_denied,
            "not_supported": self._not_supported,
        }
        return {"counters_read": self._read_count, **{name: part for name, part in parts.items() if part}}

    def metrics(self, gpu_subject: str, node: str) -> Iterator[Metric]:
        """Yield ``new_errors.*`` of each counter with level FAIL or WARN; a port counter is summed over all ports."""
        definitions = counter_definitions()
        sums: Counter[tuple[str, str]] = Counter()  # (counter, subject) → new errors
        for device, counters in self._increased.items():
            is_port = "/" in device  # such as mlx5_0/1
            definition_by_counter, subject = (definitions.port, node) if is_port else (definitions.gpu, gpu_subject)
            for counter, (before, after) in counters.items():
                new_errors = increase(before, after)
                if new_errors and definition_by_counter[counter].level in _ERROR_LEVELS:
                    sums[counter, subject] += new_errors
        if xids := [xid for xid in self._xids if definitions.for_xid(xid).level in _ERROR_LEVELS]:
            sums["xid", gpu_subject] = len(xids)
        for (counter, subject), new_errors in sums.items():
            yield Metric(name=f"new_errors.{counter}", value=new_errors, unit="errors", subject=subject)

    def start_gpu(self, nvml_index: int, stack: ExitStack) -> None:
        """Read the GPU's counters for the first time; NVML stays open until ``stack`` is closed."""
        try:
            nvml = stack.enter_context(nvml_session())
        except NvmlUnavailableError as error:
            self._unreadable[f"gpu{nvml_index}"] = str(error)
            return
        try:
            self.gpu_counters = GpuErrorCounters(nvml, nvml_index)
        except nvml.NVMLError as error:
            self._unreadable[f"gpu{nvml_index}"] = f"NVML: {error}"
            return
        self.gpu_counters.begin()

    def add_counters(self, counters: GpuErrorCounters | PortErrorCounters, device: str = "") -> None:
        """Add counters that were read before and after the check.

        ``device``: the GPU of GpuErrorCounters, whose keys are only names of counters. The keys of PortErrorCounters
        are (port, counter).
        """

        def full_key(key: str | tuple[str, ...]) -> tuple[str, ...]:
            return (device, key) if isinstance(key, str) else key

        port_definitions = counter_definitions().port
        after_by_key: Mapping[Any, int] = counters.after
        for key, before in counters.before.items():
            after = after_by_key.get(key)
            self._read_count += after is not None
            counter_device, counter = full_key(key)
            limit = port_definitions[counter].limit if counter in port_definitions else None
            # A counter at its limit cannot increase any more, so it is listed even if it did not change. Xids have a
            # list of their own.
            if after is not None and counter != "xid" and (after != before or after == limit):
                self._increased.setdefault(counter_device, {})[counter] = [before, after]
        for key, reason in counters.unavailable.items():
            counters_by_reason = self._permission_denied if key in counters.permission_denied else self._not_supported
            counters_by_reason.setdefault(reason, []).append(" ".join(full_key(key)))
        self._unreadable |= {" ".join(full_key(key)): reason for key, reason in counters.read_errors.items()}


@contextmanager
def count_errors(nvml_index: int | None, ports: bool, root: Path = Path("/")) -> Iterator[ErrorCounts]:
    """Count the errors of one GPU and, with ``ports``, of all RDMA ports under ``root`` while the block runs.

    Never raises for counters that cannot be read; the fact lists them.
    """
    counts = ErrorCounts()
    with ExitStack() as stack:
        if nvml_index is not None:
            counts.start_gpu(nvml_index, stack)
        port_counters = PortErrorCounters(root) if ports else None
        if port_counters:
            port_counters.begin()
        yield counts
        if port_counters:
            port_counters.end()
            counts.add_counters(port_counters)
        if counts.gpu_counters:
            counts.gpu_counters.end()
            counts.add_counters(counts.gpu_counters, f"gpu{nvml_index}")
