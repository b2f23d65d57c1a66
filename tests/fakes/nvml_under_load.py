"""GPUs at work, which also answer what only a load asks for: error counters and Xids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pynvml as real

from tests.fakes.nvml import FakeGpu, FakeNvml, h200, nvml_error


class BeforeAfter:
    """An answer that changes with time: one value before the load, another after it."""

    def __init__(self, before: Any, after: Any) -> None:
        self.now, self.after = before, after

    def __call__(self, *_arguments: Any) -> Any:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def gpu_under_load(make: Callable[..., FakeGpu] = h200, **answers: Any) -> FakeGpu:
    """A GPU at work, which also answers what only a load asks for."""
    return make(
        **{
            "nvmlDeviceGetPcieReplayCounter": 3,
            "nvmlDeviceGetNvLinkErrorCounter": 0,
            "nvmlDeviceGetFieldValues": nvml_error("NotSupported"),
            "nvmlDeviceRegisterEvents": None,
            "nvmlDeviceGetPowerUsage": 699500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": lambda clock: {real.NVML_CLOCK_SM: 1500}[clock],
            "nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonSwPowerCap,
            **answers,
        }
    )


def nvml_with_events(gpu: FakeGpu, xids: list[int] | None = None, **machine: Any) -> FakeNvml:
    def wait(_events: str, timeout: int) -> Any:
        assert timeout == 0
        if not xids:
            raise nvml_error("Timeout")
        data = real.c_nvmlEventData_t()
        data.eventData = xids.pop(0)
        return data

    events = {"nvmlEventSetCreate": "events", "nvmlEventSetWait_v2": wait, "nvmlEventSetFree": None}
    return FakeNvml(h200(0), gpu, **{**events, **machine})


def nvlink_5(counts: Mapping[int, int], refused: int = 0) -> dict[str, Any]:
    """The answers of a GPU whose NVLinks have no counters of the old form; in the new one, on link 17, ``counts``."""

    def fields(questions: list[tuple[int, int]]) -> Any:
        values = (real.c_nvmlFieldValue_t * len(questions))()
        for value, (field, link) in zip(values, questions, strict=True):
            value.fieldId, value.scopeId, value.nvmlReturn = field, link, refused
            value.value.ullVal = counts.get(field, 0) * (link == 17)
        return values

    return {"nvmlDeviceGetNvLinkErrorCounter": nvml_error("NotSupported"), "nvmlDeviceGetFieldValues": fields}
