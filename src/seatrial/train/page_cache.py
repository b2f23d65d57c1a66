"""Drops files from this node's page cache, so that the next read comes from the filesystem."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np


def evict(path: Path) -> None:
    """Ask the kernel to drop a file from the page cache. Some filesystems keep it cached: see ``cached_share``."""
    with suppress(OSError), path.open("rb") as file:
        os.fsync(file.fileno())  # the kernel does not drop pages that are not written yet
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """The share of a file's pages that are in the page cache, 0 to 1; 1 if the share cannot be read.

    The kernel reports all pages as cached if this user neither owns the file nor may write to it (mincore(2)).
    """
    try:
        size = path.stat().st_size
        if not size:
            return 0.0
        mapped = np.memmap(path, mode="r")
    except OSError:
        return 1.0
    states = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
    failed = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(states.ctypes.data)
    )
    return 1.0 if failed else float((states & 1).mean())
