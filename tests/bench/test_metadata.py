from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from seatrial.bench import metadata


def test_all_files_are_created_listed_and_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    assert metadata.create_files(folder, 300, 10).files == 300
    assert len(list(folder.iterdir())) == 300
    assert metadata.stat_files(folder, 300, 10).files == metadata.list_files(folder, 300).files == 300
    assert metadata.unlink_files(folder, 300).files == 300
    assert not folder.exists()


def test_a_slow_filesystem_ends_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr("seatrial.bench.metadata.time.perf_counter", lambda: next(clock))
    created = metadata.create_files(tmp_path / "slow", 100_000, 12)
    assert created.files == 3
    assert created.seconds == pytest.approx(20)
    assert metadata.unlink_files(tmp_path / "slow", created.files).files == 3


def test_a_missing_file_in_the_list_is_an_error(tmp_path: Path) -> None:
    metadata.create_files(tmp_path / "files", 10, 10)
    with pytest.raises(OSError, match="1 of 11 files are missing"):
        metadata.list_files(tmp_path / "files", 11)
    with pytest.raises(FileNotFoundError):
        metadata.stat_files(tmp_path / "files", 11, 10)


def test_inodes_are_left_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs_result((4096, 4096, 1000, 500, 450, 1000, 900, 900, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    with pytest.raises(OSError, match="only 900 inodes are free"):
        metadata.create_files(tmp_path / "files", 500, 10)


def folder(parent: Path, name: str, age_s: float) -> Path:
    path = parent / f"{metadata.PREFIX}{name}"
    metadata.create_files(path, 3, 10)
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return path


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    current, old, young = folder(tmp_path, "current", 0), folder(tmp_path, "old", 4000), folder(tmp_path, "young", 60)
    (tmp_path / f"{metadata.PREFIX}link").symlink_to("/etc")
    (tmp_path / "other").mkdir()
    by_path = {row.path: row.problem for row in metadata.remove_leftovers(tmp_path, current)}
    assert set(by_path) == {old, young}
    assert by_path[old] == ""
    assert "another run may use it" in by_path[young]
    assert not old.exists()
    assert len(list(young.iterdir())) == 3
    assert current.exists()


def test_the_folder_of_a_process_that_is_gone_is_removed_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    own = metadata.owned_prefix().removeprefix(metadata.PREFIX)
    place = own.rpartition(f"-{os.getpid()}-")[0]
    names = {"current": True, f"{own}1": True, f"{place}-{ended.pid}-2": False, f"0{place[1:]}0-{ended.pid}-3": True}
    folders = {folder(tmp_path, name, 60): kept for name, kept in names.items()}
    metadata.remove_leftovers(tmp_path, next(iter(folders)))
    assert {path: path.exists() for path in folders} == folders


def test_a_leftover_of_another_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current, old = folder(tmp_path, "current", 0), folder(tmp_path, "old", 4000)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    (leftover,) = metadata.remove_leftovers(tmp_path, current)
    assert leftover.problem.startswith("owned by uid")
    assert old.exists()
