from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.discover.port_counters import NO_RDMA_PORT
from seatrial.telemetry.error_counts import count_errors
from tests.discover.test_port_counters import port
from tests.fakes.nvml import FakeNvml, h200, nvml_error
from tests.fakes.nvml_under_load import BeforeAfter, gpu_under_load, nvml_with_events


def test_fact_of_healthy_counters_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = nvml_with_events(gpu_under_load()).install(monkeypatch)
    port(tmp_path, link_downed=3, symbol_error=9)
    with count_errors(1, True, tmp_path) as counts:
        assert fake.open == 1
    assert counts.fact() == {"counters_read": 14}
    assert list(counts.metrics("n/gpu1", "n")) == []
    assert fake.open == 0


def test_increases_of_gpu_and_port_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = BeforeAfter(5, 6)
    nvml_with_events(gpu_under_load(nvmlDeviceGetTotalEccErrors=errors), [43, 79, 79]).install(monkeypatch)
    port(tmp_path, link_downed=3, symbol_error=9)
    port(tmp_path, "mlx5_1", link_downed=0)
    with count_errors(1, True, tmp_path) as counts:
        errors.now = errors.after
        port(tmp_path, link_downed=4)
        port(tmp_path, "mlx5_1", link_downed=2)
    fact = counts.fact()
    assert fact["increased"] == {
        "gpu1": {"ecc_corrected": [5, 6], "ecc_uncorrected": [5, 6]},
        "mlx5_0/1": {"link_downed": [3, 4]},
        "mlx5_1/1": {"link_downed": [0, 2]},
    }
    assert fact["xids"] == [43, 79, 79]
    metrics = {(metric.name, metric.subject): metric.value for metric in counts.metrics("n/gpu1", "n")}
    assert metrics == {
        ("new_errors.link_downed", "n"): 3,
        ("new_errors.ecc_uncorrected", "n/gpu1"): 1,
        ("new_errors.xid", "n/gpu1"): 2,
    }


def test_counter_at_its_limit_is_reported_without_an_increase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_with_events(gpu_under_load()).install(monkeypatch)
    port(tmp_path, symbol_error=65535)
    with count_errors(1, True, tmp_path) as counts:
        pass
    assert counts.fact()["increased"] == {"mlx5_0/1": {"symbol_error": [65535, 65535]}}
    assert list(counts.metrics("n/gpu1", "n")) == []


def test_unavailable_and_unreadable_counters_are_separate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BeforeAfter(0, nvml_error("Unknown"))
    answers: dict[str, Any] = {
        "nvmlDeviceRegisterEvents": nvml_error("NoPermission"),
        "nvmlDeviceGetRemappedRows": nvml_error("NotSupported"),
        "nvmlDeviceGetPcieReplayCounter": broken,
    }
    nvml_with_events(gpu_under_load(**answers)).install(monkeypatch)
    with count_errors(1, True, tmp_path) as counts:
        broken.now = broken.after
    fact = counts.fact()
    assert fact["permission_denied"] == {"Insufficient Permissions": ["gpu1 xid"]}
    rows = [f"gpu1 {name}" for name in ("remap_failed", "remap_pending", "rows_remapped")]
    assert fact["not_supported"] == {NO_RDMA_PORT: ["ports"], "Not Supported": rows}
    assert fact["unreadable"] == {"gpu1 pcie_replays": "Unknown Error"}
    assert fact["counters_read"] == 7


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeNvml(init=nvml_error("DriverNotLoaded")), "the NVIDIA kernel module is not loaded"),
        (FakeNvml(h200(), nvml_error("GpuIsLost")), "GPU is lost"),
    ],
)
def test_counters_are_unreadable_without_nvml(fake: FakeNvml, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)
    with count_errors(1, False) as counts:
        pass
    fact = counts.fact()
    assert fact["counters_read"] == 0
    assert reason in fact["unreadable"]["gpu1"]
    assert fake.open == 0


def test_counters_of_a_lost_gpu_are_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_under_load()
    nvml_with_events(gpu).install(monkeypatch)
    with count_errors(1, False) as counts:
        gpu.answers = gpu.lost().answers
    unreadable = counts.fact()["unreadable"]
    assert {"gpu1 ecc_uncorrected", "gpu1 remap_failed", "gpu1 nvlink_replays"} <= set(unreadable)
    assert "GPU is lost" in unreadable["gpu1 ecc_uncorrected"]
