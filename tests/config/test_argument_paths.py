"""Paths below a folder that may not be searched, as arguments of commands."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from seatrial.config.argument_paths import is_folder, path_exists
from tests.processes import call

COMMANDS = [
    ("judge", "PATH"),
    ("baseline", "learn", "PATH", "--out", "x.yaml"),
    ("explain", "PATH"),
    ("explain", "--follow", "PATH"),
    ("watch", "PATH"),
    ("hook", "install", "PATH", "--nodes", "2", "--gpus-per-node", "8", "--state-dir", "."),
]


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may not be searched, also by root, who runs these tests in containers."""
    folder, stat, open_ = tmp_path / "locked", Path.stat, os.open

    def guard(path: object) -> None:
        if folder in Path(os.fsdecode(path) if isinstance(path, str | bytes) else str(path)).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def guarded_stat(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        guard(self)
        return stat(self, follow_symlinks=follow_symlinks)

    def guarded_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        guard(path)
        return open_(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(Path, "stat", guarded_stat)
    monkeypatch.setattr(os, "open", guarded_open)
    folder.mkdir()
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_path_without_access_is_a_usage_error(command: tuple[str, ...], locked: Path) -> None:
    path = locked / "run"
    code, _, err = call(*(str(path) if word == "PATH" else word for word in command), cwd=locked.parent)
    assert (code, err) == (2, f"seatrial: cannot read {path}: Permission denied\n")


def test_a_folder_without_access_to_its_files(locked: Path) -> None:
    code, _, err = call("judge", locked)
    assert (code, "Permission denied\n" in err, err.count("\n")) == (2, True, 1), err
    assert call("watch", locked)[::2] == (2, f"seatrial: cannot read {locked / 'run.json'}: Permission denied\n")


def test_missing_paths_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert is_folder(tmp_path)
    assert path_exists(tmp_path / "file")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "none", Path("a\0b")):
        assert not is_folder(path)
    assert not path_exists(tmp_path / "file" / "below")
