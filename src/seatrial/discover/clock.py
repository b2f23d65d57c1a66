"""Whether the system clock is kept in step with a time server, as the kernel sees it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from seatrial.discover.file_readers import FieldReader, read_line
from seatrial.model import Frozen

# adjtimex(2): the clock is not synchronised. So it stands after boot until a time daemon says otherwise (STA_UNSYNC),
# and again when the daemon has been silent for long.
_TIME_ERROR = 5


class ClockFacts(Frozen):
    """``synchronised`` is None where the kernel would not say; ``max_error_s`` is its own bound of the error."""

    synchronised: bool | None
    max_error_s: float | None
    source: str | None
    unreadable: dict[str, str] = {}


class _Timex(ctypes.Structure):
    """``struct timex`` of <sys/timex.h> on Linux with 64-bit ``long``."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "time_s", "time_us", "tick")),
        *((name, ctypes.c_long) for name in ("ppsfreq", "jitter")),
        ("shift", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("stabil", "jitcnt", "calcnt", "errcnt", "stbcnt")),
        ("tai", ctypes.c_int),
        ("reserved", ctypes.c_int * 11),
    )


def adjtimex() -> tuple[bool, float]:
    """(synchronised, the kernel's bound of the error in seconds). Changes nothing. Raises OSError where forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    timex = _Timex()  # modes 0: read only
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        code = ctypes.get_errno()
        raise OSError(f"adjtimex: {os.strerror(code)}")
    return state != _TIME_ERROR, timex.maxerror / 1e6


def read(root: Path = Path("/")) -> ClockFacts:
    attempt = FieldReader()
    answer = attempt("synchronised", adjtimex)
    clocksource = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    return ClockFacts(
        synchronised=answer[0] if answer else None,
        max_error_s=answer[1] if answer else None,
        source=attempt("source", lambda: read_line(clocksource)),
        unreadable=attempt.unreadable,
    )
