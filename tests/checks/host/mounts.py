"""Mounts of real filesystems with faults, for tests that run as root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# In CI a failed mount is an error, not a skip.
CAN_MOUNT = os.geteuid() == 0 or bool(os.environ.get("CI"))
needs_mount = pytest.mark.skipif(not CAN_MOUNT, reason="mounting a filesystem needs root")


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "seatrial-test", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
