"""Fake GPUs under load: NVML answers for error counters, load samples and Xid events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pynvml as real

from tests.fakes.nvml import FakeGpu, FakeNvml, h200, nvml_error


class BeforeAfter:
    """An NVML answer with one value before and another value after the load."""

    def __init__(self, before: Any, after: Any) -> None:
        self.now, self.after = before, after

    def __call__(self, *_arguments: Any) -> Any:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def gpu_under_load(make: Callable[..., FakeGpu] = h200, **answers: Any) -> FakeGpu:
    """Returns a GPU with the NVML answers that are queried only under load."""
    return make(
        **{
            "nvmlDeviceGetPcieReplayCounter": 3,
            "nvmlDeviceGetNvLinkErrorCounter": 0,
            "nvmlDeviceGetFieldValues": nvml_error("NotSupported"),
            "nvmlDeviceRegisterEvents": None,
            "nvmlDeviceGetPowerUsage": 699500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetTemperatureThreshold": 87,
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
    """Returns answers of a GPU with NVLink 5 field counters only; link 17 has ``counts``, other links 0."""

    def fields(queries: list[tuple[int, int]]) -> Any:
        values = (real.c_nvmlFieldValue_t * len(queries))()
        for value, (field, link) in zip(values, queries, strict=True):
            value.fieldId, value.scopeId, value.nvmlReturn = field, link, refused
            value.value.ullVal = counts.get(field, 0) * (link == 17)
        return values

    return {"nvmlDeviceGetNvLinkErrorCounter": nvml_error("NotSupported"), "nvmlDeviceGetFieldValues": fields}
