"""Synchronisation of the system clock with a time server, according to the kernel."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from seatrial.discover.file_readers import FieldReader, FileFacts, read_line

# TIME_ERROR of adjtimex(2): the clock is not synchronised. It has this state after boot, and again when the time daemon
# has sent no update for long.
_TIME_ERROR = 5


class ClockFacts(FileFacts):
    """The state of the system clock.

    ``synchronised``: whether the clock is synchronised with a time server. ``max_error_s``: the kernel's upper bound of
    the clock's error, in seconds. ``source``: the clock source, such as tsc.
    """

    synchronised: bool | None
    max_error_s: float | None
    source: str | None


def adjtimex() -> tuple[bool, float]:
    """(whether the clock is synchronised, the kernel's upper bound of its error in seconds). Raises OSError."""
    # struct timex of <sys/timex.h> has 208 bytes if long has 64 bits: modes (0: read only), offset, freq, maxerror …
    timex = (ctypes.c_long * 26)()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    if state < 0:
        raise OSError(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return state != _TIME_ERROR, timex[3] / 1e6  # maxerror is in microseconds


def read(root: Path = Path("/")) -> ClockFacts:
    """The state of this machine's clock; only the clock source is read from a file under ``root``."""
    reader = FieldReader()
    synchronised, max_error_s = reader("synchronised", adjtimex) or (None, None)
    clocksource = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    return ClockFacts(
        synchronised=synchronised,
        max_error_s=max_error_s,
        source=reader("source", lambda: read_line(clocksource)),
        unreadable=reader.unreadable,
    )
