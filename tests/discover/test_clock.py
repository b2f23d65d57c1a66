from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from seatrial.discover import clock


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="layout of 64-bit Linux only")
def test_the_state_is_read_from_the_kernels_structure() -> None:
    timex = (ctypes.c_long * 26)()
    state = ctypes.CDLL(None).adjtimex(timex)
    if state < 0:
        pytest.skip("this kernel or container refuses adjtimex")
    assert 9_000 <= timex[11] <= 11_000  # tick: microseconds between ticks of 100 Hz, within the range of adjtimex(2)
    unsynchronised = bool(timex[5] & 0x1040)  # status: STA_UNSYNC | STA_CLOCKERR
    synchronised, max_error_s = clock.adjtimex()
    assert synchronised is not unsynchronised
    assert max_error_s == pytest.approx(timex[3] / 1e6, abs=1)


def test_this_machine() -> None:
    facts = clock.read()
    assert (facts.synchronised is None) == ("synchronised" in facts.unreadable)
    assert (facts.max_error_s is None) == (facts.synchronised is None)


def test_without_permission_the_state_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> tuple[bool, float]:
        raise OSError("adjtimex: Operation not permitted")

    monkeypatch.setattr(clock, "adjtimex", refuse)
    facts = clock.read(tmp_path)
    assert facts.synchronised is None
    assert facts.max_error_s is None
    assert facts.unreadable["synchronised"] == "adjtimex: Operation not permitted"
    assert "current_clocksource: No such file" in facts.unreadable["source"]
