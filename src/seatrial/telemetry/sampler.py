"""Samples this node while a job runs: ``python -m seatrial.telemetry.sampler FILE HZ`` until it is ended.

FILE has a line for each sample, written out as it is taken: a list of numbers, null for what was not read. A line that
is an object tells what the numbers below it are (the first line), or which gauges could not be read so far, and why.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from seatrial.discover import gpu
from seatrial.discover.nvml import (
    CLOCKS_EVENT_REASON_NAMES,
    Gpu,
    NvmlReader,
    NvmlUnavailableError,
    error_kind,
    nvml_session,
    read_load,
)
from seatrial.model import UsageError
from seatrial.model.telemetry import CLOCKS_EVENT_REASONS, GPU_GAUGES, HOST, HOST_GAUGES, SAMPLER_CPU_SECONDS
from seatrial.telemetry.host_gauges import MIN_INTERVAL_S, HostGauges

# NVML watches PCIe for 20 ms at each question, in which it may keep others from the driver: of each period no more than
# this share, but for one GPU. At a sample a second one GPU is asked at a time.
PCIE_SHARE = 0.05
# Seconds of one core for each sample, on average: under 1 % at one a second, however dear the driver's answers are
# (0.3 ms each on a 4×H200 host with driver 580). GPUs that this does not suffice for are looked at in turn; who is over
# it looks at none. A look that has begun is ended: with 9 ms, and one look at least in each sample, it came to 9.1 to
# 12 ms on that host, with 7 ms to 7.1 to 11.
SAMPLE_S = 0.007
_ALL_LINKS = 2**32 - 1  # UINT_MAX for a link's number: the sum over all, where the driver knows that
_KIB, _KB = 1024, 1000


class GpuGauges:
    """One GPU. What NVML refuses at the first look is not asked for again; ``unread`` says why."""

    def __init__(self, nvml: Any, index: int, handle: Any) -> None:
        self.device = f"gpu{index}"
        self._nvml, self._handle = nvml, handle
        self._interview = NvmlReader(nvml)
        self._links = _each_link(nvml, handle)
        self._sum_untried = len(self._links) > 2
        self._before: tuple[float, int, int] | None = None  # when, KiB received, KiB sent
        self._pcie: dict[str, Any] = {}
        if not self._links:
            self.unreadable.update(dict.fromkeys(("nvlink_rx_gbs", "nvlink_tx_gbs"), "no NVLink is up"))
        self.read()
        self.read_pcie()
        self._interview.skip_unreadable()

    @property
    def unreadable(self) -> dict[str, str]:
        return self._interview.unreadable

    def read(self) -> list[float | None]:
        """The gauges in the order of GPU_GAUGES, and the reasons for lower clocks as NVML's bits."""
        found = self._pcie | read_load(self._interview, self._handle) | self._nvlink()
        self._pcie = {}
        if used := self._ask(("sm_util", "memory_util"), "nvmlDeviceGetUtilizationRates"):
            found |= {"sm_util": used.gpu, "memory_util": used.memory}
        if memory := self._ask("memory_used_bytes", "nvmlDeviceGetMemoryInfo", self._nvml.nvmlMemory_v2):
            found["memory_used_bytes"] = memory.used
        values = [_rounded(found.get(gauge.name), gauge.digits) for gauge in GPU_GAUGES]
        return [*values, found[CLOCKS_EVENT_REASONS]]

    def read_pcie(self) -> None:
        """For the next look. Blocks for about 40 ms."""
        counters = {"pcie_rx_gbs": "NVML_PCIE_UTIL_RX_BYTES", "pcie_tx_gbs": "NVML_PCIE_UTIL_TX_BYTES"}
        for field, constant in counters.items():
            rate = self._ask(field, "nvmlDeviceGetPcieThroughput", getattr(self._nvml, constant))
            if rate is not None:
                self._pcie[field] = rate * _KB / 1e9

    def _ask(self, fields: str | Sequence[str], function: str, *arguments: Any) -> Any:
        return self._interview.query(fields, function, self._handle, *arguments)

    def _nvlink(self) -> dict[str, float]:
        """GB/s of data since the look before, over all links; nothing the first time, and after a reset."""
        fields = ("nvlink_rx_gbs", "nvlink_tx_gbs")
        answers = self._ask(fields, "nvmlDeviceGetFieldValues", self._links) if self._links else None
        if answers is None:
            return {}
        if refused := next((one.nvmlReturn for one in answers if one.nvmlReturn), 0):
            for field in fields:
                self._interview.record_error(field, "nvmlDeviceGetFieldValues", self._nvml.NVMLError(refused))
            return {}
        kib = [int(one.value.ullVal) for one in answers]
        if self._sum_untried and any(kib):
            self._sum_untried, self._links = False, _fewest(self._nvml, self._handle, self._links)
        now = (time.monotonic(), sum(kib[0::2]), sum(kib[1::2]))
        before, self._before = self._before, now
        if before is None or now[0] < before[0] + MIN_INTERVAL_S or now[1] < before[1] or now[2] < before[2]:
            return {}
        return {f: (now[i] - before[i]) * _KIB / (now[0] - before[0]) / 1e9 for i, f in enumerate(fields, 1)}


def _each_link(nvml: Any, handle: Any) -> list[tuple[int, int]]:
    """What to ask for the bytes received and sent, in turn, by every link that is up."""
    up = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += [link] if nvml.nvmlDeviceGetNvLinkState(handle, link) else []
        except nvml.NVMLError as error:
            if error_kind(error) == "NotSupported":
                break
    return [(field, link) for link in up for field in _bytes(nvml)]


def _fewest(nvml: Any, handle: Any, each: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The sum of all links where the driver can be seen to give it, which takes one question for eighteen; else
    ``each``. While no byte has passed, nothing can be seen."""
    together = [(field, _ALL_LINKS) for field in _bytes(nvml)]
    try:
        before, whole, after = (_sum(nvml, handle, question) for question in (each, together, each))
    except nvml.NVMLError:
        return each
    return together if 0 < before <= whole <= after else each


def _bytes(nvml: Any) -> tuple[int, int]:
    return nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX


def _sum(nvml: Any, handle: Any, question: list[tuple[int, int]]) -> int:
    answers = nvml.nvmlDeviceGetFieldValues(handle, question)
    for answer in answers:
        if answer.nvmlReturn:
            raise nvml.NVMLError(answer.nvmlReturn)
    return sum(int(answer.value.ullVal) for answer in answers)


class Sampler:
    """All gauges of this node."""

    def __init__(self, nvml: Any | None, absent: Mapping[str, str], root: Path = Path("/")) -> None:
        self.unavailable = dict(absent)
        self.host = HostGauges(root)
        self.gpus: list[GpuGauges] = []
        self._nvml = nvml
        self._turn = self._first = 0
        self._names: dict[str, dict[str, Any]] = {}
        if nvml is not None:
            self._open(nvml)

    def header(self, hz: float) -> dict[str, Any]:
        """What a row's numbers are."""
        columns = ["time", f"{HOST}.{SAMPLER_CPU_SECONDS}", *(f"{HOST}.{gauge.name}" for gauge in HOST_GAUGES)]
        for one in self.gpus:
            columns += [
                f"{one.device}.{name}" for name in (*(gauge.name for gauge in GPU_GAUGES), CLOCKS_EVENT_REASONS)
            ]
        reasons = (
            {str(getattr(self._nvml, bit)): name for bit, name in CLOCKS_EVENT_REASON_NAMES.items()}
            if self.gpus
            else {}
        )
        devices: dict[str, Any] = {HOST: {}, **self._names}
        return {"node": socket.gethostname(), "hz": hz, "devices": devices, "reasons": reasons, "columns": columns}

    def sample(self, cpu_s: float = math.inf) -> list[float | None]:
        """A sample of the host, and of the GPUs until this process has used ``cpu_s``: of none where it has already."""
        row: list[float | None] = [round(time.time(), 3), round(time.process_time(), 3)]
        row += [_rounded(value, gauge.digits) for value, gauge in zip(self.host.read(), HOST_GAUGES, strict=True)]
        seen: dict[int, list[float | None]] = {}
        while len(seen) < len(self.gpus) and time.process_time() < cpu_s:
            seen[self._first] = self.gpus[self._first].read()
            self._first = (self._first + 1) % len(self.gpus)
        unseen = [None] * (len(GPU_GAUGES) + 1)
        return row + [value for i in range(len(self.gpus)) for value in seen.get(i, unseen)]

    def read_pcie(self, limit_s: float) -> None:
        """Of one GPU after another, at least of one, in turn until the time is up."""
        began = time.monotonic()
        for _ in self.gpus:
            self._turn = (self._turn + 1) % len(self.gpus)
            self.gpus[self._turn].read_pcie()
            if time.monotonic() - began > limit_s / 2:
                return

    def unreadable(self) -> dict[str, str]:
        """Every gauge that could not be read so far, with the reason."""
        every = {HOST: self.unavailable | self.host.unreadable, **{one.device: one.unreadable for one in self.gpus}}
        return {f"{device}.{field}": why for device, unread in every.items() for field, why in unread.items()}

    def _open(self, nvml: Any) -> None:
        """The GPUs that CUDA may use here, or all where the variable that says so cannot be read."""
        machine = NvmlReader(nvml)
        handles: dict[int, Any] = {}
        for index in range(machine.query("gpu", "nvmlDeviceGetCount") or 0):
            if (handle := machine.query(f"gpu{index}", "nvmlDeviceGetHandleByIndex", index)) is not None:
                handles[index] = handle
        known = []
        for index, handle in handles.items():
            ask = NvmlReader(nvml).query
            name, uuid = ask("name", "nvmlDeviceGetName", handle), ask("uuid", "nvmlDeviceGetUUID", handle)
            known.append(Gpu(index=index, name=name, uuid=uuid))
        try:
            chosen = gpu.cuda_visible(gpu.GpuFacts(gpus=tuple(known)), os.environ)
        except UsageError as error:
            chosen, self.unavailable["CUDA_VISIBLE_DEVICES"] = tuple(known), str(error)
        self.unavailable |= machine.unreadable
        self._names = {f"gpu{one.index}": {"name": one.name, "uuid": one.uuid} for one in chosen}
        self.gpus = [GpuGauges(nvml, one.index, handles[one.index]) for one in chosen]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits) if digits else round(value)


def run_sampler(sampler: Sampler, file: TextIO, hz: float) -> None:
    """Write samples until our parent is gone. Raises OSError when the disk takes no more."""
    parent, told = os.getppid(), dict[str, str]()
    _write(file, sampler.header(hz))
    cpu_s = time.process_time() + SAMPLE_S
    for _ in ticks(1 / hz):
        if os.getppid() != parent:
            return
        cpu_s += SAMPLE_S * max(1, 1 / hz)
        _write(file, sampler.sample(cpu_s))
        if (unread := sampler.unreadable()) != told:
            told = unread
            _write(file, {"unread": unread})
        if time.process_time() < cpu_s:
            sampler.read_pcie(PCIE_SHARE / hz)


def ticks(period_s: float) -> Iterator[None]:
    """One at once, then one at each multiple of the period; what is missed is not made up for."""
    began = time.monotonic()
    for _ in itertools.count():
        yield
        time.sleep(period_s - (time.monotonic() - began) % period_s)


def _write(file: TextIO, record: dict[str, Any] | list[float | None]) -> None:
    file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    file.flush()


def main(arguments: list[str]) -> None:
    with ExitStack() as stack, Path(arguments[0]).open("a", encoding="utf-8") as file:
        nvml, absent = None, dict[str, str]()
        try:
            nvml = stack.enter_context(nvml_session())
        except NvmlUnavailableError as reason:
            absent["gpu"] = str(reason)
        run_sampler(Sampler(nvml, absent), file, float(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
