"""NCCL's choices parsed from its log; the requests are tested in test_transport.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.fabric._algorithms import choices_by_operation

LINES = (
    "n0:9:9 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}\n",
    "n0:9:9 [0] NCCL INFO AllReduce: 8 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}\n",
)


def request(operation: str, size: int) -> dict[str, Any]:
    return {"operation": operation, "size": size, "dtype": "float32", "buffers": "torch"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "nccl.log").write_text("".join(LINES))
    return tmp_path / "nccl.log"


def test_choices_are_read_from_log_ranges_and_sorted_by_size(log: Path) -> None:
    first, end = len(LINES[0]), len("".join(LINES))
    requested = [request("all_reduce", 2**20), request("all_reduce", 8)]
    choices = choices_by_operation(requested, {"log": str(log), "log_ranges": [[2**20, 0, first], [8, first, end]]})
    assert list(choices["all_reduce"]["by_size"].items()) == [
        ("8B", {"bytes": 8, "algorithm": "TREE", "protocol": "LL", "channels": 1}),
        ("1MiB", {"bytes": 2**20, "algorithm": "NVLS", "protocol": "SIMPLE", "channels": 16}),
    ]
    assert choices["all_reduce"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("operation", "lines", "algorithm"),
    [
        ("send_receive", [0, 0], "point to point"),
        ("all_to_all", [0, 0], "point to point"),
        ("all_reduce", [0, 0], "not logged"),
        ("all_reduce", [], "not measured: no memory"),
    ],
)
def test_missing_log_line_gives_no_algorithm(operation: str, lines: list[int], algorithm: str, log: Path) -> None:
    choices = choices_by_operation([request(operation, 8)], {"log": str(log), "log_ranges": [[8, *lines]]})
    assert choices[operation]["by_size"] == {"8B": {"bytes": 8, "algorithm": algorithm}}
