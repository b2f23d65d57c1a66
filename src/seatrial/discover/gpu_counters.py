"""The errors that a GPU counts: before and after a load, and the Xids that the driver told of meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.discover.nvml import NvmlReader, error_kind
from seatrial.hardware.error_counters import increase

# Our name of a counter → NVML's, which it keeps for each link up to NVLink 4.
_NVLINK = {
    "nvlink_replays": "NVML_NVLINK_ERROR_DL_REPLAY",
    "nvlink_recoveries": "NVML_NVLINK_ERROR_DL_RECOVERY",
    "nvlink_crc_flits": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "nvlink_crc_data": "NVML_NVLINK_ERROR_DL_CRC_DATA",
}
# NVLink 5 (B200, GB200) keeps others, of which these say the same: how often a link left its state "up" for recovery
# (DCGM's words for field 1213), and in place of replays what arrived damaged, so that it has to be sent again. What
# DCGM's health watch counts as errors there: DCGM_FI_DEV_NVLINK_COUNT_* 1204 to 1213.
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
_ROWS = ("rows_remapped", "remap_pending", "remap_failed")
GPU_COUNTERS = ("ecc_corrected", "ecc_uncorrected", *_ROWS, "pcie_replays", "nvlinks_down", *_NVLINK, "xid")
_NO_SUCH_LINK = ("NotSupported", "InvalidArgument")


class GpuErrorCounters:
    """The error counters of one GPU at ``begin`` and at ``end``.

    ``lacks``: counters that this GPU, or this driver, does not have, or this user may not read (``denied``), and why.
    ``unread``: all that NVML refused. ``gone``: why the GPU was lost.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self.xids: list[int] = []
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.unavailable: dict[str, str] = {}
        self.permission_denied: set[str] = set()
        self._interview = NvmlReader(nvml)
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._links: list[int] = []
        self._events: Any = None

    def begin(self) -> None:
        self._links = _active_links(self._interview, self._handle)
        self.before = _count(self._interview, self._handle, self._links)
        self._events = _listen(self._interview, self._handle)
        if self._events is not None:
            self.before["xid"] = 0
        self.unavailable, self.permission_denied = self._interview.unavailable, set(self._interview.permission_denied)

    def end(self) -> None:
        """Read the counters again. Never raises for a refusal."""
        interview = self._interview
        self.after = _count(interview, self._handle, self._links)
        if self._events is not None:
            self.xids = _queued_xids(interview, self._events)
            interview.query("events", "nvmlEventSetFree", self._events)
            if "xid" not in interview.unreadable:
                self.after["xid"] = len(self.xids)

    @property
    def unreadable(self) -> dict[str, str]:
        return self._interview.unreadable

    @property
    def gpu_lost(self) -> str | None:
        return self._interview.gpu_lost

    @property
    def read_errors(self) -> dict[str, str]:
        """The counters that were refused though this GPU has them."""
        return {
            name: why for name, why in self.unreadable.items() if name in GPU_COUNTERS and name not in self.unavailable
        }

    def increase(self, counter: str) -> int | None:
        """By how much a counter grew; None where it was not read both times."""
        if counter not in self.before or counter not in self.after:
            return None
        return increase(self.before[counter], self.after[counter])


def _count(interview: NvmlReader, handle: Any, links: Sequence[int]) -> dict[str, int]:
    """The counters that NVML tells; those of NVLink summed over ``links``."""
    nvml = interview.nvml
    found: dict[str, int | None] = {}
    for kind in ("corrected", "uncorrected"):
        error = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}")
        arguments = (handle, error, nvml.NVML_VOLATILE_ECC)
        found[f"ecc_{kind}"] = interview.query(f"ecc_{kind}", "nvmlDeviceGetTotalEccErrors", *arguments)
    if rows := interview.query(_ROWS, "nvmlDeviceGetRemappedRows", handle):
        correctable, uncorrectable, pending, failed = rows
        found |= {"rows_remapped": correctable + uncorrectable, "remap_pending": pending, "remap_failed": failed}
    found["pcie_replays"] = interview.query("pcie_replays", "nvmlDeviceGetPcieReplayCounter", handle)
    if links:
        found["nvlinks_down"] = len(set(links) - set(_active_links(interview, handle)))
        found |= _of_links(interview, handle, links)
    return {name: int(value) for name, value in found.items() if value is not None}


def _of_links(interview: NvmlReader, handle: Any, links: Sequence[int]) -> Mapping[str, int | None]:
    found: dict[str, int | None] = {}
    for name, constant in _NVLINK.items():
        counts = [_of_link(interview, handle, link, name, getattr(interview.nvml, constant)) for link in links]
        known = [count for count in counts if count is not None]
        found[name] = sum(known) if len(known) == len(counts) else None
    for name in [name for name in _NVLINK_5 if name in interview.unsupported]:
        found[name] = _of_fields(interview, handle, links, name)
    return found


def _of_link(interview: NvmlReader, handle: Any, link: int, name: str, counter: int) -> int | None:
    """A counter of a link that is up. That NVML calls it an invalid argument means that this GPU does not keep it."""
    try:
        return int(interview.nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))
    except interview.nvml.NVMLError as error:
        interview.record_error(name, "nvmlDeviceGetNvLinkErrorCounter", error)
        if error_kind(error) == "InvalidArgument":
            interview.unsupported.add(name)
        return None


def _of_fields(interview: NvmlReader, handle: Any, links: Sequence[int], name: str) -> int | None:
    """The sum over all links, as NVLink 5 keeps it, of a counter that they refused in its old form.

    A field's scope is the link. A GPU that has neither form keeps what was said of the old one.
    """
    nvml, function = interview.nvml, "nvmlDeviceGetFieldValues"
    asked = [(getattr(nvml, field), link) for field in _NVLINK_5[name] for link in links]
    try:
        answers = list(nvml.nvmlDeviceGetFieldValues(handle, asked))
    except nvml.NVMLError as error:
        refusals = [error]
    else:
        refusals = [nvml.NVMLError(one.nvmlReturn) for one in answers if one.nvmlReturn != nvml.NVML_SUCCESS]
    fault = next((error for error in refusals if error_kind(error) not in _NO_SUCH_LINK), None)
    if refusals and fault is None:
        return None
    interview.unsupported.discard(name)
    interview.unreadable.pop(name)
    if fault:
        interview.record_error(name, function, fault)
        return None
    return sum(int(one.value.ullVal) for one in answers)  # the structures are zeroed, so that it holds a uint too


def _active_links(interview: NvmlReader, handle: Any) -> list[int]:
    """The NVLinks that are up. Where there is none, their counters are marked as what this GPU does not have."""
    nvml, active, fields = interview.nvml, [], ("nvlinks_down", *_NVLINK)
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                active.append(link)
        except nvml.NVMLError as error:
            if error_kind(error) not in _NO_SUCH_LINK:
                for field in fields:
                    interview.record_error(field, "nvmlDeviceGetNvLinkState", error)
    if not active and not set(fields) & set(interview.unreadable):
        interview.unreadable |= dict.fromkeys(fields, "no NVLink is up")
        interview.unsupported |= set(fields)
    return active


def _listen(interview: NvmlReader, handle: Any) -> Any:
    """A queue of the GPU's Xids from now on, which any user may have, unlike the kernel's log; None where refused."""
    nvml = interview.nvml
    events = interview.query("xid", "nvmlEventSetCreate")
    if events is None:
        return None
    interview.query("xid", "nvmlDeviceRegisterEvents", handle, nvml.nvmlEventTypeXidCriticalError, events)
    if "xid" in interview.unreadable:
        interview.query("events", "nvmlEventSetFree", events)
        return None
    return events


def _queued_xids(interview: NvmlReader, events: Any) -> list[int]:
    """Every Xid since the queue was opened: NVML keeps them until they are taken."""
    xids: list[int] = []
    while True:
        try:
            xids.append(int(interview.nvml.nvmlEventSetWait_v2(events, 0).eventData))
        except interview.nvml.NVMLError as error:
            if error_kind(error) != "Timeout":
                interview.record_error("xid", "nvmlEventSetWait_v2", error)
            return xids
