from __future__ import annotations

import json
import math
from pathlib import Path
from typing import BinaryIO

import pytest

from seatrial.util.files import atomic_folder, atomic_write, remove_incomplete, stage, write_json


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")

    def full_disk(file: BinaryIO) -> None:
        file.write(b"half of the new")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, full_disk)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_stage_does_not_replace(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    path.write_text("old")
    staged = stage(path, b"new")
    assert (path.read_text(), staged.read_text()) == ("old", "new")


def test_stage_does_not_replace_a_folder(tmp_path: Path) -> None:
    (tmp_path / "trial.json").mkdir()
    with pytest.raises(IsADirectoryError):
        stage(tmp_path / "trial.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["trial.json"]


def test_atomic_folder_appears_complete_with_mode_755(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "data") as making:
        (making / "rows").write_text("1")
        assert not (tmp_path / "data").exists()
    assert (tmp_path / "data" / "rows").read_text() == "1"
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_failed_atomic_folder_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 3"), atomic_folder(tmp_path / "data"):
        raise ValueError("row 3")
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_kept(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "data") as making:
        (making / "rows").write_text("second")
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "rows").write_text("first")
    assert (tmp_path / "data" / "rows").read_text() == "first"


def test_write_json_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text("old")
    write_json(path, {"accuracy": 97.5})
    assert json.loads(path.read_text()) == {"accuracy": 97.5}
    assert list(tmp_path.iterdir()) == [path]


def test_write_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "metrics.json", {"loss": math.nan})
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    staged = stage(tmp_path / "trial.json", b"half")
    folder = atomic_folder(tmp_path / "jobs" / "data")
    folder.__enter__()
    for name in ("report.html.incomplete-report", "step-1.incomplete", "incomplete-7"):
        (tmp_path / name).touch()
    remove_incomplete(tmp_path)
    assert not staged.exists()
    assert not list((tmp_path / "jobs").iterdir())
    assert len(list(tmp_path.iterdir())) == 4, "files with other names are kept"


def test_mode_of_a_file_is_kept_or_set(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    atomic_write(path, b"secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    atomic_write(path, b"fetched from a node")
    assert path.stat().st_mode & 0o777 == 0o600
    atomic_write(tmp_path / "new", b"")
    (tmp_path / "other").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode
