"""GPU load sampler: power, temperature, SM clock and clocks event reasons of one GPU while a check runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from seatrial.discover.nvml import NvmlReader, clocks_event_reason_names, nvml_session, read_load
from seatrial.model import Frozen

PERIOD_S = 0.5  # two samples per second: NVML averages power over one second


class LoadSample(Frozen):
    """Load of a GPU at ``time_s``, in seconds of time.perf_counter(). A value is None if NVML could not read it."""

    time_s: float
    power_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    clocks_event_reasons: tuple[str, ...] | None


class GpuLoad:
    """``samples``: the samples so far. ``reader``: the NVML reader, which has the errors of unreadable values.

    ``slowdown_c``: the temperature at which the hardware lowers the clocks; None if NVML could not read it.
    """

    def __init__(self, reader: NvmlReader, slowdown_c: int | None) -> None:
        self.samples: list[LoadSample] = []
        self.reader, self.slowdown_c = reader, slowdown_c


@contextmanager
def sample_gpu_load(index: int) -> Iterator[GpuLoad]:
    """Sample the GPU with NVML index ``index`` in a thread while the block runs.

    Raises NvmlUnavailableError, and NVMLError if the GPU cannot be opened.
    """
    with nvml_session() as nvml:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        reader, threshold = NvmlReader(nvml), nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        load = GpuLoad(reader, reader.query("slowdown_c", "nvmlDeviceGetTemperatureThreshold", handle, threshold))
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(PERIOD_S):
                values = read_load(load.reader, handle)
                values["clocks_event_reasons"] = clocks_event_reason_names(nvml, values["clocks_event_reasons"])
                load.samples.append(LoadSample(time_s=time.perf_counter(), **values))

        thread = threading.Thread(target=run, name="gpu-load", daemon=True)
        thread.start()
        try:
            yield load
        finally:
            stop.set()
            thread.join()
