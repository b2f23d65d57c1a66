"""Reads Xids, the numbered errors of NVIDIA's driver, from the kernel's log buffer /dev/kmsg."""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from pathlib import Path

from seatrial.model import Frozen

# Documentation/ABI/testing/dev-kmsg: "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;MESSAGE"
_RECORD = re.compile(r"\d+,\d+,(\d+),[^;\n]*;(.*)")
# The format in NVIDIA's documentation of Xids; also "(0000:03:00)" of old drivers, "(PCI:0000:05:00 GPU-I:05)" of MIG
XID = r"NVRM: Xid \((?:PCI:)?(?P<bdf>[0-9a-fA-F:.]{5,16})[^)\n]{0,40}\): "
_XID_EVENT = re.compile(rf"{XID}(\d{{1,6}}),")
_RECORD_BYTES = 8192  # bytes per read: the size of the largest record
_MAX_RECORDS = 200_000  # so that the loop ends although the kernel goes on writing
_MAX_XIDS = 1000  # the last ones are kept


class XidEvent(Frozen):
    """One Xid. ``seconds``: time since boot. ``address``: PCI address of the GPU."""

    seconds: float
    address: str
    number: int


class KernelLog(Frozen):
    """``from_s``: time of the oldest message that is not overwritten, in seconds since boot; None without a message."""

    from_s: float | None
    xids: tuple[XidEvent, ...]


def read(root: Path = Path("/")) -> KernelLog:
    """Return the Xids in the kernel's log buffer, without waiting for new messages.

    Raises OSError, such as PermissionError for users who may not read /dev/kmsg.
    """
    descriptor = os.open(root / "dev" / "kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    from_s: float | None = None
    xids: deque[XidEvent] = deque(maxlen=_MAX_XIDS)
    try:
        for _ in range(_MAX_RECORDS):
            try:
                chunk = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:  # no further message
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # a message was overwritten while this process read
                    continue
                raise
            if not chunk:
                break
            for line in chunk.decode("utf-8", errors="replace").splitlines():
                if record := _RECORD.match(line):
                    seconds = int(record[1]) / 1e6
                    from_s = seconds if from_s is None else from_s
                    if xid := _XID_EVENT.search(record[2]):
                        xids.append(XidEvent(seconds=seconds, address=xid[1], number=int(xid[2])))
    finally:
        os.close(descriptor)
    return KernelLog(from_s=from_s, xids=tuple(xids))
