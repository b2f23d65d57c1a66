from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from seatrial.discover import versions
from seatrial.discover.versions import InstalledVersion, InstalledVersions
from tests.discover import trees

# Outputs of nvidia-ctk 1.17.8, runc 1.3.0 and dcgmi 4.3.0
PROGRAMS = {
    "nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.17.8\ncommit: f202b80a9b9d0db00d9b1d73c0128c8962c55f4d",
    "runc": "runc version 1.3.0\ncommit: v1.3.0-0-g4ca628d1\nspec: 1.2.1\ngo: go1.23.8\nlibseccomp: 2.5.6",
    "dcgmi": "\ndcgmi  version: 4.3.0\n",
}


def install(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\n[ "$*" = --version ] || exit 64\n{script}\n')
    program.chmod(0o755)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setattr(shutil, "which", lambda name: next(iter((tmp_path / "bin").glob(name)), None))
    trees.gpu_host(tmp_path)
    return tmp_path


def one(version: str, place: str = "", model: str = "") -> InstalledVersions:
    return [InstalledVersion(version=version, place=place, model=model)]


def test_a_gpu_node(root: Path) -> None:
    for name, output in PROGRAMS.items():
        install(root / "bin", name, f"cat <<'END'\n{output}\nEND")
    trees.write(root, {"etc/os-release": "ID=ubuntu\nVERSION_ID=24.04\n"})
    trees.write(root, {"proc/sys/kernel/osrelease": "6.8.0-60-generic\n"})
    assert versions.read(root) == {
        "driver": one("580.159.04"),
        "container_toolkit": one("1.17.8"),
        "runc": one("1.3.0"),
        "dcgm": one("4.3.0"),
        "nic_firmware": one("28.39.1002", "mlx5_0", "MT4129"),
        "kernel": one("6.8.0-60"),
    }


def test_missing_components_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    trees.node(tmp_path)
    found = versions.read(tmp_path)
    assert all(isinstance(component, str) for component in found.values())
    assert found["runc"] == "runc is not in PATH"
    assert found["nic_firmware"] == "no RDMA device"
    assert "5.15.0-105-generic" in str(found["kernel"])  # the os-release of trees has no ID
    assert "nvidia/version" in str(found["driver"])


@pytest.mark.parametrize(
    "release", ["6.8.0-1024-nvidia", "5.14.0-503.11.1.el9_5.x86_64", "6.18.44-fc-v669", "6.8.0-124-generic-64k"]
)
def test_other_kernels_have_no_known_minimum(root: Path, release: str) -> None:
    trees.write(root, {"etc/os-release": "ID=ubuntu\n", "proc/sys/kernel/osrelease": f"{release}\n"})
    assert release in str(versions.read(root)["kernel"])


@pytest.mark.parametrize(
    ("script", "reason", "timeout_s"),
    [
        ("echo hello", "hello", 60),
        ("echo 'cannot open' >&2; exit 3", "exit code 3", 60),
        ("exec sleep 600", "no answer", 0.5),
    ],
)
def test_a_program_that_fails(
    root: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str, timeout_s: float
) -> None:
    monkeypatch.setattr(versions, "_TIMEOUT_S", timeout_s)
    install(root / "bin", "runc", script)
    assert reason in str(versions.read(root)["runc"])
