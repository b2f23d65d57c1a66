"""Samples of one GPU under load: power, temperature, clock, and the reasons for lower clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from seatrial.discover.nvml import Interview, clock_reasons, load_state, session
from seatrial.model import Frozen

PERIOD_S = 0.5


class Sample(Frozen):
    """The state of a GPU. ``at`` is time.perf_counter(); a value that NVML refused is None."""

    at: float
    power_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    clock_reasons: tuple[str, ...] | None


class GpuLoad:
    """The samples so far, and the answers that NVML refused."""

    def __init__(self, interview: Interview) -> None:
        self.samples: list[Sample] = []
        self.interview = interview


@contextmanager
def sampled(index: int) -> Iterator[GpuLoad]:
    """Sample the GPU with NVML's ``index`` in a thread while the block runs. Raises NvmlUnavailableError."""
    with session() as nvml:
        load, handle = GpuLoad(Interview(nvml)), nvml.nvmlDeviceGetHandleByIndex(index)
        stopping = threading.Event()

        def run() -> None:
            while not stopping.wait(PERIOD_S):
                state = load_state(load.interview, handle)
                state["clock_reasons"] = clock_reasons(nvml, state["clock_reasons"])
                load.samples.append(Sample(at=time.perf_counter(), **state))

        thread = threading.Thread(target=run, name="gpu-load", daemon=True)
        thread.start()
        try:
            yield load
        finally:
            stopping.set()
            thread.join()
