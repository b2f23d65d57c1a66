"""Mounts of real filesystems with faults, for tests that may mount: as root, but not in the build of an image."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CAP_SYS_ADMIN = 1 << 21
_capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
assert _capabilities
# In CI a failed mount is an error, not a skip.
CAN_MOUNT = bool(int(_capabilities[1], 16) & _CAP_SYS_ADMIN or os.environ.get("CI"))
needs_mount = pytest.mark.skipif(not CAN_MOUNT, reason="mounting a filesystem needs CAP_SYS_ADMIN")


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "seatrial-test", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
