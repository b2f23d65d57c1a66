"""tools/wheelhouse.py and tools/setup.sh: an install without a network, and the errors of both."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tools import wheelhouse

from tests.paths import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A wheelhouse with one small package."""
    wheel = tmp_path / "wheels" / "some_tool-1.0+cpu-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "some_tool-1.0+cpu.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_tool.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-tool\nVersion: 1.0+cpu\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (wheel.parent / "requirements.txt").write_text(wheelhouse.requirements([wheel]))
    return wheel.parent


def install(folder: Path) -> tuple[subprocess.CompletedProcess[str], bool]:
    """pip's result, and whether the package is there; an index that pip would ask does not exist."""
    target = folder.parent / "target"
    pip = [sys.executable, "-m", "pip", "install", "--target", str(target), "-r", str(folder / "requirements.txt")]
    env = {"PATH": os.environ["PATH"], "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(pip, env=env, capture_output=True, text=True, check=False)
    return done, (target / "some_tool.py").exists()


def test_a_wheelhouse_installs_without_an_index(folder: Path) -> None:
    done, is_there = install(folder)
    assert (done.returncode, is_there) == (0, True), done.stderr


def test_a_missing_wheel_is_named_and_nothing_is_installed(folder: Path) -> None:
    next(folder.glob("*.whl")).unlink()
    done, is_there = install(folder)
    assert (done.returncode, is_there) == (1, False)
    assert "No matching distribution found for some-tool==1.0+cpu" in done.stderr


def test_a_changed_wheel_is_refused(folder: Path) -> None:
    with zipfile.ZipFile(next(folder.glob("*.whl")), "a") as archive:
        archive.writestr("more.py", "")
    done, is_there = install(folder)
    assert (done.returncode, is_there) == (1, False)
    assert "some-tool==1.0+cpu" in done.stderr
    assert "HASHES" in done.stderr


def test_a_folder_that_exists_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("")
    monkeypatch.setattr(sys, "argv", ["wheelhouse.py", str(tmp_path)])
    assert wheelhouse.main() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failed_download_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wheelhouse.py", str(tmp_path / "wheels")])
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert wheelhouse.main() == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("target", "setup"), [("trial", "trial"), ("wheelhouse", "trial"), ("lint", "test")])
def test_a_trial_does_not_install_the_tools_of_the_tests(target: str, setup: str, tmp_path: Path) -> None:
    make = ["make", "--dry-run", f"VENV={tmp_path}", target]
    env = {"PATH": os.environ["PATH"]}  # without the flags of the make that runs these tests
    planned = subprocess.run(make, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"tools/setup\.sh \S+ (\w+)", planned) == [setup]


def programs(folder: Path, **scripts: str) -> Path:
    """A folder for PATH with these shell scripts only, and basename."""
    folder.mkdir()
    (folder / "basename").symlink_to(shutil.which("basename") or "")
    for name, body in scripts.items():
        (folder / name.replace("_", "-")).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name.replace("_", "-")).chmod(0o755)
    return folder


def setup(path: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        ["/bin/sh", ROOT / "tools/setup.sh", *arguments],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


NO_VENV = "case $2 in *ensurepip*) exit 1 ;; esac"  # a Python of Debian without python3-venv


def test_an_old_python_is_named(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", python3='[ "$1" = --version ] && echo Python 3.10.12; exit 1')
    code, message = setup(path, str(tmp_path / "venv"), "trial")
    assert code == 2
    assert "Python 3.10.12" in message
    assert "docs/install.md" in message


def test_a_user_is_told_the_package_of_this_python(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", python3="exit 1", id="echo 1000")
    (path / "python3.12").write_text(f"#!/bin/sh\n{NO_VENV}\n")
    (path / "python3.12").chmod(0o755)
    assert setup(path, str(tmp_path / "venv"), "trial") == (
        2,
        "setup: python3.12 has no venv module: sudo apt-get install python3.12-venv\n",
    )


def test_root_is_told_before_apt_installs(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", python3=NO_VENV, id="echo 0", apt_get='echo "apt-get $*" >&2; [ "$1" = update ]')
    code, message = setup(path, str(tmp_path / "venv"), "trial")
    assert code == 1
    assert message.splitlines() == [
        "setup: python3 has no venv module; as root: apt-get install python3-venv",
        "apt-get update -q",
        "apt-get install -y -q python3-venv",
    ]
    assert not (tmp_path / "venv").exists()


def test_an_unknown_set_is_refused(tmp_path: Path) -> None:
    code, message = setup(tmp_path, str(tmp_path / "venv"), "all")
    assert code == 2
    assert "expected trial, docs or test" in message
