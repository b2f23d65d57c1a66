"""Calls in child processes: results, and those that hang, die or hold descriptors."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

from seatrial.operate import hook_children as children
from tests.processes import alive, until, with_enough_time


def test_results_of_calls_that_run_at_once() -> None:
    started = time.monotonic()

    def slow(name: str) -> bytes:
        time.sleep(0.2)
        return name.encode()

    calls = {name: partial(slow, name) for name in "abcd"}
    assert children.run_all(calls, started + 30) == {name: name.encode() for name in "abcd"}


def test_a_call_that_never_returns_is_left_at_the_deadline_and_ended(tmp_path: Path) -> None:
    def hang() -> bytes:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)

    calls = {"hangs": hang, "works": lambda: b"done"}
    results = with_enough_time(
        lambda seconds: children.run_all(calls, time.monotonic() + seconds), lambda results: results["works"], 1
    )
    assert results == {"hangs": None, "works": b"done"}
    assert until(lambda: not alive(int((tmp_path / "pid").read_text())), 20)


def test_a_process_that_dies_has_an_empty_result() -> None:
    def die() -> bytes:
        os.kill(os.getpid(), signal.SIGSEGV)
        return b""

    def fail() -> bytes:
        raise SystemExit(3)

    assert children.run_all({"dies": die, "fails": fail}, time.monotonic() + 30) == {"dies": b"", "fails": b""}


def test_a_result_larger_than_a_pipe_is_complete() -> None:
    assert children.run_all({"large": lambda: b"x" * 3_000_000}, time.monotonic() + 30)["large"] == b"x" * 3_000_000


def test_a_hung_call_holds_no_descriptor_of_its_caller() -> None:
    """slurmd reads the output of a prolog until all processes that can write to it have ended."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)

    def open_descriptors() -> bytes:
        names = os.listdir("/proc/self/fd")
        return " ".join(os.path.realpath(f"/proc/self/fd/{name}") for name in names).encode()

    targets = (children.run_all({"call": open_descriptors}, time.monotonic() + 30)["call"] or b"").decode()
    inode = os.fstat(write_end).st_ino
    os.close(read_end)
    os.close(write_end)
    assert "/dev/null" in targets
    assert f"[{inode}]" not in targets
