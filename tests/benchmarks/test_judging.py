"""benchmarks/judging.py on fewer nodes: judging is fast, and the exit code follows the thresholds."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import seatrial.judge
from benchmarks import judging
from seatrial.checks import catalog
from seatrial.judge import rules
from seatrial.model import Outcome
from seatrial.pipeline.run_directory import load_trial


def test_judging_many_gpus_is_fast() -> None:
    config, jobs, measurements = judging.scale_trial(load_trial(judging.RECORD), 32, 8)
    start = time.process_time()
    verdicts = seatrial.judge.judge(config, jobs, measurements, catalog(), {})
    assert time.process_time() - start < 3  # takes a fraction of a second; quadratic complexity would take minutes
    errors = {verdict.check for verdict in verdicts if verdict.outcome is Outcome.ERROR}
    assert errors == {"train.throughput"}, "the record is of a version that did not record the work of each training"
    failed = {(verdict.check, verdict.metric) for verdict in verdicts if verdict.outcome is Outcome.FAIL}
    assert failed == {("train.ddp", "scaling_efficiency")}, "82.8 % in the record, below the trial's 90 %"
    assert len({verdict.subject for verdict in verdicts if verdict.check == "device.gemm"}) == 32 * 8
    subjects = [
        verdict.subject
        for verdict in verdicts
        if (verdict.check, verdict.metric) == ("collectives.gpu_pairs", "wrong_elements")
    ]
    assert subjects == [f"node{number:04}" for number in range(32)]


def test_work_that_is_the_same_for_all_subjects_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def count(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(module, name, count)

    config, jobs, measurements = judging.scale_trial(load_trial(judging.RECORD), 16, 8)
    counted(seatrial.judge, "judge_check")
    counted(rules._RuleEvaluation, "_is_excluded")
    seatrial.judge.judge(config, jobs, measurements, catalog(), {})
    assert calls["judge_check"] == len(config.checks), "a trial's thresholds are judged together with the rules"
    assert calls["_is_excluded"] < 2 * sum(len(check.rules) for check in catalog().values())


def test_time_and_memory_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["judging.py", "--nodes", "2", "--gpus", "4"])
    monkeypatch.setattr("resource.getrusage", lambda _who: SimpleNamespace(ru_maxrss=2**19))  # not pytest's own memory
    assert judging.main() == 0
    out = capsys.readouterr().out
    assert "PASS: CPU time 0." in out
    assert "PASS: peak memory 0.50 GiB, expected < 1 GiB" in out
    assert "2 nodes × 4 GPUs: " in out
    assert "of CPU); peak memory" in out


def test_exit_code_1_above_either_threshold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["judging.py", "--nodes", "2", "--gpus", "4"])
    monkeypatch.setattr("resource.getrusage", lambda _who: SimpleNamespace(ru_maxrss=2**20))
    assert judging.main() == 1
    assert "FAIL: peak memory 1.00 GiB, expected < 1 GiB" in capsys.readouterr().out
    monkeypatch.setattr("resource.getrusage", lambda _who: SimpleNamespace(ru_maxrss=2**19))
    monkeypatch.setattr("time.process_time", iter((0.0, 5.0)).__next__)
    assert judging.main() == 1
    assert "FAIL: CPU time 5.00 s, expected < 5 s" in capsys.readouterr().out
