"""The benchmark of judging, on fewer nodes: what it measures is a whole trial, and it is quick."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import pytest

from seatrial.model import Outcome

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "judging.py"


def test_a_whole_trial_of_many_gpus_is_judged_quickly() -> None:
    script = runpy.run_path(str(SCRIPT))
    config, jobs, measurements = script["enlarged"](script["load_trial"](script["RECORD"]), 32, 8)
    began = time.process_time()
    verdicts = script["judge"](config, jobs, measurements, script["catalog"](), {})
    assert time.process_time() - began < 3  # a fraction of a second; in the square of the places it would be minutes
    said = {one.outcome for one in verdicts}
    assert Outcome.ERROR not in said
    assert Outcome.FAIL not in said
    assert len({one.subject for one in verdicts if one.check == "device.gemm"}) == 32 * 8


def test_it_prints_time_and_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["judging.py", "--nodes", "2", "--gpus", "4"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    out = capsys.readouterr().out
    assert "2 nodes × 4 GPUs: " in out
    assert "of CPU); peak memory" in out
