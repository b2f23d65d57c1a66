"""The filesystem that never replies: accesses wait until its program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.drill.silent_filesystem import mount
from tests.checks.host.mounts import CAN_MOUNT

SCRIPT = """
"$0" -m seatrial.drill.silent_filesystem "$1" & program=$!
until grep -q " $1 fuse" /proc/mounts; do kill -0 $program || exit 9; sleep 0.05; done
timeout -s KILL 1 stat -f "$1"; echo "first $?"
kill -KILL $program; wait $program
stat -f "$1"; echo "second $?"
"""


def test_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file|not permitted|Permission denied"):
        mount(str(tmp_path / "missing"))


@pytest.mark.skipif(
    not CAN_MOUNT or not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="needs CAP_SYS_ADMIN and /dev/fuse"
)
def test_access_waits_until_the_program_ends(tmp_path: Path) -> None:
    argv = ["unshare", "--mount", "--propagation", "private", "bash", "-c", SCRIPT, sys.executable, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines() == [f"first {128 + signal.SIGKILL}", "second 1"], done.stderr
    assert "not connected" in done.stderr
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
