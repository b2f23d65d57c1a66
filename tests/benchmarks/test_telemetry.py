"""The benchmark of telemetry: what it calls a change, and one rehearsal of it on two CPU processes."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import BENCHMARKS

SCRIPT = BENCHMARKS / "telemetry.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_rounds_are_compared_pair_by_pair(script: dict[str, Any]) -> None:
    """The machine slows down by half meanwhile; the sampler costs 2 % in each round."""
    off = [{"busbw.1GiB": value} for value in (100.0, 90.0, 80.0, 70.0, 60.0, 50.0)]
    on = [{"busbw.1GiB": one["busbw.1GiB"] * 0.98} for one in off]
    (row,) = script["compare"](off, on)
    assert row.change == pytest.approx(-0.02)
    assert row.interval == pytest.approx((-0.02, -0.02))
    assert row.remark == "TOO FAR"
    assert row.without == 75


@pytest.mark.parametrize(("factor", "far"), [(1.0099, False), (0.9901, False), (1.0101, True), (0.9899, True)])
def test_one_percent_either_way_is_too_far(script: dict[str, Any], factor: float, far: bool) -> None:
    rows = script["compare"]([{"x": 10.0}] * 6, [{"x": 10.0 * factor}] * 6)
    assert rows[0].remark == ("TOO FAR" if far else "")
    assert ("TOO FAR" in "\n".join(script["table"](rows, True))) is far
    assert "TOO FAR" not in "\n".join(script["table"](rows, False))


def test_a_change_that_rounds_do_not_pin_down_is_not_called_small(script: dict[str, Any]) -> None:
    on = [{"x": 10.0 * factor} for factor in (0.97, 1.03, 0.98, 1.02, 1.0, 1.0)]
    (row,) = script["compare"]([{"x": 10.0}] * 6, on)
    assert row.change == pytest.approx(0)
    assert "NOT RESOLVED" in "\n".join(script["table"]([row], True))
    (few,) = script["compare"]([{"x": 10.0}] * 2, on[4:])
    assert "NOT RESOLVED" in few.remark


@pytest.mark.training
def test_a_rehearsal_measures_everything_and_judges_nothing(tmp_path: Path) -> None:
    out = tmp_path / "telemetry.json"
    short = ["--seconds", "0", "--rounds", "2", "--window", "0.02", "--out", str(out)]
    done = subprocess.run([sys.executable, str(SCRIPT), *short], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["figures"]] == ["busbw.1MiB", "busbw.10MiB", "tokens_per_second_per_gpu"]
    assert all(row["without"] > 0 and row["with_it"] > 0 for row in found["figures"])
    assert isinstance(found["sampler_cpu_share"], float)  # 0 where both windows are within a tick of the clock
    assert found["sampler_cpu_share"] < 0.5
    assert found["rounds"] == 2
    assert found["judged"] is False
    assert done.stdout.splitlines()[-1].startswith("tokens_per_second_per_gpu")
