"""The command ``init``: without Slurm, and in folders that it cannot write."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.launch.site_folder import FOLDERS
from tests.processes import Program, call

ARGUMENTS = ("--nodes", "2", "--gpus-per-node", "8", "--partition", "gpu")
SCRIPTS = {
    "discovery",
    "preprocess",
    "train_1gpu",
    "ddp_1node",
    "ddp_2nodes",
    "fsdp_1node",
    "fsdp_2nodes",
    "function_calling",
    "oumi",
}


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # with scontrol, but no slurm.conf, Slurm's client waits for a minute


def test_without_slurm_the_folder_is_written_and_the_reason_printed(tmp_path: Path) -> None:
    code, out, err = call("init", tmp_path / "site")
    assert code == 0
    assert "nodes: not set (Slurm could not be read)" in out
    (error,) = [line for line in err.splitlines() if line.startswith("Slurm could not be read: ")]
    assert "Run first: " in error
    assert {path.stem for path in (tmp_path / "site" / "jobs").iterdir()} == SCRIPTS
    assert {path.name for path in (tmp_path / "site").iterdir() if path.is_dir()} == set(FOLDERS)
    assert error.removeprefix("Slurm could not be read: ") in (tmp_path / "site" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_an_existing_file_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    for name in ("env.sh", "notes.txt", *(f"z{number}" for number in range(10))):
        (tmp_path / name).write_text("mine")
    code, out, err = call("init", tmp_path, *ARGUMENTS)
    assert (code, out) == (2, "")
    assert "not empty (env.sh, notes.txt, z0, " in err
    assert "and 2 more" in err
    assert "choose another directory" in err
    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}
    assert len(list(tmp_path.iterdir())) == 12


def test_an_empty_folder_is_used_unless_it_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code, _, err = call("init", ".", *ARGUMENTS)
    assert (code, list(folder.iterdir())) == (2, [])
    assert "is the current directory" in err
    monkeypatch.chdir(tmp_path)
    assert call("init", folder, *ARGUMENTS)[0] == 0
    assert (folder / "site.yaml").is_file()


@pytest.mark.parametrize("parent", ["a-file", "/proc"])
def test_a_folder_that_cannot_be_written(parent: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    code, out, err = call("init", tmp_path / parent / "site", *ARGUMENTS)
    assert (code, out) == (2, "")
    assert "cannot" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # RLIMIT_FSIZE simulates a full disk: README.md and site.yaml do not fit, the scripts do
    first = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))"
    code, out, err = Program("init", tmp_path / "site", *ARGUMENTS, first=first).finish()
    assert (code, out) == (2, "")
    assert "File too large; nothing was written" in err
    assert list(tmp_path.iterdir()) == []
