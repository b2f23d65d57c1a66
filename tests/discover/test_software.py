from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from seatrial.discover import software
from tests import paths
from tests.discover import trees

FIXTURES = paths.FIXTURES / "host"


def install(site: Path, name: str, version: str) -> None:
    """A distribution as installed by pip, without code."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    trees.write(folder, {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on sys.path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


@pytest.mark.parametrize(("kind", "version"), [("open", "580.159.04"), ("closed", "440.95.01")])
def test_driver_version(kind: str, version: str) -> None:
    assert software.driver_version((FIXTURES / f"nvidia-version-{kind}.txt").read_text()) == version


def test_a_driver_file_without_a_version_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected an NVRM version, read 'no driver'"):
        software.driver_version("no driver")


def test_a_cuda_installation(site: Path, tmp_path: Path) -> None:
    packages = {"torch": "2.13.0", "nvidia-nccl-cu13": "2.28.9", "nvidia_cudnn_cu13": "9.19.0.56", "requests": "2.32"}
    for name, version in packages.items():
        install(site, name, version)
    trees.write(site, {"torch/version.py": "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: None = None\n"})
    trees.write(
        tmp_path, {"usr/lib/x86_64-linux-gnu/libnccl.so.2.28.3": "", "usr/lib/x86_64-linux-gnu/libnccl.so.2": ""}
    )
    trees.write(tmp_path, {"proc/driver/nvidia/version": (FIXTURES / "nvidia-version-open.txt").read_text()})
    facts = software.read(tmp_path)
    assert (facts.torch, facts.cuda, facts.driver) == ("2.13.0", "13.0", "580.159.04")
    assert facts.nccl == {"nvidia-nccl-cu13": "2.28.9", "/usr/lib/x86_64-linux-gnu/libnccl.so.2.28.3": "2.28.3"}
    assert set(facts.packages) == {"torch", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"}


@pytest.mark.usefixtures("site")
def test_without_torch(tmp_path: Path) -> None:
    facts = software.read(tmp_path)
    assert (facts.torch, facts.cuda, facts.driver, facts.nccl) == (None, None, None, {})
    assert facts.unreadable["torch"] == f"not installed for {sys.executable}"
    assert facts.unreadable["cuda"] == facts.unreadable["torch"]
    assert "nvidia/version: No such file" in facts.unreadable["driver"]


def test_a_broken_installation_is_reported(site: Path, tmp_path: Path) -> None:
    install(site, "torch", "2.13.0")
    trees.write(site, {"torch/version.py": "\0", "numpy-2.0.dist-info/METADATA": "Name: numpy\n"})
    facts = software.read(tmp_path)
    assert "version.py" in facts.unreadable["cuda"]
    assert set(facts.packages) == {"torch"}


def test_metadata_that_is_not_utf8_is_reported(site: Path, tmp_path: Path) -> None:
    trees.write(site, {"odd-1.0.dist-info/METADATA": ""})
    (site / "odd-1.0.dist-info/METADATA").write_bytes(b"Name: \xff\xfe\n")
    facts = software.read(tmp_path)
    assert "packages" in facts.unreadable
    assert facts.packages == {}


def test_container_runtimes_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mode in {
        "usr/bin/podman": 0o755,
        "opt/bin/enroot": 0o755,
        "usr/bin/docker": 0o644,
        "sbin/ctr": 0o755,
    }.items():
        trees.write(tmp_path, {name: ""})
        (tmp_path / name).chmod(mode)
    monkeypatch.setenv("PATH", "/usr/bin:/opt/bin")
    assert software.read(tmp_path).runtimes == {"podman": "/usr/bin/podman", "enroot": "/opt/bin/enroot"}


def test_the_versions_of_this_interpreter_without_importing_torch() -> None:
    program = """
import sys
from seatrial.discover import software
facts = software.read()
assert not {"torch", "numpy"} & set(sys.modules)
print(facts.torch, facts.packages["torch"])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == [metadata.version("torch")] * 2
