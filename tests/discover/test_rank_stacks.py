"""Stacks and process states of ranks, from the files that were collected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.discover.rank_stacks import FOLDER, STATES, STATES_SCRIPT, HangEvidence, read_evidence
from tests.processes import until

# by faulthandler of Python 3.11
STACK = """main thread 0x00007f381a46cb80
Current thread 0x00007f37f9e296c0 (most recent call first):
  File "/srv/seatrial/worker.py", line 126 in _run

Thread 0x00007f381a46cb80 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/user/train/ddp.py", line {line} in step
  File "<frozen runpy>", line 88 in _run_code
"""
# by py-spy 0.4
PY_SPY = """n1: py-spy 13
n1: Process 13: python -u -m seatrial.worker
n1: Python v3.11.7 (/usr/bin/python3.11)
n1:
n1: Thread 20 (idle): "heartbeat"
n1:     wait (threading.py:331)
n1: Thread 13 (idle): "MainThread"
n1:     read_rows (train/data.py:40)
n1:     <module> (train/run.py:7)
"""


def evidence(attempt: Path, states: str, stacks: dict[int, str], ranks: int) -> HangEvidence | None:
    folder = attempt / FOLDER
    folder.mkdir()
    (folder / STATES).write_text(states)
    for rank, text in stacks.items():
        (folder / f"rank{rank}.txt").write_text(text)
    return read_evidence(attempt, ranks)


def worker(node: str, rank: int, pid: int, state: str = "S", parent: int = 1, wchan: str = "futex_wait_queue") -> str:
    return f"{node}: worker {rank} {pid} {parent} {state} {wchan}\n"


def test_ranks_are_grouped_by_place_and_the_other_one_is_named(tmp_path: Path) -> None:
    stacks = {rank: STACK.format(line=120 if rank != 2 else 99) for rank in range(4)}
    states = "".join(worker("n1", rank, 10 + rank) for rank in range(4))
    collected = evidence(tmp_path, states, stacks, 4)
    assert collected is not None
    assert collected.ranks_at_fault == (2,)
    assert collected.text() == (
        "rank 2: all_reduce, called from step in train/ddp.py:99; "
        "ranks 0-1, 3: all_reduce, called from step in train/ddp.py:120"
    )


@pytest.mark.parametrize(
    ("state", "meaning"), [("D", "waiting for I/O in nfs_wait_bit"), ("T", "stopped"), ("Z", "ended")]
)
def test_process_state_names_the_rank(state: str, meaning: str, tmp_path: Path) -> None:
    states = worker("n1", 0, 10) + "n2: noise\n" + worker("n2", 1, 10, state, wchan="nfs_wait_bit")
    collected = evidence(tmp_path, states, {0: STACK.format(line=1)}, 2)
    assert collected is not None
    assert (collected.ranks_at_fault, collected.snapshots[1].node) == ((1,), "n2")
    assert meaning in collected.snapshots[1].abnormal_state
    assert collected.snapshots[1].place == "no Python stack"


def test_stack_by_py_spy_is_used_for_a_rank_without_one(tmp_path: Path) -> None:
    states = worker("n1", 0, 12) + worker("n1", 1, 13, "T") + worker("n1", 1, 14, parent=13) + PY_SPY
    collected = evidence(tmp_path, states, {0: STACK.format(line=1)}, 2)
    assert collected is not None
    assert (collected.snapshots[1].place, collected.snapshots[1].state) == ("read_rows in train/data.py:40", "T")


def test_same_place_on_all_ranks_names_none(tmp_path: Path) -> None:
    collected = evidence(tmp_path, "", dict.fromkeys(range(4), STACK.format(line=1)), 4)
    assert collected is not None
    assert collected.ranks_at_fault == ()


def test_a_missing_stack_names_no_rank(tmp_path: Path) -> None:
    states = "".join(worker("n1", rank, 10 + rank) for rank in range(4))
    collected = evidence(tmp_path, states, dict.fromkeys(range(3), STACK.format(line=1)), 4)
    assert collected is not None
    assert len(collected.ranks_by_place()) == 2
    assert collected.ranks_at_fault == ()


def test_no_files_are_no_evidence(tmp_path: Path) -> None:
    assert read_evidence(tmp_path, 4) is None
    assert evidence(tmp_path, "n1: worker 99999999999 x\n\x1b[31m", {0: "\0\xff" * 99, 1: "x" * 2**21}, 2) is None


def test_script_finds_workers_by_their_command_line(tmp_path: Path) -> None:
    """Not torchrun or the preflight, whose command lines contain that of the worker."""
    attempt = tmp_path / "jobs" / "ranks" / "attempt1"
    attempt.mkdir(parents=True)
    command = ["-m", "seatrial.worker", f"{attempt.parent}/job.json", "1"]
    sleep = "import time; time.sleep(60)"
    (tmp_path / "seatrial").mkdir()
    (tmp_path / "seatrial" / "worker.py").write_text(sleep)
    (tmp_path / "seatrial" / "__init__.py").touch()
    options = {"cwd": tmp_path, "env": {**os.environ, "RANK": "3", "PYTHONSAFEPATH": "", "PYTHONPATH": str(tmp_path)}}
    programs = [
        subprocess.Popen([sys.executable, "-u", *command], **options),  # type: ignore[call-overload]
        subprocess.Popen([sys.executable, "-c", sleep, "-m", "torch.distributed.run", *command]),
    ]
    try:
        until(lambda: b"seatrial.worker" in Path(f"/proc/{programs[0].pid}/cmdline").read_bytes())
        script = ["bash", "-c", STATES_SCRIPT, str(attempt)]
        out = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60).stdout
    finally:
        for program in programs:
            program.kill()
            program.wait()
    (attempt / FOLDER).mkdir()
    (attempt / FOLDER / STATES).write_text(out)
    collected = read_evidence(attempt, 4)
    assert collected is not None
    assert [bool(snapshot.state) for snapshot in collected.snapshots] == [False, False, False, True]
    assert out.count(" worker ") == 1
    assert (attempt / "stacks" / "wanted").exists()
