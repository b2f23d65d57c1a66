"""Samples of one GPU under load: power, temperature, clock, and the reasons for lower clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from seatrial.discover.nvml import NvmlReader, clocks_event_reason_names, nvml_session, read_load
from seatrial.model import Frozen

PERIOD_S = 0.5


class LoadSample(Frozen):
    """The state of a GPU. ``at`` is time.perf_counter(); a value that NVML refused is None."""

    time_s: float
    power_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    clocks_event_reasons: tuple[str, ...] | None


class GpuLoad:
    """The samples so far, and the answers that NVML refused."""

    def __init__(self, interview: NvmlReader) -> None:
        self.samples: list[LoadSample] = []
        self.reader = interview


@contextmanager
def sample_gpu_load(index: int) -> Iterator[GpuLoad]:
    """Sample the GPU with NVML's ``index`` in a thread while the block runs. Raises NvmlUnavailableError."""
    with nvml_session() as nvml:
        load, handle = GpuLoad(NvmlReader(nvml)), nvml.nvmlDeviceGetHandleByIndex(index)
        stopping = threading.Event()

        def run() -> None:
            while not stopping.wait(PERIOD_S):
                state = read_load(load.reader, handle)
                state["clocks_event_reasons"] = clocks_event_reason_names(nvml, state["clocks_event_reasons"])
                load.samples.append(LoadSample(time_s=time.perf_counter(), **state))

        thread = threading.Thread(target=run, name="gpu-load", daemon=True)
        thread.start()
        try:
            yield load
        finally:
            stopping.set()
            thread.join()
