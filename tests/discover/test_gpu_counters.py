from __future__ import annotations

from typing import Any

import pynvml as real
import pytest

from seatrial.discover.gpu_counters import GPU_COUNTERS, GpuErrorCounters
from tests.fakes.nvml import FakeGpu, FakeNvml, geforce, nvml_error
from tests.fakes.nvml_under_load import BeforeAfter, gpu_under_load, nvlink_5, nvml_with_events


def under_load(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, fake: FakeNvml | None = None) -> GpuErrorCounters:
    """The counters of the second GPU of two, of whose answers those change in between that do."""
    fake = (fake or nvml_with_events(gpu)).install(monkeypatch)
    fake.open = 1
    counters = GpuErrorCounters(fake, 1)
    counters.begin()
    for answer in gpu.answers.values():
        if isinstance(answer, BeforeAfter):
            answer.now = answer.after
    counters.end()
    return counters


def counted(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> GpuErrorCounters:
    return under_load(monkeypatch, gpu_under_load(**answers))


def test_nvlink_5_counts_in_fields_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    events, damaged, overrun = 215, 208, 207  # as nvml.h numbers them
    assert events == real.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS
    seen = counted(monkeypatch, **nvlink_5({events: 2, damaged: 30, overrun: 4}))
    assert (seen.before["nvlink_recoveries"], seen.before["nvlink_replays"]) == (2, 34)
    assert (seen.increase("nvlink_recoveries"), seen.increase("nvlink_replays")) == (0, 0)
    assert set(seen.unavailable) == {"nvlink_crc_flits", "nvlink_crc_data"}, "which NVLink 5 has not got"


@pytest.mark.parametrize("refused", [real.NVML_ERROR_NOT_SUPPORTED, real.NVML_ERROR_INVALID_ARGUMENT])
def test_a_gpu_with_neither_form_lacks_them(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch, **nvlink_5({}, refused))
    assert seen.increase("nvlink_recoveries") is None
    assert seen.unavailable["nvlink_recoveries"] == "Not Supported"


def test_a_field_that_fails_is_a_fault_and_nothing_that_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch, **nvlink_5({}, real.NVML_ERROR_UNKNOWN))
    assert set(seen.read_errors) == {"nvlink_recoveries", "nvlink_replays"}
    assert not seen.unavailable.keys() & seen.read_errors.keys()


def test_a_healthy_gpu_has_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    assert seen.read_errors == {}
    assert {name: seen.increase(name) for name in GPU_COUNTERS} == dict.fromkeys(GPU_COUNTERS, 0)
    assert seen.before["pcie_replays"] == 3
    assert (seen.unavailable, seen.unreadable, seen.gpu_lost) == ({}, {}, None)


@pytest.mark.parametrize(
    ("answers", "new"),
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
def test_what_grew_is_told(answers: dict[str, Any], new: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = under_load(monkeypatch, gpu_under_load(**answers))
    assert {counter: seen.increase(counter) for counter in GPU_COUNTERS if seen.increase(counter)} == new


def test_ecc_is_read_since_the_driver_was_loaded_and_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def errors(kind: int, counter: int) -> int:
        assert counter == real.NVML_VOLATILE_ECC
        return {real.NVML_MEMORY_ERROR_TYPE_CORRECTED: 4, real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: 9}[kind]

    seen = under_load(monkeypatch, gpu_under_load(nvmlDeviceGetTotalEccErrors=errors))
    assert (seen.before["ecc_corrected"], seen.before["ecc_uncorrected"]) == (4, 9)


def test_nvlink_counters_are_summed_over_links_and_kept_apart_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        real.NVML_NVLINK_ERROR_DL_REPLAY: 1,
        real.NVML_NVLINK_ERROR_DL_RECOVERY: 10,
        real.NVML_NVLINK_ERROR_DL_CRC_FLIT: 100,
        real.NVML_NVLINK_ERROR_DL_CRC_DATA: 1000,
    }
    seen = under_load(
        monkeypatch, gpu_under_load(nvmlDeviceGetNvLinkErrorCounter=lambda link, kind: kinds[kind] * (link == 17))
    )
    counted = {name: value for name, value in seen.before.items() if name.startswith("nvlink_")}
    assert counted == {
        "nvlink_replays": 1,
        "nvlink_recoveries": 10,
        "nvlink_crc_flits": 100,
        "nvlink_crc_data": 1000,
    }


@pytest.mark.parametrize("kind", ["InvalidArgument", "NotSupported", "Unknown"])
def test_a_counter_of_nvlink_that_is_not_kept_is_told_from_a_fault(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(link: int, counter: int) -> int:
        if counter == real.NVML_NVLINK_ERROR_DL_REPLAY and link == 3:
            raise nvml_error(kind)
        return 0

    seen = under_load(monkeypatch, gpu_under_load(nvmlDeviceGetNvLinkErrorCounter=count))
    assert (seen.increase("nvlink_replays"), seen.increase("nvlink_recoveries")) == (None, 0)
    assert ("nvlink_replays" in seen.unavailable) == (kind != "Unknown")


def test_a_link_that_goes_down_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    up = BeforeAfter(18, 17)

    def state(link: int) -> int:
        if link >= 18:
            raise nvml_error("InvalidArgument")
        return int(link < up.now)

    gpu = gpu_under_load(nvmlDeviceGetNvLinkState=state)
    gpu.answers["unasked"] = up
    assert under_load(monkeypatch, gpu).increase("nvlinks_down") == 1


def test_every_xid_is_taken_from_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_under_load()
    seen = under_load(monkeypatch, gpu, nvml_with_events(gpu, [63, 94, 48]))
    assert seen.xids == [63, 94, 48]
    assert seen.increase("xid") == 3


def test_what_this_kind_of_gpu_lacks_is_told_apart_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = under_load(monkeypatch, gpu_under_load(geforce))
    lacking = {"ecc_corrected", "ecc_uncorrected", "rows_remapped", "remap_pending", "remap_failed", "nvlinks_down"}
    assert lacking < set(seen.unavailable)
    assert all(seen.increase(counter) is None for counter in lacking)
    assert seen.increase("pcie_replays") == 0


@pytest.mark.parametrize("kind", ["NoPermission", "NotSupported"])
def test_xids_that_may_not_be_read_are_lacking_with_the_reason(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = under_load(monkeypatch, gpu_under_load(nvmlDeviceRegisterEvents=nvml_error(kind)))
    assert seen.increase("xid") is None
    assert seen.unavailable["xid"] == str(nvml_error(kind))


def test_a_counter_that_stops_answering_is_a_fault_and_nothing_that_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BeforeAfter(0, nvml_error("Unknown"))
    seen = under_load(monkeypatch, gpu_under_load(nvmlDeviceGetTotalEccErrors=broken))
    assert seen.increase("ecc_uncorrected") is None
    assert "ecc_uncorrected" in seen.unreadable
    assert "ecc_uncorrected" not in seen.unavailable


def test_a_gpu_that_is_lost_under_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = BeforeAfter((0, 0, 0, 0), nvml_error("GpuIsLost"))
    assert under_load(monkeypatch, gpu_under_load(nvmlDeviceGetRemappedRows=lost)).gpu_lost == str(
        nvml_error("GpuIsLost")
    )
