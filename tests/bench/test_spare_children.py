"""The waiting children of a rank. test_child_ranks.py runs tasks in them, beside the ranks of a real torchrun."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.bench import spare_children
from seatrial.util import processes


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[spare_children.SpareChild]]:
    children: list[spare_children.SpareChild] = []
    monkeypatch.setattr(spare_children, "_waiting", children)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    yield children
    for spare in children:
        processes.stop(spare.child)


def test_a_child_is_taken_once_and_for_the_gpus_that_it_sees(
    waiting: list[spare_children.SpareChild], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, "exec sleep 60")))
    spare_children.start(["own", "all"], tmp_path, "cuda:1")
    own, every = list(waiting)
    assert (own.environment["CUDA_VISIBLE_DEVICES"], every.environment["CUDA_VISIBLE_DEVICES"]) == ("6", "4,6")
    assert spare_children.take(None) is None
    assert spare_children.take("all") is every
    assert spare_children.take("all") is None
    assert waiting == [own]
    waiting.append(every)  # ended by the fixture


def test_a_child_that_has_failed_is_not_used(
    waiting: list[spare_children.SpareChild], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, "exit 1")))
    spare_children.start(["all"], tmp_path, "cuda:0")
    waiting[0].child.process.wait(60)
    assert spare_children.take("all") is None


def program(folder: Path, line: str) -> Path:
    """A program in place of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path
