"""A GPU's error counters without a load; those of older NVLinks and the Xids are in test_strain.py."""

from __future__ import annotations

from typing import Any

import pynvml as real
import pytest

from seatrial.discover.gpu_counters import COUNTERS, Counters
from tests.fakes.counting import loaded, nvlink_5, nvml


def counted(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Counters:
    fake = nvml(loaded(**answers)).install(monkeypatch)
    fake.open = 1
    counters = Counters(fake, 1)
    counters.begin()
    counters.end()
    return counters


def test_nvlink_5_counts_in_fields_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    events, damaged, overrun = 215, 208, 207  # as nvml.h numbers them
    assert events == real.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS
    seen = counted(monkeypatch, **nvlink_5({events: 2, damaged: 30, overrun: 4}))
    assert (seen.before["nvlink_recoveries"], seen.before["nvlink_replays"]) == (2, 34)
    assert (seen.new("nvlink_recoveries"), seen.new("nvlink_replays")) == (0, 0)
    assert set(seen.lacks) == {"nvlink_crc_flits", "nvlink_crc_data"}, "which NVLink 5 has not got"


@pytest.mark.parametrize("refused", [real.NVML_ERROR_NOT_SUPPORTED, real.NVML_ERROR_INVALID_ARGUMENT])
def test_a_gpu_with_neither_form_lacks_them(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch, **nvlink_5({}, refused))
    assert seen.new("nvlink_recoveries") is None
    assert seen.lacks["nvlink_recoveries"] == "Not Supported"


def test_a_field_that_fails_is_a_fault_and_nothing_that_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch, **nvlink_5({}, real.NVML_ERROR_UNKNOWN))
    assert set(seen.faults) == {"nvlink_recoveries", "nvlink_replays"}
    assert not seen.lacks.keys() & seen.faults.keys()


def test_a_healthy_gpu_has_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    assert seen.faults == {}
    assert {name: seen.new(name) for name in COUNTERS} == dict.fromkeys(COUNTERS, 0)
