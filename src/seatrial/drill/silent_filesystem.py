"""``python -m seatrial.drill.silent_filesystem FOLDER``: mounts a FUSE filesystem at FOLDER and never replies.

Every access to it waits until this program ends; then the kernel aborts the connection and the accesses fail.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_MS_NOSUID, _MS_NODEV = 2, 4  # linux/mount.h


def mount(folder: str) -> int:
    """Mount the filesystem and return the descriptor of its connection. Raises OSError; needs root."""
    connection = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={connection},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    source, target, kind = b"seatrial-drill", os.fsencode(folder), b"fuse"
    if libc.mount(source, target, kind, ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), folder)
    return connection


def main(folder: str) -> None:
    """Mount, and wait until this process is ended."""
    mount(folder)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
