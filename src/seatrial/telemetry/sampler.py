"""Samples this node until the parent process ends: ``python -m seatrial.telemetry.sampler FILE HZ``.

Each sample is a line of FILE, flushed at once: a JSON list of numbers, null for values that were not read. The first
line is a JSON object that names the columns; later objects list the gauges that could not be read, with the reason.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from seatrial.discover import gpu
from seatrial.discover.nvml import (
    CLOCKS_EVENT_REASON_NAMES,
    Gpu,
    NvmlReader,
    NvmlUnavailableError,
    nvlink_states,
    nvml_session,
    read_load,
)
from seatrial.model import UsageError
from seatrial.model.telemetry import CLOCKS_EVENT_REASONS, GPU_GAUGES, HOST, HOST_GAUGES, SAMPLER_CPU_SECONDS
from seatrial.telemetry.host_gauges import MIN_INTERVAL_S, HostGauges
from seatrial.util.node_name import node_name

# Each PCIe query of NVML takes 20 ms and may block other users of the driver. PCIe queries take about this share of the
# time between two samples, but cover at least one GPU: at one sample per second, exactly one GPU per sample.
PCIE_SHARE = 0.05
# Mean CPU seconds per sample, less than 1 % of a core at one sample per second. If these are not enough for all GPUs,
# the GPUs are sampled in turn. A sample can exceed the limit, since each GPU is read completely; later samples read
# fewer GPUs then. A query takes 0.3 ms on a host with four H200 and driver 580.
SAMPLE_CPU_S = 0.007
_ALL_LINKS = 2**32 - 1  # UINT_MAX as link number: the sum over all links, if the driver supports it
_KIB, _KB = 1024, 1000  # units of NVML: KiB of its NVLink counters, KB/s of its PCIe rates


class _NvlinkCount(NamedTuple):
    """KiB over all links since the counters were reset; ``read_at``: seconds of time.monotonic()."""

    read_at: float
    received_kib: int
    sent_kib: int


class GpuGauges:
    """Reads the gauges of one GPU. Gauges that the first read cannot read are in ``unreadable`` and not read again."""

    def __init__(self, nvml: Any, index: int, handle: Any) -> None:
        self.device = f"gpu{index}"
        self._nvml, self._handle = nvml, handle
        self._reader = NvmlReader(nvml)
        active = [link for link, state in nvlink_states(nvml, handle) if state is True]
        self._link_queries = [(field, link) for link in active for field in _byte_fields(nvml)]
        # Sums over all links need fewer queries, if the driver returns correct ones. True until this is known; False
        # for one link, which needs no sum
        self._sum_untested = len(self._link_queries) > 2
        self._previous_nvlink: _NvlinkCount | None = None
        self._pcie: dict[str, Any] = {}  # rates read since the last sample, in GB/s
        if not self._link_queries:
            self.unreadable.update(dict.fromkeys(("nvlink_rx_gbs", "nvlink_tx_gbs"), "no NVLink is up"))
        self.read()
        self.read_pcie()
        self._reader.skip_unreadable()

    @property
    def unreadable(self) -> dict[str, str]:
        """The gauges that could not be read so far, with the error."""
        return self._reader.unreadable

    def read(self) -> list[float | None]:
        """Return the values of GPU_GAUGES in that order, then the clocks event reasons as NVML's bit mask."""
        values = self._pcie | read_load(self._reader, self._handle) | self._nvlink()
        self._pcie = {}
        if utilization := self._query(("sm_util", "memory_util"), "nvmlDeviceGetUtilizationRates"):
            values |= {"sm_util": utilization.gpu, "memory_util": utilization.memory}
        if memory := self._query("memory_used_bytes", "nvmlDeviceGetMemoryInfo", self._nvml.nvmlMemory_v2):
            values["memory_used_bytes"] = memory.used
        gauges = [_rounded(values.get(gauge.name), gauge.digits) for gauge in GPU_GAUGES]
        return [*gauges, values[CLOCKS_EVENT_REASONS]]

    def read_pcie(self) -> None:
        """Read the PCIe rates for the next ``read``; blocks for about 40 ms."""
        counters = {"pcie_rx_gbs": "NVML_PCIE_UTIL_RX_BYTES", "pcie_tx_gbs": "NVML_PCIE_UTIL_TX_BYTES"}
        for field, constant in counters.items():
            rate = self._query(field, "nvmlDeviceGetPcieThroughput", getattr(self._nvml, constant))
            if rate is not None:
                self._pcie[field] = rate * _KB / 1e9

    def _query(self, fields: str | Sequence[str], function: str, *arguments: Any) -> Any:
        return self._reader.query(fields, function, self._handle, *arguments)

    def _nvlink(self) -> dict[str, float]:
        """Return GB/s over all links since the previous read.

        Empty at the first read, after a counter reset, and after less than MIN_INTERVAL_S.
        """
        fields = ("nvlink_rx_gbs", "nvlink_tx_gbs")
        queries = self._link_queries
        results = self._query(fields, "nvmlDeviceGetFieldValues", queries) if queries else None
        if results is None:
            return {}
        if error := next((result.nvmlReturn for result in results if result.nvmlReturn), 0):
            for field in fields:
                self._reader.record_error(field, "nvmlDeviceGetFieldValues", self._nvml.NVMLError(error))
            return {}
        counts_kib = [int(result.value.ullVal) for result in results]
        if self._sum_untested and any(counts_kib):
            self._sum_untested, self._link_queries = False, _fewest_queries(self._nvml, self._handle, queries)
        # The queries alternate: bytes received, bytes sent
        count = _NvlinkCount(time.monotonic(), received_kib=sum(counts_kib[0::2]), sent_kib=sum(counts_kib[1::2]))
        previous, self._previous_nvlink = self._previous_nvlink, count
        if previous is None:
            return {}
        seconds = count.read_at - previous.read_at
        new_kib = (count.received_kib - previous.received_kib, count.sent_kib - previous.sent_kib)
        if seconds < MIN_INTERVAL_S or min(new_kib) < 0:
            return {}
        return {field: kib * _KIB / seconds / 1e9 for field, kib in zip(fields, new_kib, strict=True)}


def _fewest_queries(nvml: Any, handle: Any, per_link: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return two queries for the sums over all links if the driver returns correct sums, otherwise ``per_link``.

    Correct sums lie between the totals of ``per_link`` read before and after. The caller calls this only with counters
    above 0, since sums of 0 show nothing.
    """
    sum_queries = [(field, _ALL_LINKS) for field in _byte_fields(nvml)]
    try:
        before = _sum_of_fields(nvml, handle, per_link)
        total = _sum_of_fields(nvml, handle, sum_queries)
        after = _sum_of_fields(nvml, handle, per_link)
    except nvml.NVMLError:
        return per_link
    return sum_queries if 0 < before <= total <= after else per_link


def _byte_fields(nvml: Any) -> tuple[int, int]:
    """Return NVML's fields (bytes received, bytes sent); the values are in KiB."""
    return nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX


def _sum_of_fields(nvml: Any, handle: Any, queries: list[tuple[int, int]]) -> int:
    results = nvml.nvmlDeviceGetFieldValues(handle, queries)
    for result in results:
        if result.nvmlReturn:
            raise nvml.NVMLError(result.nvmlReturn)
    return sum(int(result.value.ullVal) for result in results)


class Sampler:
    """Reads all gauges of this node.

    ``unavailable``: ``gpu``, ``gpuN`` or ``CUDA_VISIBLE_DEVICES`` → error that limits the sampling of GPUs.
    """

    def __init__(self, nvml: Any | None, unavailable: Mapping[str, str], root: Path = Path("/")) -> None:
        self.unavailable = dict(unavailable)
        self.host = HostGauges(root)
        self.gpus: list[GpuGauges] = []
        self._nvml = nvml
        self._next_pcie = self._next_gpu = 0
        self._gpu_properties: dict[str, dict[str, Any]] = {}
        if nvml is not None:
            self._open_gpus(nvml)

    def header(self, hz: float) -> dict[str, Any]:
        """Return the first line of the file, which names the columns of the samples."""
        columns = ["time", f"{HOST}.{SAMPLER_CPU_SECONDS}", *(f"{HOST}.{gauge.name}" for gauge in HOST_GAUGES)]
        gpu_columns = (*(gauge.name for gauge in GPU_GAUGES), CLOCKS_EVENT_REASONS)
        columns += [f"{gauges.device}.{name}" for gauges in self.gpus for name in gpu_columns]
        bits = CLOCKS_EVENT_REASON_NAMES.items() if self.gpus else ()
        reasons = {str(getattr(self._nvml, bit)): name for bit, name in bits}
        devices: dict[str, Any] = {HOST: {}, **self._gpu_properties}
        return {"node": node_name(), "hz": hz, "devices": devices, "reasons": reasons, "columns": columns}

    def sample(self, cpu_limit_s: float = math.inf) -> list[float | None]:
        """Return a sample of the host and of GPUs.

        GPUs are read in turn until this process has used ``cpu_limit_s`` of CPU time since its start; GPUs that are not
        read have no values.
        """
        row: list[float | None] = [round(time.time(), 3), round(time.process_time(), 3)]
        row += [_rounded(value, gauge.digits) for value, gauge in zip(self.host.read(), HOST_GAUGES, strict=True)]
        values_by_gpu: dict[int, list[float | None]] = {}  # position in self.gpus → values
        while len(values_by_gpu) < len(self.gpus) and time.process_time() < cpu_limit_s:
            values_by_gpu[self._next_gpu] = self.gpus[self._next_gpu].read()
            self._next_gpu = (self._next_gpu + 1) % len(self.gpus)
        no_values = [None] * (len(GPU_GAUGES) + 1)  # + 1: the clocks event reasons
        for position in range(len(self.gpus)):
            row += values_by_gpu.get(position, no_values)
        return row

    def read_pcie(self, limit_s: float) -> None:
        """Read the PCIe rates of at least one GPU, and of further GPUs in turn for up to ``limit_s`` seconds."""
        started = time.monotonic()
        for _ in self.gpus:
            self._next_pcie = (self._next_pcie + 1) % len(self.gpus)
            self.gpus[self._next_pcie].read_pcie()
            if time.monotonic() - started > limit_s / 2:  # the next GPU can take as long as all GPUs so far
                return

    def unreadable(self) -> dict[str, str]:
        """Return the gauges (``device.gauge``) that could not be read so far, with the reason."""
        errors = {f"{HOST}.{field}": error for field, error in (self.unavailable | self.host.unreadable).items()}
        for gauges in self.gpus:
            errors |= {f"{gauges.device}.{field}": error for field, error in gauges.unreadable.items()}
        return errors

    def _open_gpus(self, nvml: Any) -> None:
        """Open the GPUs in CUDA_VISIBLE_DEVICES, or all GPUs if its value is invalid."""
        reader = NvmlReader(nvml)
        handles: dict[int, Any] = {}
        for index in range(reader.query("gpu", "nvmlDeviceGetCount") or 0):
            if (handle := reader.query(f"gpu{index}", "nvmlDeviceGetHandleByIndex", index)) is not None:
                handles[index] = handle
        gpus = []
        for index, handle in handles.items():
            query = NvmlReader(nvml).query  # a missing name or UUID is not an error of a gauge
            name, uuid = query("name", "nvmlDeviceGetName", handle), query("uuid", "nvmlDeviceGetUUID", handle)
            gpus.append(Gpu(index=index, name=name, uuid=uuid))
        try:
            visible = gpu.cuda_visible(gpu.GpuFacts(gpus=tuple(gpus)), os.environ)
        except UsageError as error:
            visible = tuple(gpus)
            self.unavailable["CUDA_VISIBLE_DEVICES"] = str(error)
        self.unavailable |= reader.unreadable
        self._gpu_properties = {f"gpu{device.index}": {"name": device.name, "uuid": device.uuid} for device in visible}
        self.gpus = [GpuGauges(nvml, device.index, handles[device.index]) for device in visible]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits) if digits else round(value)


def run_sampler(sampler: Sampler, file: TextIO, hz: float) -> None:
    """Write ``hz`` samples per second until the parent process ends. Raises OSError, such as for a full disk."""
    parent, reported = os.getppid(), dict[str, str]()
    _write(file, sampler.header(hz))
    cpu_limit_s = time.process_time() + SAMPLE_CPU_S
    for _ in ticks(1 / hz):
        if os.getppid() != parent:
            return
        # SAMPLE_CPU_S per sample; at less than one sample per second, SAMPLE_CPU_S per second
        cpu_limit_s += SAMPLE_CPU_S * max(1, 1 / hz)
        _write(file, sampler.sample(cpu_limit_s))
        if (unreadable := sampler.unreadable()) != reported:
            reported = unreadable
            _write(file, {"unreadable": unreadable})
        if time.process_time() < cpu_limit_s:
            sampler.read_pcie(PCIE_SHARE / hz)


def ticks(period_s: float) -> Iterator[None]:
    """Yield at once, then at each multiple of ``period_s``; multiples that pass while the caller works are skipped."""
    started = time.monotonic()
    for _ in itertools.count():
        yield
        time.sleep(period_s - (time.monotonic() - started) % period_s)


def _write(file: TextIO, record: dict[str, Any] | list[float | None]) -> None:
    file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    file.flush()


def main(arguments: list[str]) -> None:
    with ExitStack() as stack, Path(arguments[0]).open("a", encoding="utf-8") as file:
        nvml, unavailable = None, dict[str, str]()
        try:
            nvml = stack.enter_context(nvml_session())
        except NvmlUnavailableError as error:
            unavailable["gpu"] = str(error)
        run_sampler(Sampler(nvml, unavailable), file, float(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
