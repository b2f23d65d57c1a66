"""benchmarks/fsdp_memory.py: the cells of its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fsdp_memory
from tests.paths import BENCHMARKS


def write_run(folder: Path, loss: float, gib: float, **report: Any) -> None:
    folder.mkdir()
    rank = {"parameters_gib": gib, "gradients_gib": gib, "optimizer_gib": 2 * gib, "state_device": "cpu"}
    groups = {"fsdp_groups": 0, "fsdp_largest_group_gib": None, "memory_peak_gib": None}
    smaller = rank | {"parameters_gib": gib / 2}
    (folder / "metrics.json").write_text(json.dumps({**groups, "ranks": [smaller, rank], **report}))
    (folder / "steps.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")


def test_cells_of_the_fullest_rank(tmp_path: Path) -> None:
    write_run(tmp_path / "single_process", 2.0, 1)
    for run in fsdp_memory.RUNS:
        write_run(tmp_path / run, 2.0, 1)
    (offload,) = (tmp_path / run for run in fsdp_memory.RUNS if run.endswith("offload"))
    for file in offload.iterdir():
        file.unlink()
    offload.rmdir()
    write_run(offload, 2.5, 0.25, fsdp_groups=4, fsdp_largest_group_gib=0.125, memory_peak_gib=3)
    ddp, *_, last = fsdp_memory.rows(tmp_path, 2)
    assert ddp == [
        "2",
        "ddp",
        "0",
        "–",
        *["1,024.000"] * 2,
        "2,048.000",
        "4,096.000",
        "1.000",
        "the host",
        "–",
        "0.0e+00",
    ]
    assert last[2:5] == ["4", "128.000", "256.000"]
    assert last[7:] == ["1,024.000", "0.250", "the host", "3,072.000", "2.5e-01"]


@pytest.mark.training
def test_real_trainings_on_one_rank() -> None:
    argv = [sys.executable, str(BENCHMARKS / "fsdp_memory.py"), "--ranks", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    heading, _, *rows = done.stdout.splitlines()
    assert tuple(heading.strip("| ").split(" | ")) == fsdp_memory.HEADING
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[1] for row in cells] == [run.replace("_", " ") for run in fsdp_memory.RUNS]
    assert all(float(row[7].replace(",", "")) > 0 for row in cells)
    assert {float(row[-1]) < 1e-4 for row in cells} == {True}, "as the single process"
