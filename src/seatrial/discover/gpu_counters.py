"""Error counters of a GPU before and after a load, and the Xids in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.discover.nvml import NO_SUCH_LINK, NvmlReader, error_kind, nvlink_states
from seatrial.hardware import error_counters
from seatrial.hardware.links import all_known

# Counter -> NVML's constant for nvmlDeviceGetNvLinkErrorCounter, which supports NVLink up to version 4
_NVLINK = {
    "nvlink_replays": "NVML_NVLINK_ERROR_DL_REPLAY",
    "nvlink_recoveries": "NVML_NVLINK_ERROR_DL_RECOVERY",
    "nvlink_crc_flits": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "nvlink_crc_data": "NVML_NVLINK_ERROR_DL_CRC_DATA",
}
# NVLink 5 (B200, GB200) has other counters. The equivalent of recoveries is the number of transitions from "up" to
# recovery (DCGM field 1213). The equivalent of replays is the number of packets that arrive damaged and are sent again.
# DCGM's health watch counts its fields 1204 to 1213 (DCGM_FI_DEV_NVLINK_COUNT_*) as errors.
_NVLINK_5 = {
    "nvlink_replays": (
        "NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS",
        "NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS",
        "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
        "NVML_FI_DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS",
        "NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
    ),
    "nvlink_recoveries": ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",),
}
_ROW_REMAPPING = ("rows_remapped", "remap_pending", "remap_failed")
GPU_COUNTERS = ("ecc_corrected", "ecc_uncorrected", *_ROW_REMAPPING, "pcie_replays", "nvlinks_down", *_NVLINK, "xid")


class GpuErrorCounters:
    """The error counters of one GPU at ``begin`` and at ``end``.

    ``unavailable``: counter → error, for counters that the GPU does not support or that this user may not read.
    ``xids``: the Xids between ``begin`` and ``end``.
    ``permission_denied``: the counters in ``unavailable`` that this user may not read.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self.xids: list[int] = []
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.unavailable: dict[str, str] = {}
        self.permission_denied: set[str] = set()
        self._reader = NvmlReader(nvml)
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._links: list[int] = []
        self._events: Any = None

    def begin(self) -> None:
        """Read the counters, and start to collect Xids."""
        self._links = _active_links(self._reader, self._handle)
        self.before = _read_counts(self._reader, self._handle, self._links)
        self._events = _subscribe_xids(self._reader, self._handle)
        if self._events is not None:
            self.before["xid"] = 0
        self.unavailable = self._reader.unavailable
        self.permission_denied = set(self._reader.permission_denied)

    def end(self) -> None:
        """Read the counters again; errors are recorded, not raised."""
        reader = self._reader
        self.after = _read_counts(reader, self._handle, self._links)
        if self._events is not None:
            self.xids = _queued_xids(reader, self._events)
            reader.query("events", "nvmlEventSetFree", self._events)
            if "xid" not in reader.unreadable:
                self.after["xid"] = len(self.xids)

    @property
    def unreadable(self) -> dict[str, str]:
        """The error of each field that could not be read."""
        return self._reader.unreadable

    @property
    def gpu_lost(self) -> str | None:
        """The error that shows that the GPU is lost; None if it is not."""
        return self._reader.gpu_lost

    @property
    def read_errors(self) -> dict[str, str]:
        """The error of each counter that could not be read, without those in ``unavailable``."""
        available = set(GPU_COUNTERS) - self.unavailable.keys()
        return {name: error for name, error in self.unreadable.items() if name in available}

    def increase(self, counter: str) -> int | None:
        """The increase of a counter; None if it was not read both times."""
        if counter not in self.before or counter not in self.after:
            return None
        return error_counters.increase(self.before[counter], self.after[counter])


def _read_counts(reader: NvmlReader, handle: Any, links: Sequence[int]) -> dict[str, int]:
    """The counters that NVML returns, without those that cannot be read; NVLink counters are sums over ``links``."""
    nvml = reader.nvml
    counts: dict[str, int | None] = {}
    for kind in ("corrected", "uncorrected"):
        error_type = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}")
        arguments = (handle, error_type, nvml.NVML_VOLATILE_ECC)
        counts[f"ecc_{kind}"] = reader.query(f"ecc_{kind}", "nvmlDeviceGetTotalEccErrors", *arguments)
    if rows := reader.query(_ROW_REMAPPING, "nvmlDeviceGetRemappedRows", handle):
        correctable, uncorrectable, pending, failed = rows
        counts |= {"rows_remapped": correctable + uncorrectable, "remap_pending": pending, "remap_failed": failed}
    counts["pcie_replays"] = reader.query("pcie_replays", "nvmlDeviceGetPcieReplayCounter", handle)
    if links:
        counts["nvlinks_down"] = len(set(links) - set(_active_links(reader, handle)))
        counts |= _link_counts(reader, handle, links)
    return {name: int(value) for name, value in counts.items() if value is not None}


def _link_counts(reader: NvmlReader, handle: Any, links: Sequence[int]) -> Mapping[str, int | None]:
    """The NVLink counters, summed over ``links``; None if the counter of one link could not be read."""
    totals: dict[str, int | None] = {}
    for name, constant in _NVLINK.items():
        counter = getattr(reader.nvml, constant)
        counts = all_known(_link_count(reader, handle, link, name, counter) for link in links)
        totals[name] = sum(counts) if counts else None
    for name in _NVLINK_5:
        if name in reader.unsupported:
            totals[name] = _nvlink_5_count(reader, handle, links, name)
    return totals


def _link_count(reader: NvmlReader, handle: Any, link: int, name: str, counter: int) -> int | None:
    """A counter of an active link; None if it could not be read.

    The error InvalidArgument means here that the GPU does not support the counter, since the link exists.
    """
    try:
        return int(reader.nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))
    except reader.nvml.NVMLError as error:
        reader.record_error(name, "nvmlDeviceGetNvLinkErrorCounter", error)
        if error_kind(error) == "InvalidArgument":
            reader.unsupported.add(name)
        return None


def _nvlink_5_count(reader: NvmlReader, handle: Any, links: Sequence[int], name: str) -> int | None:
    """A counter that nvmlDeviceGetNvLinkErrorCounter does not have: the sum of the NVLink 5 fields over all links.

    None if a field could not be read. If the GPU does not support these fields either, the error of
    nvmlDeviceGetNvLinkErrorCounter stays recorded.
    """
    nvml = reader.nvml
    fields = [(getattr(nvml, constant), link) for constant in _NVLINK_5[name] for link in links]
    try:
        values = list(nvml.nvmlDeviceGetFieldValues(handle, fields))
    except nvml.NVMLError as error:
        errors = [error]
    else:
        errors = [nvml.NVMLError(value.nvmlReturn) for value in values if value.nvmlReturn != nvml.NVML_SUCCESS]
    read_error = next((error for error in errors if error_kind(error) not in NO_SUCH_LINK), None)
    if errors and read_error is None:
        return None
    reader.unsupported.discard(name)
    reader.unreadable.pop(name)
    if read_error:
        reader.record_error(name, "nvmlDeviceGetFieldValues", read_error)
        return None
    return sum(int(value.value.ullVal) for value in values)  # the union is zero-initialised: ullVal reads a uint too


def _active_links(reader: NvmlReader, handle: Any) -> list[int]:
    """The numbers of the active NVLinks; if there is none, the NVLink counters are marked as unsupported."""
    counters = ("nvlinks_down", *_NVLINK)
    active = []
    for link, state in nvlink_states(reader.nvml, handle):
        if isinstance(state, Exception):
            for counter in counters:
                reader.record_error(counter, "nvmlDeviceGetNvLinkState", state)
        elif state:
            active.append(link)
    if not active and not set(counters) & set(reader.unreadable):
        reader.unreadable |= dict.fromkeys(counters, "no NVLink is up")
        reader.unsupported |= set(counters)
    return active


def _subscribe_xids(reader: NvmlReader, handle: Any) -> Any:
    """An NVML event set that receives the GPU's Xids from now on; None if NVML refuses. Needs no root privileges."""
    nvml = reader.nvml
    events = reader.query("xid", "nvmlEventSetCreate")
    if events is None:
        return None
    reader.query("xid", "nvmlDeviceRegisterEvents", handle, nvml.nvmlEventTypeXidCriticalError, events)
    if "xid" in reader.unreadable:
        reader.query("events", "nvmlEventSetFree", events)
        return None
    return events


def _queued_xids(reader: NvmlReader, events: Any) -> list[int]:
    """All Xids since ``events`` was created; NVML queues them until they are read."""
    xids: list[int] = []
    while True:
        try:
            xids.append(int(reader.nvml.nvmlEventSetWait_v2(events, 0).eventData))
        except reader.nvml.NVMLError as error:
            if error_kind(error) != "Timeout":
                reader.record_error("xid", "nvmlEventSetWait_v2", error)
            return xids
