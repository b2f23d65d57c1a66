"""The waiting children of a rank. test_child_ranks.py runs tasks in them, beside the ranks of a real torchrun."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from seatrial.bench import spare_children
from seatrial.bench.spare_children import SpareChild, start, take, wait_for_task, wait_until_ready
from seatrial.util import processes

Started = list[SpareChild]
READS_TASK = "printf 1 >&0; head -c 1 >/dev/null; printf 1 >&0; exec sleep 60"
IGNORES_TASK = "printf 1 >&0; exec sleep 60"


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """The waiting children; all that the test starts are ended."""
    children: Started = []
    started: Started = []
    monkeypatch.setattr(spare_children, "_waiting", children)
    monkeypatch.setattr(spare_children, "store_barrier", lambda: started.extend(children))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    yield children
    for spare in {id(spare): spare for spare in (*started, *children)}.values():
        spare.end()


def test_a_child_is_taken_once_and_for_the_gpus_that_it_sees(
    waiting: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, IGNORES_TASK)))
    start(["own", "all"], tmp_path, "cuda:1")
    wait_until_ready()
    own, every = list(waiting)
    visible = [psutil.Process(spare.child.process.pid).environ()["CUDA_VISIBLE_DEVICES"] for spare in (own, every)]
    assert visible == ["6", "4,6"]
    assert take(None, {}) is None
    assert take("all", {}) is every
    assert take("all", {}) is None
    assert waiting == [own]
    assert take("own", {}) is own


def test_a_child_that_has_failed_is_not_used(waiting: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, "exit 1")))
    start(["all"], tmp_path, "cuda:0")
    wait_until_ready()
    assert waiting == []
    start(["all"], tmp_path, "cuda:0")
    waiting[0].child.process.wait(60)  # ended after it was ready
    assert take("all", {}) is None


def test_a_child_whose_import_hangs_is_ended_and_not_used(
    waiting: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, "exec sleep 60")))
    monkeypatch.setattr(spare_children, "READY_LIMIT_S", 0.2)
    start(["all"], tmp_path, "cuda:0")
    child = waiting[0].child
    wait_until_ready()
    assert waiting == []
    assert child.poll() is not None


@pytest.mark.parametrize(
    ("env", "is_taken"),
    [
        ({"NCCL_ALGO": "Ring", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, True),  # not changed
        ({"CUDA_VISIBLE_DEVICES": "6"}, False),
        ({"HF_HOME": "/data"}, False),
    ],
)
def test_a_task_with_variables_that_an_import_may_have_read_gets_a_new_process(
    waiting: Started, env: dict[str, str], is_taken: bool
) -> None:
    environment = {"RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}
    child = processes.start(["true"], env={}, stdout=Path(os.devnull), stderr=Path(os.devnull))
    waiting.append(SpareChild(child, "all", socket.socket(), environment))
    take("all", env)
    assert (waiting == []) is is_taken


@pytest.mark.parametrize(("line", "sent"), [(READS_TASK, True), (IGNORES_TASK, False)])
def test_a_child_that_does_not_read_its_task_is_ended(
    waiting: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sent: bool
) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, line)))
    monkeypatch.setattr(spare_children, "SEND_LIMIT_S", 30.0 if sent else 0.3)
    start(["all"], tmp_path, "cuda:0")
    wait_until_ready()
    spare = take("all", {})
    assert spare
    if not sent:
        spare.child.process.send_signal(signal.SIGSTOP)
    assert spare.run("module", {}, {}, {"out": tmp_path / "out"}) is sent
    assert (spare.child.poll() is None) is sent


def test_a_child_ends_with_its_rank() -> None:
    of_rank, of_child = socket.socketpair()
    of_rank.close()
    with pytest.raises((SystemExit, OSError)):
        wait_for_task(of_child)


def test_a_child_that_opened_cuda_during_its_imports_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank, of_child = socket.socketpair()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with of_rank, of_child, pytest.raises(SystemExit, match="opened CUDA"):
        wait_for_task(of_child)


def test_a_real_child_holds_no_file_of_its_rank_but_the_socket_and_uses_no_cpu_time(
    waiting: Started, tmp_path: Path
) -> None:
    inheritable = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    start(["all"], tmp_path, "cpu")
    wait_until_ready()
    os.close(inheritable)
    process = psutil.Process(waiting[0].child.process.pid)
    files = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    cpu_times = process.cpu_times()
    time.sleep(0.5)
    used = process.cpu_times()
    assert used.user + used.system - cpu_times.user - cpu_times.system < 0.1
    assert {file for file in files if file.startswith("/")} == {os.devnull, str(tmp_path / "spare0.rank1.err")}
    assert len([file for file in files if file.startswith("socket:")]) == 1


def program(folder: Path, line: str) -> Path:
    """A program in place of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path
