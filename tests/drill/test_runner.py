"""Which drills can run here, and what an error of an injection gives."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.drill.base import Needs
from seatrial.drill.injection import Injection
from seatrial.drill.runner import run_drill, run_drills, unmet_need
from seatrial.model import SeatrialError
from tests.drill.test_injection import DRILL


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs(gpus=99), "needs 99 GPUs, this host has "),
        (Needs(programs=("no-such-program", "sh")), "needs no-such-program in PATH"),
        (Needs(device_files=("/dev/null", "/dev/no-such-file")), "needs access to /dev/no-such-file"),
        (Needs(cpus=9999), "needs 9999 CPUs, this process may use "),
        (Needs(nodes=9999), "needs 9999 nodes of Slurm"),
        (Needs(other=lambda: "needs cgroup v2"), "needs cgroup v2"),
    ],
)
def test_missing_needs_are_named(needs: Needs, reason: str) -> None:
    assert unmet_need(needs).startswith(reason)


def test_root_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unmet_need(Needs(root=True)) == "needs root"
    assert unmet_need(Needs()) == ""


def test_drill_that_cannot_run_starts_nothing(tmp_path: Path) -> None:
    drills = [replace(DRILL, needs=Needs(gpus=99))]
    (result,) = run_drills(drills, tmp_path, lambda _text: None)
    assert (result.could_not_run.startswith("needs 99 GPUs"), result.holds) == (True, False)
    assert not list(tmp_path.iterdir())


def test_failed_injection_is_a_miss_and_everything_is_restored(tmp_path: Path) -> None:
    def prepare(injection: Injection) -> None:
        injection.at_end((injection.folder / "restored").touch)
        raise SeatrialError("cannot mount")

    messages: list[str] = []
    result = run_drill(replace(DRILL, prepare=prepare), tmp_path / "drill", messages.append)
    assert (result.seen, result.problems) == (False, ("SeatrialError: cannot mount",))
    assert (tmp_path / "drill" / "restored").exists()
    assert messages == ["test: undoing its changes"]


def test_damaged_record_is_a_miss_of_this_drill_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_damaged_record(injection: Injection) -> None:
        injection.run_dir.mkdir()
        (injection.run_dir / "trial.json").write_text("{")

    monkeypatch.setattr(Injection, "start_trial", lambda self: None)
    monkeypatch.setattr(Injection, "wait_for_end", lambda self, limit_s: 0)
    (result,) = run_drills([replace(DRILL, act=leave_damaged_record)], tmp_path, lambda _text: None)
    assert not result.seen
    assert "trial.json" in result.problems[0]
