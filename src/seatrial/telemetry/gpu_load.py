"""What load does to a GPU: its power, heat and clocks meanwhile, and the errors that it has counted by the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from seatrial.discover.gpu_counters import COUNTERS as COUNTERS
from seatrial.discover.gpu_counters import Counters
from seatrial.discover.nvml import Interview, clock_reasons, session
from seatrial.model import Frozen

PERIOD_S = 0.5


class Sample(Frozen):
    """One look at a GPU under load. ``at`` is time.perf_counter(); what NVML refused to tell is None."""

    at: float
    power_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    clock_reasons: tuple[str, ...] | None


class Strain(Counters):
    """Samples of one GPU from ``begin`` to ``end``, and what it counted before and after."""

    def __init__(self, nvml: Any, index: int) -> None:
        super().__init__(nvml, index)
        self.samples: list[Sample] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="strain", daemon=True)

    def begin(self) -> None:
        super().begin()
        self._thread.start()

    def end(self) -> None:
        """Stop watching, and read the counters again. Never raises for a refusal."""
        self._stopping.set()
        self._thread.join()
        super().end()

    def _watch(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.samples.append(_look(self._meanwhile, self._handle))
            self._take_events()


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
