"""A driver that hangs, or takes the process down that asks it: real processes, with an NVML of our own in the path."""

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
    for limit_s in (2, 30):  # on a busy machine two seconds may not be enough to come as far as NVML
        clock = time.monotonic()
        facts = gpu.read_with_timeout(limit_s)
        assert facts.nvml_unavailable == f"NVML did not answer within {limit_s} s"
        assert facts.detection_error == f"whether there are GPUs is not known: NVML did not answer within {limit_s} s"
        assert facts.gpus == ()
        assert time.monotonic() - clock < limit_s + 60
        if pid.exists():
            break
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_a_driver_that_takes_its_reader_down_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(tmp_path, monkeypatch, "raise RuntimeError('no such symbol')")
    unavailable = gpu.read_with_timeout(60).nvml_unavailable or ""
    assert unavailable == "NVML ended its reader (1): RuntimeError: no such symbol"


def test_facts_survive_the_way_between_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(h200(0), h200(1)).install(monkeypatch)
    facts = gpu.read(make_pci_devices(tmp_path, "0000:1b:00.0", "0000:1c:00.0"))
    assert len(facts.gpus) == 2
    assert gpu.GpuFacts.model_validate_json(facts.model_dump_json()) == facts


def test_what_was_read_elsewhere_is_what_would_be_read_here() -> None:
    assert gpu.read_with_timeout().model_copy(update={"gpus": ()}) == gpu.read().model_copy(update={"gpus": ()})
