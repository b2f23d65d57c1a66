"""host.load: real CPU load of another process, and /proc/stat that cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from seatrial.checks.host import load
from seatrial.checks.host.load import CHECK
from seatrial.model import Outcome
from tests.fakes.slurm import judge, run_check


def test_busy_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "WINDOW_S", 1.5)
    monkeypatch.setattr(load, "MAX_PROCESSES", 1000)  # other tests use the CPUs too
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            measured = run_check(CHECK, tmp_path)
        finally:
            busy.kill()
    assert measured.error is None
    (cpu_busy,) = measured.metrics
    assert 0 < cpu_busy.value <= 100
    processes = measured.facts["busiest_processes"]
    assert isinstance(processes, list)
    assert busy.pid in [process["pid"] for process in processes if isinstance(process, dict)]


@pytest.mark.parametrize(
    ("gpu_node", "value", "outcome"),
    [("yes", 30, Outcome.WARN), ("yes", 3, Outcome.PASS), ("no", 90, Outcome.SKIP)],
)
def test_rule(gpu_node: str, value: float, outcome: Outcome, tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path)
    (metric,) = measured.metrics
    changed = measured.model_copy(
        update={
            "metrics": (replace(metric, value=value),),
            "facts": {**measured.facts, "gpu_node": gpu_node},
        }
    )
    assert [verdict.outcome for verdict in judge(CHECK, changed)] == [outcome]


def test_waiting_for_io_and_guests_are_not_counted_as_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice."""
    (tmp_path / "stat").write_text("cpu  300 100 100 5000 1000 50 50 0 200 100\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    assert load._cpu_time() == pytest.approx((600 / ticks_per_s, 6600 / ticks_per_s))


def test_times_that_do_not_increase_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_cpu_time", lambda: (5, 100))
    measured = run_check(CHECK, tmp_path)
    assert measured.metrics == ()
    assert "100" in str(measured.error)
