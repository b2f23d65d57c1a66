"""What NCCL chose for each operation, by its log; which are asked for, and of whom, is in test_path.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.fabric._algorithms import parse_answer

LINES = (
    "n0:9:9 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}\n",
    "n0:9:9 [0] NCCL INFO AllReduce: 8 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}\n",
)


def ask(operation: str, size: int) -> dict[str, Any]:
    return {"operation": operation, "size": size, "dtype": "float32", "buffers": "torch"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "nccl.log").write_text("".join(LINES))
    return tmp_path / "nccl.log"


def test_each_size_has_what_stands_between_its_offsets_upwards(log: Path) -> None:
    first, end = len(LINES[0]), len("".join(LINES))
    wanted = [ask("all_reduce", 2**20), ask("all_reduce", 8)]
    found = parse_answer(wanted, {"log": str(log), "told": [[2**20, 0, first], [8, first, end]]})
    assert list(found["all_reduce"]["by_size"].items()) == [
        ("8B", {"bytes": 8, "algorithm": "TREE", "protocol": "LL", "channels": 1}),
        ("1MiB", {"bytes": 2**20, "algorithm": "NVLS", "protocol": "SIMPLE", "channels": 16}),
    ]
    assert found["all_reduce"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("operation", "lines", "algorithm"),
    [
        ("send_receive", [0, 0], "point to point"),
        ("all_to_all", [0, 0], "point to point"),
        ("all_reduce", [0, 0], "not told"),
        ("all_reduce", [], "not measured: no memory"),
    ],
)
def test_a_choice_that_no_line_tells_is_not_guessed(
    operation: str, lines: list[int], algorithm: str, log: Path
) -> None:
    found = parse_answer([ask(operation, 8)], {"log": str(log), "told": [[8, *lines]]})
    assert found[operation]["by_size"] == {"8B": {"bytes": 8, "algorithm": algorithm}}
