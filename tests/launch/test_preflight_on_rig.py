"""Preflight errors on a real cluster: the failed subject is the node, the cause is the missing requirement."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.model import JobState
from tests.launch.test_slurm_on_rig import nothing_is_left
from tests.processes import Program, load
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

SITE = """
slurm: {{queue_s: 90}}
environment: {environment}
container: {container}
checks:
  host.inventory:
"""


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


def failed_subject_and_cause(
    cluster: Cluster, folder: Path, environment: str = "{}", container: str = "{}"
) -> tuple[str, str]:
    """Run a trial that ends INCOMPLETE and leaves no job; return the failed subject and the cause."""
    (folder / "site.yaml").write_text(SITE.format(environment=environment, container=container))
    out = folder / "run"
    options = ("--launcher", "slurm", "--nodes", "2", "--out", out)
    code, _, err = Program("run", folder / "site.yaml", *options, env=cluster.env).finish()
    assert code == 3, err
    assert nothing_is_left(cluster)
    record = load(out)
    (result,) = record.results
    assert (result.state, record.measurements) == (JobState.REFUSED, ())
    assert record.decision.reason.startswith(f"preflight failed on {result.failed_subject}: {result.cause}")
    assert [finding.subject for finding in record.findings] == [result.failed_subject]
    return result.failed_subject, result.cause


def venv(folder: Path) -> Path:
    """Make a virtual environment with the Python and packages of this process."""
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "activate").write_text(f"PATH={folder}/venv/bin:$PATH\n")
    (folder / "venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "venv" / "bin" / "python").chmod(0o755)
    return folder / "venv"


def test_venv_missing_on_one_node(cluster: Cluster, tmp_path: Path) -> None:
    path = venv(tmp_path)
    cluster.private_dir(path, "node0")
    subject, cause = failed_subject_and_cause(cluster, tmp_path, environment=f"{{venv: {path}}}")
    assert subject == "node0"
    assert f"environment.venv: {path}/bin/python" in cause
    assert f"Run first: srun --nodelist=node0 ls -l {path}/bin/python" in cause


def test_seatrial_not_importable_on_one_node(cluster: Cluster, tmp_path: Path) -> None:
    path = venv(tmp_path)
    (path / "bin" / "python").write_text(
        f'#!/bin/sh\n[ "$(hostname)" = node0 ] || set -- -S "$@"\nexec {sys.executable} "$@"\n'
    )
    subject, cause = failed_subject_and_cause(cluster, tmp_path, environment=f"{{venv: {path}}}")
    assert (subject, f"cannot run seatrial with {path}/bin/python" in cause) == ("node1", True)


def test_environment_missing_on_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    subject, cause = failed_subject_and_cause(
        cluster, tmp_path, environment="{source: /nowhere/env.sh, modules: [cuda/99]}"
    )
    assert subject == "node0, node1"
    assert "environment.source /nowhere/env.sh" in cause
    assert "environment.modules: cannot load cuda/99" in cause


def test_runtime_missing_on_one_node_and_image_on_the_other(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "torch.sif").touch()
    cluster.private_dir(tmp_path / "bin", "node0")
    cluster.private_dir(tmp_path / "images", "node1")
    monkeypatch.setitem(cluster.env, "PATH", f"{tmp_path / 'bin'}:{cluster.env['PATH']}")
    image = tmp_path / "images" / "torch.sif"
    subject, cause = failed_subject_and_cause(cluster, tmp_path, container=f"{{runtime: apptainer, image: {image}}}")
    assert subject == "node0, node1"
    of_node0, of_node1 = cause.split("node1: ")
    assert "container.runtime: apptainer is not installed" in of_node0
    assert "does not exist" not in of_node0
    assert f"container.image {image} does not exist" in of_node1
    assert "not installed" not in of_node1


def test_pyxis_missing(cluster: Cluster, tmp_path: Path) -> None:
    subject, cause = failed_subject_and_cause(
        cluster, tmp_path, container="{runtime: pyxis, image: nvcr.io#nvidia/pytorch}"
    )
    assert (subject, "container.runtime: Slurm has no pyxis" in cause) == ("node0, node1", True)


def test_torch_without_cuda_where_slurm_offers_gpus(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """The nodes have GPUs by Slurm's GRES; the torch of this machine is a CPU build."""
    cluster = make_cluster(2, gpus_per_node=1)
    (tmp_path / "site.yaml").write_text("checks: {slurm.nodes: , host.inventory: , device.gemm: , train.cnn: }")
    options = ("--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "1", "--out", tmp_path / "run")
    code, _, err = Program("run", tmp_path / "site.yaml", *options, env=cluster.env).finish()
    record = load(tmp_path / "run")
    (result,) = record.results
    assert (code, result.state, record.measurements) == (3, JobState.REFUSED, ()), err
    assert result.failed_subject == "node0, node1"
    assert result.cause.count("built without CUDA, 1 GPU per node expected") == 1
    assert len(record.findings) == 1
    assert nothing_is_left(cluster)
