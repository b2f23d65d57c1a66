"""Scripts of the local launcher, and jobs in the environment or container that the trial asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.config.schema import Cluster, Config, Container, Environment
from seatrial.launch import select_launcher
from seatrial.launch.local import LocalLauncher
from seatrial.model import Job, Preflight, UsageError
from tests import paths

GOLDEN = paths.GOLDEN / "local"
RANKS = Job(
    name="ranks",
    placement="ranks",
    device="cuda",
    nodes=1,
    ranks_per_node=4,
    checks=("train.ddp",),
    options={},
    expected_gpus=4,
    limits={"train.ddp": 420},
    limit_s=600,
    env={"NCCL_DEBUG": "INFO WARN"},
    preflight=Preflight(version="0.1.0", torch=True, gpus=4, hf_cache=True),
)
NODES = RANKS.model_copy(update={"name": "nodes", "placement": "nodes", "ranks_per_node": 1, "env": {}})
CPU_ONLY = RANKS.model_copy(update={"device": "cpu", "env": {}, "preflight": None})
SITE = Environment(source="/opt/my env.sh", modules=("cuda/13.0",), venv="/opt/venv", hf_home="/data/hf")
MOUNTS = ("/mnt/data:/data:ro",)


def config(**fields: object) -> Config:
    return Config.model_validate({"name": "t", "checks": {}, **fields})


CASES = {
    "ranks": (RANKS, config()),
    "cpu-only": (CPU_ONLY, config()),
    "environment": (NODES, config(environment=SITE)),
    **{
        runtime: (
            job,
            config(container=Container(runtime=runtime, image=image, mounts=MOUNTS)),
        )
        for runtime, image, job in (
            ("apptainer", "/data/my torch.sif", RANKS),
            ("docker", "nvcr.io/nvidia/pytorch:25.12-py3", RANKS),
            ("podman", "nvcr.io/nvidia/pytorch:25.12-py3", NODES),
        )
    },
}


def rendered(name: str) -> str:
    job, settings = CASES[name]
    return LocalLauncher(settings).render(job, Path("/runs/today")).text.replace(sys.executable, "/opt/python")


@pytest.mark.parametrize("name", CASES)
def test_script_matches_golden_file(name: str) -> None:
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered(name))
    assert rendered(name) == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(rendered(name))
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_gloo_uses_loopback_by_default() -> None:
    def exported(job: Job, **env: str) -> bool:
        text = LocalLauncher(config()).render(job.model_copy(update={"env": env}), Path("RUN")).text
        return "export GLOO_SOCKET_IFNAME=lo\n" in text

    assert exported(CPU_ONLY)
    assert not exported(CPU_ONLY, GLOO_SOCKET_IFNAME="eth7")
    assert not exported(RANKS)


def test_local_launcher_refuses_several_nodes() -> None:
    settings = config()
    assert select_launcher(settings, "ranks").name == "local"
    several = settings.model_copy(update={"launcher": "local", "cluster": Cluster(nodes=2)})
    assert select_launcher(several, "control").name == "local"
    with pytest.raises(UsageError, match=r"cluster\.nodes is 2"):
        select_launcher(several, "ranks")


def test_control_jobs_run_in_the_environment_of_this_command() -> None:
    container = Container(runtime="pyxis", image="i")
    settings = config(launcher="slurm", container=container, environment=SITE)
    control = NODES.model_copy(update={"name": "control", "placement": "control", "device": "cpu", "preflight": None})
    text = select_launcher(settings, "control").render(control, Path("RUN")).text
    assert f"python=({sys.executable})" in text
    assert "/opt" not in text.replace(sys.executable, "")
