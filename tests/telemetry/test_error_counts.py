from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.discover.port_counters import NO_RDMA_PORT
from seatrial.telemetry.error_counts import count_errors
from tests.discover.test_port_counters import port
from tests.fakes.nvml import FakeNvml, h200, nvml_error
from tests.fakes.nvml_under_load import BeforeAfter, gpu_under_load, nvml_with_events


def test_of_a_healthy_place_the_fact_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = nvml_with_events(gpu_under_load()).install(monkeypatch)
    port(tmp_path, link_downed=3, symbol_error=9)
    with count_errors(1, True, tmp_path) as window:
        assert fake.open == 1
    assert window.fact() == {"read": 14}
    assert list(window.metrics("n/gpu1", "n")) == []
    assert fake.open == 0


def test_what_grew_is_told_of_gpu_and_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = BeforeAfter(5, 6)
    nvml_with_events(gpu_under_load(nvmlDeviceGetTotalEccErrors=errors), [43, 79, 79]).install(monkeypatch)
    port(tmp_path, link_downed=3, symbol_error=9)
    port(tmp_path, "mlx5_1", link_downed=0)
    with count_errors(1, True, tmp_path) as window:
        errors.now = errors.after
        port(tmp_path, link_downed=4)
        port(tmp_path, "mlx5_1", link_downed=2)
    fact = window.fact()
    assert fact["grew"] == {
        "gpu1": {"ecc_corrected": [5, 6], "ecc_uncorrected": [5, 6]},
        "mlx5_0/1": {"link_downed": [3, 4]},
        "mlx5_1/1": {"link_downed": [0, 2]},
    }
    assert fact["xids"] == [43, 79, 79]
    grew = {(one.name, one.subject): one.value for one in window.metrics("n/gpu1", "n")}
    assert grew == {
        ("new_errors.link_downed", "n"): 3,
        ("new_errors.ecc_uncorrected", "n/gpu1"): 1,
        ("new_errors.xid", "n/gpu1"): 2,
    }


def test_a_counter_at_its_limit_is_told_though_it_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_with_events(gpu_under_load()).install(monkeypatch)
    port(tmp_path, symbol_error=65535)
    with count_errors(1, True, tmp_path) as window:
        pass
    assert window.fact()["grew"] == {"mlx5_0/1": {"symbol_error": [65535, 65535]}}
    assert list(window.metrics("n/gpu1", "n")) == []


def test_what_is_denied_lacking_and_broken_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BeforeAfter(0, nvml_error("Unknown"))
    answers: dict[str, Any] = {
        "nvmlDeviceRegisterEvents": nvml_error("NoPermission"),
        "nvmlDeviceGetRemappedRows": nvml_error("NotSupported"),
        "nvmlDeviceGetPcieReplayCounter": broken,
    }
    nvml_with_events(gpu_under_load(**answers)).install(monkeypatch)
    with count_errors(1, True, tmp_path) as window:
        broken.now = broken.after
    fact = window.fact()
    assert fact["denied"] == {"Insufficient Permissions": ["gpu1 xid"]}
    rows = [f"gpu1 {name}" for name in ("remap_failed", "remap_pending", "rows_remapped")]
    assert fact["lacks"] == {NO_RDMA_PORT: ["ports"], "Not Supported": rows}
    assert fact["unread"] == {"gpu1 pcie_replays": "Unknown Error"}
    assert fact["read"] == 7


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        (FakeNvml(init=nvml_error("DriverNotLoaded")), "the NVIDIA kernel module is not loaded"),
        (FakeNvml(h200(), nvml_error("GpuIsLost")), "GPU is lost"),
    ],
)
def test_without_nvml_the_check_goes_on_and_nothing_reads_as_zero(
    fake: FakeNvml, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.install(monkeypatch)
    with count_errors(1, False) as window:
        pass
    fact = window.fact()
    assert fact["read"] == 0
    assert why in fact["unread"]["gpu1"]
    assert fake.open == 0


def test_a_gpu_that_is_lost_meanwhile_was_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_under_load()
    nvml_with_events(gpu).install(monkeypatch)
    with count_errors(1, False) as window:
        gpu.answers = gpu.lost().answers
    unread = window.fact()["unread"]
    assert {"gpu1 ecc_uncorrected", "gpu1 remap_failed", "gpu1 nvlink_replays"} <= set(unread)
    assert "GPU is lost" in unread["gpu1 ecc_uncorrected"]
