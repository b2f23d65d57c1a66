"""Lines that healthy programs print too."""

from __future__ import annotations

import re
import time

import pytest

from seatrial.diagnose.line_severity import is_healthy
from seatrial.util import data_files

ROWS = data_files.read("healthy_lines.yaml")


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_rows_match_their_examples_only(row: dict[str, object]) -> None:
    pattern = re.compile(str(row["pattern"]), re.ASCII)
    examples, counter_examples = row["examples"], row["counter_examples"]
    assert isinstance(examples, list)
    assert isinstance(counter_examples, list)
    assert examples
    assert counter_examples
    assert [each for each in examples if not (pattern.search(each) and is_healthy(each))] == []
    assert [each for each in counter_examples if pattern.search(each)] == []


def test_failures_are_not_healthy() -> None:
    for line in (
        "NCCL WARN socketPollConnect: Connect to 10.0.0.4<5> returned 113(No route to host)",
        "  Warning  FailedMount  32s  kubelet  MountVolume.SetUp failed for volume x: permission denied",
        "[rank0]: ValueError: please try again with the default settings instead",
        "slurmd: error: cannot open /etc/slurm/gres.conf: No such file or directory",
    ):
        assert not is_healthy(line), line


def test_long_lines_are_read_quickly() -> None:
    started = time.process_time()
    for line in ("a" * 10**6, "error: " * 10**5, "[" * 10**5, "kernel: " * 10**5, "no " * 10**5, ". " * 10**5):
        is_healthy(line)
    assert time.process_time() - started < 1
