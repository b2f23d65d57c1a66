"""What the process that asked can read, of one that answers and of those that cannot."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from seatrial.bench.child_result import EXIT_DISK_FULL, EXIT_USAGE_ERROR

PROGRAM = """
from pathlib import Path
from seatrial.bench import child_answer
from seatrial.model import NoRoom, SeatrialError, UsageError
from seatrial.train import disk

def run(task):
    print("a library's own words")
    with disk.explained(Path(task["out"])):
        {}

child_answer.serve(run)
"""


TASK = json.dumps({"out": "."})


def ended(deed: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", PROGRAM.replace("{}", deed), TASK]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_an_answer_stands_alone_on_standard_output() -> None:
    found = ended("return {'steps': 3}")
    assert (found.returncode, json.loads(found.stdout)) == (0, {"steps": 3})
    assert found.stderr == "a library's own words\n"


@pytest.mark.parametrize(
    ("deed", "code", "last"),
    [
        ("raise UsageError('no such model')", EXIT_USAGE_ERROR, "UsageError: no such model"),
        ("raise NoRoom('on /tmp')", EXIT_DISK_FULL, "NoRoom: on /tmp"),
        ("raise OSError(28, 'No space left')", EXIT_DISK_FULL, "NoRoom: cannot write .: [Errno 28] No space left. On "),
        # cut short, and there is room: whatever it was, no full disk
        ("raise RuntimeError('3 requested and 1 written')", 1, "RuntimeError: 3 requested and 1 written"),
        ("raise OSError(5, 'Input/output error')", 1, "OSError: [Errno 5] Input/output error"),
        ("raise SeatrialError('step 2')", 1, "SeatrialError: step 2"),
        ("raise ValueError('three')", 1, "ValueError: three"),
    ],
)
def test_why_there_is_none_is_said_last(deed: str, code: int, last: str) -> None:
    found = ended(deed)
    assert (found.returncode, found.stdout) == (code, "")
    assert found.stderr.splitlines()[-1].startswith(last)


@pytest.mark.parametrize("deed", ["return 3", "raise NoRoom('on /tmp')"])
def test_a_disk_that_takes_not_even_the_words_is_told_by_the_code(deed: str) -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-c", PROGRAM.replace("{}", deed), TASK]
        assert subprocess.run(argv, stdout=full, stderr=full, timeout=60, check=False).returncode == EXIT_DISK_FULL
