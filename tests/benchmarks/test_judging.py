"""The benchmark of judging, on fewer nodes: what it measures is a whole trial, and it is quick."""

from __future__ import annotations

import runpy
import sys
import time
from types import SimpleNamespace

import pytest

from seatrial.model import Outcome
from tests.paths import BENCHMARKS

SCRIPT = BENCHMARKS / "judging.py"


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
    by_node = [one for one in verdicts if one.check == "collectives.gpu_pairs" and one.metric == "wrong_elements"]
    assert [one.subject for one in by_node] == [f"node{number:04}" for number in range(32)]


def test_it_prints_time_and_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["judging.py", "--nodes", "2", "--gpus", "4"])
    monkeypatch.setattr("resource.getrusage", lambda _who: SimpleNamespace(ru_maxrss=2**19))  # not what pytest took
    assert runpy.run_path(str(SCRIPT))["main"]() == 0
    out = capsys.readouterr().out
    assert "PASS: CPU time 0." in out
    assert "PASS: peak memory 0.50 GiB, to be under 1 GiB" in out
    assert "2 nodes × 4 GPUs: " in out
    assert "of CPU); peak memory" in out


def test_it_exits_with_1_beyond_either_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["judging.py", "--nodes", "2", "--gpus", "4"])
    monkeypatch.setattr("resource.getrusage", lambda _who: SimpleNamespace(ru_maxrss=2**20))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 1
    assert "FAIL: peak memory 1.00 GiB, to be under 1 GiB" in capsys.readouterr().out
    monkeypatch.setattr("resource.getrusage", lambda _who: SimpleNamespace(ru_maxrss=2**19))
    monkeypatch.setattr("time.process_time", iter((0.0, 5.0)).__next__)
    assert runpy.run_path(str(SCRIPT))["main"]() == 1
    assert "FAIL: CPU time 5.00 s, to be under 5 s" in capsys.readouterr().out
