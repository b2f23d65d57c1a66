"""Reads Xids, the numbered errors of NVIDIA's driver, from the kernel's log buffer /dev/kmsg."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

# Documentation/ABI/testing/dev-kmsg: "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;MESSAGE"
_RECORD = re.compile(r"\d+,\d+,(\d+),[^;\n]*;(.*)")
# The format in NVIDIA's documentation of Xids; also "(0000:03:00)" of old drivers, "(PCI:0000:05:00 GPU-I:05)" of MIG
XID = r"NVRM: Xid \((?:PCI:)?(?P<bdf>[0-9a-fA-F:.]{5,16})[^)\n]{0,40}\): "
_XID_EVENT = re.compile(rf"{XID}(\d{{1,6}}),")
_RECORD_BYTES = 8192  # bytes per read: the size of the largest record
_MAX_RECORDS = 200_000  # so that the loop ends although the kernel goes on writing
_MAX_XIDS = 1000  # the last ones are kept


class XidEvent(NamedTuple):
    """One Xid. ``seconds``: time since boot. ``address``: PCI address of the GPU."""

    seconds: float
    address: str
    number: int


class KernelLog(NamedTuple):
    """``from_s``: time of the oldest message that is not overwritten, in seconds since boot; None without a message."""

    from_s: float | None
    xids: tuple[XidEvent, ...]


def read(root: Path = Path("/")) -> KernelLog:
    """The Xids in the kernel's log buffer, without waiting for new messages.

    Raises OSError, such as PermissionError for users who may not read /dev/kmsg.
    """
    from_s: float | None = None
    xids: deque[XidEvent] = deque(maxlen=_MAX_XIDS)
    with open(
        root / "dev/kmsg", "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
    ) as file:
        for _ in range(_MAX_RECORDS):
            try:
                chunk = file.read(_RECORD_BYTES)
            except BrokenPipeError:  # a message was overwritten while this process read
                continue
            if not chunk:  # no further message
                break
            for line in chunk.decode("utf-8", errors="replace").splitlines():
                if record := _RECORD.match(line):
                    seconds = int(record[1]) / 1e6
                    from_s = seconds if from_s is None else from_s
                    if xid := _XID_EVENT.search(record[2]):
                        xids.append(XidEvent(seconds, xid[1], int(xid[2])))
    return KernelLog(from_s, tuple(xids))
