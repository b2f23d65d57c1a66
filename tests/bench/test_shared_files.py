from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from seatrial.bench import shared_files
from seatrial.bench.shared_files import (
    LockCounts,
    ReadCounts,
    append_record,
    contend_for_lock,
    read_repeatedly,
    try_fcntl,
    try_flock,
    wait_for_contents,
)


def test_waiting_for_contents_ends_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "VISIBILITY_TIMEOUT_S", 0.1)
    paths = [tmp_path / name for name in ("good", "other", "absent")]
    digest = shared_files.write_random(paths[0])
    shared_files.write_random(paths[1])
    delays = wait_for_contents(paths, [digest, digest, digest])
    assert list(delays) == [0]


def test_waiting_for_contents_ends_with_the_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, late, now = tmp_path / "ready", tmp_path / "late", 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 100.2 and not late.exists():
            os.link(ready, late)

    monkeypatch.setattr(shared_files, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    digest = shared_files.write_random(ready)
    delays = wait_for_contents([ready, late], [digest, digest])
    assert delays == {0: 0, 1: pytest.approx(0.2, abs=2 * shared_files.POLL_S)}


@pytest.mark.parametrize(
    ("content", "complete"),
    [
        (b"\1\0\0\0" * shared_files.PAGE_RECORDS, True),
        (b"\1\0\0\0" * (shared_files.PAGE_RECORDS - 1), False),
        (b"\1\0\0\0" * (shared_files.PAGE_RECORDS - 1) + b"\2\0\0\0", False),
        (b"", False),
    ],
)
def test_reader_detects_partial_content(tmp_path: Path, content: bytes, complete: bool) -> None:
    (tmp_path / "page").write_bytes(content)
    counts = read_repeatedly(tmp_path / "page", 0.01)
    assert (counts.bad == 0) is complete
    assert counts.reads > 0


def test_missing_file_is_bad(tmp_path: Path) -> None:
    counts = read_repeatedly(tmp_path / "absent", 0.01)
    assert counts.bad == counts.reads > 0


def test_stale_handle_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: Path) -> bytes:
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "read_bytes", stale)
    counts = read_repeatedly(tmp_path, 0.01)
    assert counts == ReadCounts(counts.reads, 0, 0)


def test_records_differ_and_have_equal_length() -> None:
    records = {append_record(writer, number) for writer in range(3) for number in range(shared_files.RECORDS)}
    assert len(records) == 3 * shared_files.RECORDS
    assert {len(line) for line in records} == {shared_files.RECORD_BYTES}


def test_flock_is_refused_while_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb+") as holder, path.open("rb+") as other:
        assert try_flock(holder.fileno())
        assert not try_flock(other.fileno())


def test_fcntl_is_refused_while_another_process_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    hold = f"import fcntl; f = open({str(path)!r}, 'rb+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    # A POSIX lock belongs to a process and excludes other processes only
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        with path.open("rb+") as file:
            assert not try_fcntl(file.fileno())
        holder.communicate(b"\n")
    with path.open("rb+") as file:
        assert try_fcntl(file.fileno())


def test_lock_without_contention(tmp_path: Path) -> None:
    (tmp_path / "lock.x").touch()
    assert contend_for_lock(tmp_path / "lock.x", try_flock, 100) == LockCounts(0, 0)
    assert not (tmp_path / "lock.held").exists()


def test_lock_held_by_two_is_a_conflict(tmp_path: Path) -> None:
    (tmp_path / "lock.x").touch()
    (tmp_path / "lock.held").touch()
    assert contend_for_lock(tmp_path / "lock.x", try_flock, 100).conflicts == 2


def test_lock_that_stays_busy_is_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "LOCK_TIMEOUT_S", 0.05)
    (tmp_path / "lock.x").touch()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        contend_for_lock(tmp_path / "lock.x", lambda file: False, 2)


def test_digest_of_a_mapped_file(tmp_path: Path) -> None:
    digest = shared_files.write_random(tmp_path / "x")
    assert shared_files.mapped_digest(tmp_path / "x") == digest
