"""What load does to a GPU: its power, heat and clocks meanwhile, and the errors that it has counted by the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from seatrial.discover.nvml import Interview, clock_reasons, kind_of, session
from seatrial.model import Frozen

PERIOD_S = 0.5
# Our name of a counter → NVML's, which it keeps for each link.
_NVLINK = {
    "nvlink_replays": "NVML_NVLINK_ERROR_DL_REPLAY",
    "nvlink_recoveries": "NVML_NVLINK_ERROR_DL_RECOVERY",
    "nvlink_crc_flits": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "nvlink_crc_data": "NVML_NVLINK_ERROR_DL_CRC_DATA",
}
_ROWS = ("rows_remapped", "remap_pending", "remap_failed")
COUNTERS = ("ecc_corrected", "ecc_uncorrected", *_ROWS, "pcie_replays", "nvlinks_down", *_NVLINK, "xid")
_NO_SUCH_LINK = ("NotSupported", "InvalidArgument")


class Sample(Frozen):
    """One look at a GPU under load. ``at`` is time.perf_counter(); what NVML refused to tell is None."""

    at: float
    power_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    clock_reasons: tuple[str, ...] | None


class Strain:
    """Samples of one GPU from ``begin`` to ``end``, and what it counted before and after.

    ``lacks``: what this GPU, or this driver, does not have, or this user may not read, and why. ``unread``: all that
    NVML refused; what stands there and not in ``lacks`` was refused for a fault. ``gone``: why the GPU was lost.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self.samples: list[Sample] = []
        self.xids: list[int] = []
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.lacks: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self.gone: str | None = None
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._links: list[int] = []
        self._events: Any = None
        self._sampling = Interview(nvml)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="strain", daemon=True)

    def begin(self) -> None:
        interview = Interview(self._nvml)
        self._links = _active_links(interview, self._handle)
        self.before = _count(interview, self._handle, self._links)
        self._events = _listen(interview, self._handle)
        if self._events is not None:
            self.before["xid"] = 0
        self._learn(interview)
        self._thread.start()

    def end(self) -> None:
        """Stop watching, and read the counters again. Never raises for a refusal."""
        self._stopping.set()
        self._thread.join()
        interview = Interview(self._nvml)
        self.after = _count(interview, self._handle, self._links)
        if self._events is not None:
            self._take_events()
            interview.ask("events", "nvmlEventSetFree", self._events)
            if "xid" not in self._sampling.unread:
                self.after["xid"] = len(self.xids)
        self.unread |= interview.unread
        self.gone = self.gone or interview.gone
        self._learn(self._sampling)

    def new(self, counter: str) -> int | None:
        """By how much a counter grew; None where it was not read both times."""
        if counter not in self.before or counter not in self.after:
            return None
        return self.after[counter] - self.before[counter]

    def _learn(self, interview: Interview) -> None:
        self.unread |= interview.unread
        lacking = interview.unsupported | interview.denied
        self.lacks |= {field: interview.unread[field] for field in sorted(lacking)}
        self.gone = self.gone or interview.gone

    def _watch(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.samples.append(_look(self._sampling, self._handle))
            self._take_events()

    def _take_events(self) -> None:
        """Every Xid since the last time. NVML queues them, so that none falls between two looks."""
        while self._events is not None:
            try:
                self.xids.append(int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData))
            except self._nvml.NVMLError as error:
                if kind_of(error) != "Timeout":
                    self._sampling.refuse("xid", "nvmlEventSetWait_v2", error)
                return


@contextmanager
def watch(index: int) -> Iterator[Strain]:
    """Watch the GPU with NVML's ``index`` for as long as the block runs. Raises NvmlUnavailableError."""
    with session() as nvml:
        strain = Strain(nvml, index)
        strain.begin()
        try:
            yield strain
        finally:
            strain.end()


def _look(interview: Interview, handle: Any) -> Sample:
    nvml = interview.nvml
    milliwatts = interview.ask("power_w", "nvmlDeviceGetPowerUsage", handle)
    return Sample(
        at=time.perf_counter(),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=interview.ask("temperature_c", "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        sm_clock_mhz=interview.ask("sm_clock_mhz", "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        clock_reasons=clock_reasons(interview, handle),
    )


def _count(interview: Interview, handle: Any, links: Sequence[int]) -> dict[str, int]:
    """The counters that NVML tells; those of NVLink summed over ``links``."""
    nvml = interview.nvml
    found: dict[str, int | None] = {}
    for kind in ("corrected", "uncorrected"):
        error = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}")
        arguments = (handle, error, nvml.NVML_VOLATILE_ECC)
        found[f"ecc_{kind}"] = interview.ask(f"ecc_{kind}", "nvmlDeviceGetTotalEccErrors", *arguments)
    if rows := interview.ask(_ROWS, "nvmlDeviceGetRemappedRows", handle):
        correctable, uncorrectable, pending, failed = rows
        found |= {"rows_remapped": correctable + uncorrectable, "remap_pending": pending, "remap_failed": failed}
    found["pcie_replays"] = interview.ask("pcie_replays", "nvmlDeviceGetPcieReplayCounter", handle)
    if links:
        found["nvlinks_down"] = len(set(links) - set(_active_links(interview, handle)))
    for name, constant in _NVLINK.items() if links else ():
        counts = [_of_link(interview, handle, link, name, getattr(nvml, constant)) for link in links]
        known = [count for count in counts if count is not None]
        found[name] = sum(known) if len(known) == len(counts) else None
    return {name: int(value) for name, value in found.items() if value is not None}


def _of_link(interview: Interview, handle: Any, link: int, name: str, counter: int) -> int | None:
    """A counter of a link that is up. That NVML calls it an invalid argument means that this GPU does not keep it."""
    try:
        return int(interview.nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))
    except interview.nvml.NVMLError as error:
        interview.refuse(name, "nvmlDeviceGetNvLinkErrorCounter", error)
        if kind_of(error) == "InvalidArgument":
            interview.unsupported.add(name)
        return None


def _active_links(interview: Interview, handle: Any) -> list[int]:
    """The NVLinks that are up. Where there is none, their counters are marked as what this GPU does not have."""
    nvml, active, fields = interview.nvml, [], ("nvlinks_down", *_NVLINK)
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                active.append(link)
        except nvml.NVMLError as error:
            if kind_of(error) not in _NO_SUCH_LINK:
                for field in fields:
                    interview.refuse(field, "nvmlDeviceGetNvLinkState", error)
    if not active and not set(fields) & set(interview.unread):
        interview.unread |= dict.fromkeys(fields, "no NVLink is up")
        interview.unsupported |= set(fields)
    return active


def _listen(interview: Interview, handle: Any) -> Any:
    """A queue of the GPU's Xids from now on, which any user may have, unlike the kernel's log; None where refused."""
    nvml = interview.nvml
    events = interview.ask("xid", "nvmlEventSetCreate")
    if events is None:
        return None
    interview.ask("xid", "nvmlDeviceRegisterEvents", handle, nvml.nvmlEventTypeXidCriticalError, events)
    if "xid" in interview.unread:
        interview.ask("events", "nvmlEventSetFree", events)
        return None
    return events
