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


def test_waiting_tells_what_came_and_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "VISIBILITY_TIMEOUT_S", 0.1)
    paths = [tmp_path / name for name in ("good", "other", "absent")]
    digest = shared_files.write_random(paths[0])
    shared_files.write_random(paths[1])
    found = wait_for_contents(paths, [digest, digest, digest])
    assert list(found) == [0]


def test_waiting_ends_when_the_last_file_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, late, now = tmp_path / "ready", tmp_path / "late", 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 100.2 and not late.exists():
            os.link(ready, late)

    monkeypatch.setattr(shared_files, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    digest = shared_files.write_random(ready)
    found = wait_for_contents([ready, late], [digest, digest])
    assert found == {0: 0, 1: pytest.approx(0.2, abs=2 * shared_files.POLL_S)}


@pytest.mark.parametrize(
    ("content", "whole"),
    [
        (b"\1\0\0\0" * shared_files.PAGE_RECORDS, True),
        (b"\1\0\0\0" * (shared_files.PAGE_RECORDS - 1), False),
        (b"\1\0\0\0" * (shared_files.PAGE_RECORDS - 1) + b"\2\0\0\0", False),
        (b"", False),
    ],
)
def test_a_reader_knows_whole_from_partial(tmp_path: Path, content: bytes, whole: bool) -> None:
    (tmp_path / "page").write_bytes(content)
    found = read_repeatedly(tmp_path / "page", 0.01)
    assert (found.bad == 0) is whole
    assert found.reads > 0


def test_a_file_that_is_missing_is_bad(tmp_path: Path) -> None:
    found = read_repeatedly(tmp_path / "absent", 0.01)
    assert found.bad == found.reads > 0


def test_a_stale_handle_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: Path) -> bytes:
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "read_bytes", stale)
    found = read_repeatedly(tmp_path, 0.01)
    assert found == ReadCounts(found.reads, 0, 0)


def test_records_differ_and_have_one_length() -> None:
    records = {append_record(actor, number) for actor in range(3) for number in range(shared_files.RECORDS)}
    assert len(records) == 3 * shared_files.RECORDS
    assert {len(line) for line in records} == {shared_files.RECORD}


def test_flock_is_refused_while_another_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb+") as holder, path.open("rb+") as other:
        assert try_flock(holder.fileno())
        assert not try_flock(other.fileno())


def test_fcntl_is_refused_while_another_process_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    hold = f"import fcntl; f = open({str(path)!r}, 'rb+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    # A lock of POSIX belongs to a process: only another one is kept out.
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        with path.open("rb+") as file:
            assert not try_fcntl(file.fileno())
        holder.communicate(b"\n")
    with path.open("rb+") as file:
        assert try_fcntl(file.fileno())


def test_alone_at_a_lock_nobody_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "lock.x").touch()
    assert contend_for_lock(tmp_path / "lock.x", try_flock, 100) == LockCounts(0, 0)
    assert not (tmp_path / "lock.held").exists()


def test_a_lock_that_is_held_by_another_as_well_is_a_clash(tmp_path: Path) -> None:
    (tmp_path / "lock.x").touch()
    (tmp_path / "lock.held").touch()
    assert contend_for_lock(tmp_path / "lock.x", try_flock, 100).conflicts == 2


def test_a_lock_that_does_not_come_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "LOCK_TIMEOUT_S", 0.05)
    (tmp_path / "lock.x").touch()
    with pytest.raises(TimeoutError, match=r"the lock did not come within 0\.05 s"):
        contend_for_lock(tmp_path / "lock.x", lambda file: False, 2)


def test_a_mapped_file_is_read_by_content(tmp_path: Path) -> None:
    digest = shared_files.write_random(tmp_path / "x")
    assert shared_files.mapped_digest(tmp_path / "x") == digest
