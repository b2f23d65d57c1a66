"""A driver that hangs, or crashes the process that reads it: real processes with a fake pynvml on the path."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from seatrial.discover import gpu
from tests.fakes.nvml import FakeNvml, h200, make_pci_devices

HEAD = "class NVMLError(Exception): pass\nimport os, time, pathlib\n"


def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str) -> None:
    (tmp_path / "pynvml.py").write_text(f"{HEAD}def nvmlInit():\n    {init}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_a_driver_that_hangs_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    nvml(tmp_path, monkeypatch, f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)")
    for timeout_s in (2, 30):  # on a busy machine the process may not reach NVML within two seconds
        started = time.monotonic()
        facts = gpu.read_with_timeout(timeout_s)
        assert facts.nvml_unavailable == f"NVML did not respond within {timeout_s} s"
        assert facts.nvml_unavailable in (facts.detection_error or "")
        assert facts.gpus == ()
        assert time.monotonic() - started < timeout_s + 60
        if pid.exists():
            break
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_a_driver_that_crashes_the_process_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(tmp_path, monkeypatch, "raise RuntimeError('no such symbol')")
    error = gpu.read_with_timeout(60).nvml_unavailable or ""
    assert "exit code 1" in error
    assert "RuntimeError: no such symbol" in error


def test_facts_are_equal_after_a_round_trip_through_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(h200(0), h200(1)).install(monkeypatch)
    facts = gpu.read(make_pci_devices(tmp_path, "0000:1b:00.0", "0000:1c:00.0"))
    assert len(facts.gpus) == 2
    assert gpu.GpuFacts.model_validate_json(facts.model_dump_json()) == facts


def test_facts_from_the_other_process_equal_those_of_this_process() -> None:
    assert gpu.read_with_timeout().model_copy(update={"gpus": ()}) == gpu.read().model_copy(update={"gpus": ()})
