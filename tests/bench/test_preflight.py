"""The preflight on real Pythons: this one, one without packages, and packages that fake a fault."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from seatrial import __version__
from seatrial.bench.preflight import container_evidence
from seatrial.model import Preflight
from tests.paths import ROOT

NOTHING = Preflight(version=__version__, torch=False, gpus=0, hf_cache=False)


def preflight(
    folder: Path,
    required: Preflight | None = NOTHING,
    *more: str,
    python: Path | str = sys.executable,
    attempt: str = "1",
    **env: str,
) -> tuple[int, str, dict[str, Any]]:
    """Run the preflight of a job; return exit code, output and its report."""
    document = {"preflight": required.model_dump() if required else None}
    (folder / "job.json").write_text(json.dumps(document))
    argv = [python, "-m", "seatrial.bench.preflight", folder / "job.json", attempt, *more]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "SLURMD_NODENAME": "node7", **env}
    done = subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    report = folder / f"attempt{attempt}" / "preflight" / "node7.json"
    return done.returncode, done.stdout + done.stderr, json.loads(report.read_text()) if report.exists() else {}


def package(folder: Path, name: str, text: str) -> str:
    """Make a package that is imported instead of the installed one; return its PYTHONPATH."""
    (folder / "packages" / name).mkdir(parents=True)
    (folder / "packages" / name / "__init__.py").write_text(text)
    return str(folder / "packages")


def test_a_node_that_has_everything(tmp_path: Path) -> None:
    code, output, report = preflight(tmp_path, NOTHING, "-m", "json.tool", "--help")
    assert (code, report["problems"], report["seatrial"]) == (0, [], __version__)
    assert (report["executable"], report["prefix"]) == (sys.executable, sys.prefix)
    assert "json.tool" in output, "the next program has run"


def test_a_job_without_requirements_is_only_recorded(tmp_path: Path) -> None:
    code, _, report = preflight(tmp_path, None)
    assert (code, report["problems"]) == (0, [])


def test_venv_without_packages(tmp_path: Path) -> None:
    """seatrial is found by PYTHONPATH, as in a checkout: its dependencies and torch are not."""
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    required = NOTHING.model_copy(update={"torch": True})
    code, output, report = preflight(tmp_path, required, python=python, PYTHONPATH=str(ROOT / "src"))
    assert code == 1
    assert f"preflight: node7: {python} cannot import torch: ModuleNotFoundError" in output
    assert f"Run first, on this node: {python} -m pip" in output
    assert report["prefix"] == str(tmp_path / "bare")


def test_package_that_seatrial_needs_is_missing(tmp_path: Path) -> None:
    metadata = tmp_path / "packages" / "seatrial-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: seatrial\nVersion: 0.1.0\nRequires-Dist: pydantic>=2\n")
    venv.create(tmp_path / "bare", with_pip=False)
    path = f"{ROOT / 'src'}:{tmp_path / 'packages'}"
    code, output, _ = preflight(tmp_path, python=tmp_path / "bare" / "bin" / "python", PYTHONPATH=path)
    assert (code, "lacks pydantic" in output) == (1, True)


def test_another_version_of_seatrial(tmp_path: Path) -> None:
    code, output, report = preflight(tmp_path, NOTHING.model_copy(update={"version": "9.9"}))
    assert (code, f"seatrial {__version__}, expected 9.9" in output) == (1, True)
    assert len(report["problems"]) == 1


FAKE_TORCH = """
import sys, types
__version__ = "2.99"
version = types.SimpleNamespace(cuda={cuda!r})
def init():
    if {error!r}: raise RuntimeError({error!r})
nccl = types.SimpleNamespace(version=lambda: (2, 29, 1))
cuda = types.SimpleNamespace(init=init, device_count=lambda: {gpus}, nccl=nccl)
distributed = sys.modules["torch.distributed"] = types.SimpleNamespace(is_nccl_available=lambda: {nccl})
"""


@pytest.mark.parametrize(
    ("torch", "named"),
    [
        (
            {"error": "The NVIDIA driver is too old\nsecond line"},
            "cannot use CUDA, 4 GPUs per node expected: The NVIDIA",
        ),
        ({"cuda": None}, "without CUDA, 4 GPUs per node expected"),
        ({"gpus": 3}, "torch can use 3 GPUs (CUDA_VISIBLE_DEVICES=0,1,2), 4 GPUs per node expected"),
        ({"nccl": False}, "without NCCL, 4 GPUs per node expected"),
        ({}, ""),
    ],
)
def test_torch_with_cuda(torch: dict[str, object], named: str, tmp_path: Path) -> None:
    path = package(
        tmp_path, "torch", FAKE_TORCH.format(**{"cuda": "13.0", "error": "", "gpus": 4, "nccl": True, **torch})
    )
    required = NOTHING.model_copy(update={"torch": True, "gpus": 4})
    code, output, report = preflight(tmp_path, required, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="0,1,2")
    assert (code, named in output) == (1 if named else 0, True), output
    assert named or (report["gpus"], report["nccl"]) == (4, "2.29.1")


def test_hf_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    required = NOTHING.model_copy(update={"hf_cache": True})
    code, output, _ = preflight(tmp_path, required, HF_HOME=f"{tmp_path}/file/hf")
    assert (code, f"HF_HOME {tmp_path}/file/hf" in output) == (1, True)
    assert preflight(tmp_path, required, HF_HOME=f"{tmp_path}/new/hf")[0] == 0
    assert not (tmp_path / "new").exists(), "it leaves nothing"
    assert preflight(tmp_path, required)[0] == 0, "not set"
    assert preflight(tmp_path, NOTHING, HF_HOME=f"{tmp_path}/file/hf")[0] == 0, "no check trains"


def test_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "attempt1").touch()
    code, output, _ = preflight(tmp_path)
    assert (code, "run directory is not readable and writable" in output) == (1, True)


def test_run_directory_that_the_node_does_not_see(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "seatrial.bench.preflight", str(tmp_path / "absent" / "job.json"), "1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, f"{tmp_path}/absent/job.json" in done.stderr) == (1, True)


def test_evidence_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    before = container_evidence()
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/torch.sif")
    monkeypatch.setenv("SEATRIAL_HOST_NAMESPACE", "mnt:[1]")
    new = [item for item in container_evidence() if item not in before]
    assert new[0] == "APPTAINER_CONTAINER=/images/torch.sif"
    assert "mnt:[1]" in new[1]
