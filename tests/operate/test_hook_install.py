"""Install writes all files or none; uninstall removes exactly these, and refuses changed ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.operate.hook_install import install, uninstall

FILES = {"prolog.sh": "#!/bin/sh\n", "npd/seatrial.json": "{}\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    install(tmp_path / "hooks", FILES, "1.0")
    return tmp_path / "hooks"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_files_are_written_with_the_rights_that_their_callers_need(folder: Path) -> None:
    assert names(folder) == {*FILES, "installed.json"}
    assert os.access(folder / "prolog.sh", os.X_OK)
    assert not os.access(folder / "npd/seatrial.json", os.X_OK)
    assert {(folder / name).stat().st_mode & 0o022 for name in FILES} == {0}, "writable by their owner only"


def test_a_folder_with_files_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="hook uninstall"):
        install(folder, FILES, "1.0")
    assert names(folder) == {*FILES, "installed.json"}


def test_a_link_or_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists"):
        install(tmp_path / "link", FILES, "1.0")
    with pytest.raises(UsageError, match="nothing was written"):
        install(Path("/proc/hooks"), FILES, "1.0")
    assert not (tmp_path / "elsewhere").exists()


def test_uninstall_removes_the_files_and_empty_folders_only(folder: Path) -> None:
    (folder / "npd" / "mine.txt").write_text("mine")
    assert {path.name for path in uninstall(folder, dry_run=True)} == {"prolog.sh", "seatrial.json", "installed.json"}
    assert (folder / "prolog.sh").exists()
    uninstall(folder, dry_run=False)
    assert names(folder) == {"npd/mine.txt"}


def test_uninstall_leaves_no_folder(folder: Path) -> None:
    uninstall(folder, dry_run=False)
    assert not folder.exists()


def test_uninstall_refuses_a_changed_file_and_removes_nothing(folder: Path) -> None:
    (folder / "prolog.sh").write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(UsageError, match=r"prolog\.sh"):
        uninstall(folder, dry_run=False)
    assert names(folder) == {*FILES, "installed.json"}


def test_uninstall_continues_after_it_was_killed(folder: Path) -> None:
    (folder / "prolog.sh").unlink()
    uninstall(folder, dry_run=False)
    assert not folder.exists()


@pytest.mark.parametrize("manifest", ["", "{}", "[1]", "\x00"])
def test_uninstall_refuses_another_folder(manifest: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"installed\.json"):
        uninstall(tmp_path, dry_run=False)
    (tmp_path / "installed.json").write_text(manifest)
    with pytest.raises(UsageError, match=r"installed\.json"):
        uninstall(tmp_path, dry_run=False)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "link/other", "a\0b"])
def test_uninstall_removes_nothing_outside_its_folder(name: str, folder: Path) -> None:
    (folder.parent / "other").write_text("mine")
    (folder / "link").symlink_to(folder.parent)
    (folder / "installed.json").write_text(json.dumps({"seatrial": "1.0", "files": {name: "0"}}))
    with pytest.raises(UsageError, match="outside"):
        uninstall(folder, dry_run=False)
    assert (folder.parent / "other").exists()
