"""benchmarks/telemetry.py: the comparison, and one CPU-only run with two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import telemetry
from tests.paths import BENCHMARKS

SCRIPT = BENCHMARKS / "telemetry.py"


def test_rounds_are_compared_pairwise() -> None:
    """The machine slows down by half; the sampler costs 2 % in each round."""
    off = [{"busbw.1GiB": value} for value in (100.0, 90.0, 80.0, 70.0, 60.0, 50.0)]
    on = [{"busbw.1GiB": values["busbw.1GiB"] * 0.98} for values in off]
    (row,) = telemetry.compare(off, on)
    assert row.change == pytest.approx(-0.02)
    assert row.interval == pytest.approx((-0.02, -0.02))
    assert row.remark == "CHANGE TOO LARGE"
    assert row.without == 75


@pytest.mark.parametrize(("factor", "too_large"), [(1.0099, False), (0.9901, False), (1.0101, True), (0.9899, True)])
def test_changes_above_one_percent_are_too_large(factor: float, too_large: bool) -> None:
    rows = telemetry.compare([{"x": 10.0}] * 6, [{"x": 10.0 * factor}] * 6)
    assert rows[0].remark == ("CHANGE TOO LARGE" if too_large else "")
    assert ("CHANGE TOO LARGE" in "\n".join(telemetry.table(rows, True))) is too_large
    assert "CHANGE TOO LARGE" not in "\n".join(telemetry.table(rows, False))


def test_a_wide_confidence_interval_is_not_significant() -> None:
    on = [{"x": 10.0 * factor} for factor in (0.97, 1.03, 0.98, 1.02, 1.0, 1.0)]
    (row,) = telemetry.compare([{"x": 10.0}] * 6, on)
    assert row.change == pytest.approx(0)
    assert "NOT SIGNIFICANT" in "\n".join(telemetry.table([row], True))
    (few,) = telemetry.compare([{"x": 10.0}] * 2, on[4:])
    assert "NOT SIGNIFICANT" in few.remark


@pytest.mark.training
def test_a_cpu_only_run_measures_everything_without_threshold(tmp_path: Path) -> None:
    out = tmp_path / "telemetry.json"
    arguments = ["--seconds", "0", "--rounds", "2", "--window", "0.02", "--out", str(out)]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [row["name"] for row in record["metrics"]] == ["busbw.1MiB", "busbw.10MiB", "tokens_per_second_per_gpu"]
    assert all(row["without"] > 0 and row["with_it"] > 0 for row in record["metrics"])
    assert isinstance(record["sampler_cpu_share"], float)  # 0 if both windows are within one clock tick
    assert record["sampler_cpu_share"] < 0.5
    assert record["rounds"] == 2
    assert record["judged"] is False
    assert done.stdout.splitlines()[-1].startswith("tokens_per_second_per_gpu")
