from __future__ import annotations

import threading
import time

import pytest

from seatrial.telemetry import gpu_load
from seatrial.telemetry.gpu_load import sample_gpu_load
from tests.fakes.nvml import nvml_error
from tests.fakes.nvml_under_load import BeforeAfter, gpu_under_load, nvml_with_events
from tests.processes import until


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_load, "PERIOD_S", 0.01)


def test_gpu_is_sampled_while_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, started = nvml_with_events(gpu_under_load()).install(monkeypatch), time.perf_counter()
    with sample_gpu_load(1) as load:
        until(lambda: len(load.samples) >= 2)
    sample = load.samples[0]
    assert (sample.power_w, sample.temperature_c, sample.sm_clock_mhz) == (699.5, 61, 1500)
    assert sample.clocks_event_reasons == ("software power cap",)
    assert started < sample.time_s < time.perf_counter()
    assert load.reader.unreadable == {}
    assert fake.open == 0


def test_unsupported_value_is_none_and_listed_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_with_events(gpu_under_load(nvmlDeviceGetCurrentClocksEventReasons=nvml_error("NotSupported"))).install(
        monkeypatch
    )
    with sample_gpu_load(1) as load:
        until(lambda: bool(load.samples))
    assert load.samples[0].clocks_event_reasons is None
    assert load.reader.unavailable == {"clocks_event_reasons": "Not Supported"}


def test_lost_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    power = BeforeAfter(699500, nvml_error("GpuIsLost"))
    nvml_with_events(gpu_under_load(nvmlDeviceGetPowerUsage=power)).install(monkeypatch)
    with sample_gpu_load(1) as load:
        until(lambda: bool(load.samples))
        power.now = power.after
        until(lambda: load.samples[-1].power_w is None)
    assert load.reader.gpu_lost == str(nvml_error("GpuIsLost"))


def test_sampling_ends_when_the_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = nvml_with_events(gpu_under_load()).install(monkeypatch)
    with pytest.raises(RuntimeError, match="CUDA"), sample_gpu_load(1):
        raise RuntimeError("CUDA error")
    assert "gpu-load" not in {thread.name for thread in threading.enumerate()}
    assert fake.open == 0
