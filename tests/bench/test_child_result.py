"""Output and exit code of child processes that succeed and that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.bench import child_ranks
from seatrial.bench.child_result import EXIT_DISK_FULL, EXIT_USAGE_ERROR

PROGRAM = """
from pathlib import Path
from seatrial.bench import child_result
from seatrial.model import DiskFullError, SeatrialError, UsageError
from seatrial.train import disk

def run(task):
    print("output of a library")
    with disk.convert_disk_full(Path(task["out"])):
        {}

child_result.child_main(run)
"""


TASK = json.dumps({"out": "."})


def run_child(statement: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", PROGRAM.replace("{}", statement), TASK]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_stdout_has_the_result_only() -> None:
    ended = run_child("return {'steps': 3}")
    assert (ended.returncode, json.loads(ended.stdout)) == (0, {"steps": 3})
    assert ended.stderr == "output of a library\n"


@pytest.mark.parametrize(
    ("statement", "code", "last"),
    [
        ("raise UsageError('no such model')", EXIT_USAGE_ERROR, "UsageError: no such model"),
        ("raise DiskFullError('on /tmp')", EXIT_DISK_FULL, "DiskFullError: on /tmp"),
        ("raise OSError(28, 'No space left')", EXIT_DISK_FULL, "DiskFullError: "),
        # a short write on a disk with free space is not a full disk
        ("raise RuntimeError('3 requested and 1 written')", 1, "RuntimeError: 3 requested and 1 written"),
        ("raise OSError(5, 'Input/output error')", 1, "OSError: [Errno 5] Input/output error"),
        ("raise SeatrialError('step 2')", 1, "SeatrialError: step 2"),
        ("raise ValueError('three')", 1, "ValueError: three"),
    ],
)
def test_error_is_the_last_line_of_stderr(statement: str, code: int, last: str) -> None:
    ended = run_child(statement)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.splitlines()[-1].startswith(last)


@pytest.mark.parametrize("statement", ["return 3", "raise DiskFullError('on /tmp')"])
def test_exit_code_reports_a_disk_too_full_for_the_message(statement: str) -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-c", PROGRAM.replace("{}", statement), TASK]
        assert subprocess.run(argv, stdout=full, stderr=full, timeout=60, check=False).returncode == EXIT_DISK_FULL


@pytest.mark.parametrize(
    ("stderr", "parts"),
    [
        ("", []),
        ("out of order\n", ["out of order"]),
        ("a warning\nNotFinite: step 2\n", ["NotFinite: step 2", "a warning"]),
        ("old\nNo memory\n  1. less\n", ["No memory\n  1. less", "old"]),
    ],
)
def test_last_message_of_stderr_comes_first(stderr: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "err"
    path.write_text(stderr)
    text = child_ranks._with_stderr("failed", path)
    positions = [text.index(part) for part in ["failed", *parts]]
    assert positions == sorted(positions)
    assert len(text.splitlines()) == max(1, len(stderr.splitlines()))
