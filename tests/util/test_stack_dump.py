"""Stacks of this process, on request and by the timer of faulthandler."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.util import stack_dump
from seatrial.util.stack_dump import FOLDER, StackDump, recorder_file, request, stack_files
from tests.processes import until


def test_stacks_are_written_once_on_request(tmp_path: Path) -> None:
    dump = StackDump(tmp_path, 3, lambda: b"recorded")
    stacks, blocked = stack_files(tmp_path / FOLDER, 3)
    dump.poll()
    assert (stacks.exists(), blocked.stat().st_size) == (False, 0)
    request(tmp_path)
    dump.poll()
    text = stacks.read_text()
    assert text.startswith("main thread 0x")
    assert "in test_stacks_are_written_once_on_request" in text
    assert recorder_file(tmp_path / FOLDER, 3).read_bytes() == b"recorded"
    stacks.unlink()
    dump.poll()
    assert not stacks.exists()
    dump.close()


def test_torch_that_cannot_dump_loses_no_stacks(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("no group")

    dump = StackDump(tmp_path, 0, fail)
    request(tmp_path)
    dump.poll()
    dump.close()
    assert stack_files(tmp_path / FOLDER, 0)[0].exists()
    assert recorder_file(tmp_path / FOLDER, 0).read_bytes() == b""


def test_stacks_of_a_blocked_process_are_removed_when_it_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_dump, "BLOCKED_S", 0.05)
    dump = StackDump(tmp_path, 0)
    blocked = stack_files(tmp_path / FOLDER, 0)[1]
    dump.poll()
    until(lambda: "test_stacks_of_a_blocked_process" in blocked.read_text())
    monkeypatch.setattr(stack_dump, "BLOCKED_S", 600)
    dump.poll()
    assert blocked.stat().st_size == 0
    dump.close()
