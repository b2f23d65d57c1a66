from __future__ import annotations

from typing import Any

import pynvml as real
import pytest

from seatrial.discover.gpu_counters import GPU_COUNTERS, GpuErrorCounters
from tests.fakes.nvml import FakeGpu, FakeNvml, geforce, nvml_error
from tests.fakes.nvml_under_load import BeforeAfter, gpu_under_load, nvlink_5, nvml_with_events


def under_load(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, fake: FakeNvml | None = None) -> GpuErrorCounters:
    """The counters of the second of two GPUs; BeforeAfter answers change between ``begin`` and ``end``."""
    fake = (fake or nvml_with_events(gpu)).install(monkeypatch)
    fake.open = 1
    counters = GpuErrorCounters(fake, 1)
    counters.begin()
    for answer in gpu.answers.values():
        if isinstance(answer, BeforeAfter):
            answer.now = answer.after
    counters.end()
    return counters


def counters_of(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> GpuErrorCounters:
    return under_load(monkeypatch, gpu_under_load(**answers))


def test_nvlink_5_counters_are_read_from_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    events, damaged, overrun = 215, 208, 207  # as nvml.h numbers them
    assert events == real.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS
    counters = counters_of(monkeypatch, **nvlink_5({events: 2, damaged: 30, overrun: 4}))
    assert (counters.before["nvlink_recoveries"], counters.before["nvlink_replays"]) == (2, 34)
    assert (counters.increase("nvlink_recoveries"), counters.increase("nvlink_replays")) == (0, 0)
    assert set(counters.unavailable) == {"nvlink_crc_flits", "nvlink_crc_data"}, "not supported by NVLink 5"


@pytest.mark.parametrize("refused", [real.NVML_ERROR_NOT_SUPPORTED, real.NVML_ERROR_INVALID_ARGUMENT])
def test_counters_without_either_query_are_unavailable(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = counters_of(monkeypatch, **nvlink_5({}, refused))
    assert counters.increase("nvlink_recoveries") is None
    assert counters.unavailable["nvlink_recoveries"] == "Not Supported"


def test_a_field_that_fails_is_a_read_error(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = counters_of(monkeypatch, **nvlink_5({}, real.NVML_ERROR_UNKNOWN))
    assert set(counters.read_errors) == {"nvlink_recoveries", "nvlink_replays"}
    assert not counters.unavailable.keys() & counters.read_errors.keys()


def test_a_healthy_gpu_has_no_increase_and_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = counters_of(monkeypatch)
    assert counters.read_errors == {}
    assert {name: counters.increase(name) for name in GPU_COUNTERS} == dict.fromkeys(GPU_COUNTERS, 0)
    assert counters.before["pcie_replays"] == 3
    assert (counters.unavailable, counters.unreadable, counters.gpu_lost) == ({}, {}, None)


@pytest.mark.parametrize(
    ("answers", "increases"),
    [
        ({"nvmlDeviceGetPcieReplayCounter": BeforeAfter(3, 10)}, {"pcie_replays": 7}),
        (
            {"nvmlDeviceGetRemappedRows": BeforeAfter((1, 0, 0, 0), (1, 2, 1, 0))},
            {"rows_remapped": 2, "remap_pending": 1},
        ),
        ({"nvmlDeviceGetRemappedRows": BeforeAfter((1, 0, 0, 0), (1, 0, 0, 1))}, {"remap_failed": 1}),
        ({"nvmlDeviceGetTotalEccErrors": BeforeAfter(5, 6)}, {"ecc_corrected": 1, "ecc_uncorrected": 1}),
    ],
)
def test_increases(answers: dict[str, Any], increases: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    counters = under_load(monkeypatch, gpu_under_load(**answers))
    assert {counter: counters.increase(counter) for counter in GPU_COUNTERS if counters.increase(counter)} == increases


def test_volatile_ecc_errors_are_read_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def errors(kind: int, counter: int) -> int:
        assert counter == real.NVML_VOLATILE_ECC
        return {real.NVML_MEMORY_ERROR_TYPE_CORRECTED: 4, real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: 9}[kind]

    counters = under_load(monkeypatch, gpu_under_load(nvmlDeviceGetTotalEccErrors=errors))
    assert (counters.before["ecc_corrected"], counters.before["ecc_uncorrected"]) == (4, 9)


def test_nvlink_counters_are_summed_over_links_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        real.NVML_NVLINK_ERROR_DL_REPLAY: 1,
        real.NVML_NVLINK_ERROR_DL_RECOVERY: 10,
        real.NVML_NVLINK_ERROR_DL_CRC_FLIT: 100,
        real.NVML_NVLINK_ERROR_DL_CRC_DATA: 1000,
    }
    counters = under_load(
        monkeypatch, gpu_under_load(nvmlDeviceGetNvLinkErrorCounter=lambda link, kind: kinds[kind] * (link == 17))
    )
    nvlink_counters = {name: value for name, value in counters.before.items() if name.startswith("nvlink_")}
    assert nvlink_counters == {
        "nvlink_replays": 1,
        "nvlink_recoveries": 10,
        "nvlink_crc_flits": 100,
        "nvlink_crc_data": 1000,
    }


@pytest.mark.parametrize("kind", ["InvalidArgument", "NotSupported", "Unknown"])
def test_unsupported_nvlink_counters_are_unavailable_and_others_read_errors(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(link: int, counter: int) -> int:
        if counter == real.NVML_NVLINK_ERROR_DL_REPLAY and link == 3:
            raise nvml_error(kind)
        return 0

    counters = under_load(monkeypatch, gpu_under_load(nvmlDeviceGetNvLinkErrorCounter=count))
    assert (counters.increase("nvlink_replays"), counters.increase("nvlink_recoveries")) == (None, 0)
    assert ("nvlink_replays" in counters.unavailable) == (kind != "Unknown")


def test_a_link_that_goes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    up = BeforeAfter(18, 17)

    def state(link: int) -> int:
        if link >= 18:
            raise nvml_error("InvalidArgument")
        return int(link < up.now)

    gpu = gpu_under_load(nvmlDeviceGetNvLinkState=state)
    gpu.answers["unasked"] = up
    assert under_load(monkeypatch, gpu).increase("nvlinks_down") == 1


def test_all_xids_are_read_from_the_event_set(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_under_load()
    counters = under_load(monkeypatch, gpu, nvml_with_events(gpu, [63, 94, 48]))
    assert counters.xids == [63, 94, 48]
    assert counters.increase("xid") == 3


def test_unsupported_counters_are_none_instead_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = under_load(monkeypatch, gpu_under_load(geforce))
    unsupported = {"ecc_corrected", "ecc_uncorrected", "rows_remapped", "remap_pending", "remap_failed", "nvlinks_down"}
    assert unsupported < set(counters.unavailable)
    assert all(counters.increase(counter) is None for counter in unsupported)
    assert counters.increase("pcie_replays") == 0


@pytest.mark.parametrize("kind", ["NoPermission", "NotSupported"])
def test_xids_that_cannot_be_read_are_unavailable(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = under_load(monkeypatch, gpu_under_load(nvmlDeviceRegisterEvents=nvml_error(kind)))
    assert counters.increase("xid") is None
    assert counters.unavailable["xid"] == str(nvml_error(kind))


def test_a_counter_that_fails_at_the_end_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BeforeAfter(0, nvml_error("Unknown"))
    counters = under_load(monkeypatch, gpu_under_load(nvmlDeviceGetTotalEccErrors=broken))
    assert counters.increase("ecc_uncorrected") is None
    assert "ecc_uncorrected" in counters.unreadable
    assert "ecc_uncorrected" not in counters.unavailable


def test_a_gpu_that_is_lost_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = BeforeAfter((0, 0, 0, 0), nvml_error("GpuIsLost"))
    assert under_load(monkeypatch, gpu_under_load(nvmlDeviceGetRemappedRows=lost)).gpu_lost == str(
        nvml_error("GpuIsLost")
    )
