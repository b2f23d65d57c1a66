"""Rendered sbatch scripts, tested by golden files and shellcheck."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest

from seatrial.config.schema import Cluster, Config, Container, Environment, Slurm
from seatrial.discover.slurm import ControllerDown, NotConfigured, SlurmUnavailable
from seatrial.launch import node_prefix, select_launcher, trial_launcher
from seatrial.launch.slurm import SlurmLauncher, require_client
from seatrial.launch.torchrun import TorchrunLauncher
from seatrial.model import Job, Preflight, UsageError
from tests import paths

GOLDEN = paths.GOLDEN / "slurm"
RANKS = Job(
    name="ranks",
    placement="ranks",
    device="cuda",
    nodes=2,
    ranks_per_node=8,
    checks=("nodes.reachable", "train.ddp"),
    options={},
    expected_gpus=8,
    limits={"nodes.reachable": 120, "train.ddp": 900},
    limit_s=1200,
    typical={"nodes.reachable": 0.2, "train.ddp": 150},
    env={"NCCL_DEBUG": "INFO", "NOTE": 'it\'s "quoted" $HOME'},
    preflight=Preflight(version="0.1.0", torch=True, gpus=8, hf_cache=True),
)
NODES = RANKS.model_copy(update={"name": "nodes", "placement": "nodes", "ranks_per_node": 1, "env": {}})
CPU_ONLY = RANKS.model_copy(update={"device": "cpu", "expected_gpus": None, "ranks_per_node": 2, "env": {}})
FULL = Slurm(
    partition="gpu",
    account="ops",
    qos="high",
    reservation="acceptance",
    constraint="h100&ib",
    nodelist="worker[0-1]",
    exclude="worker9",
    gres="gpu:h100:8",
    cpus_per_task=64,
    time_min=30,
    extra=("--comment=skip_checks",),
    interface="bond0",
)
SITE = Environment(source="/shared/my env.sh", modules=("cuda/13.0", "nccl"), venv="/shared/venv", hf_home="/shared/hf")
IMAGE = "nvcr.io#nvidia/pytorch:25.12-py3"
CASES = {
    "ranks": (RANKS, Config(name="t", checks={}, environment=SITE)),
    "nodes": (NODES, Config(name="t", checks={})),
    "cpu-only": (CPU_ONLY, Config(name="t", checks={}, slurm=Slurm(mem=None, exclusive=False))),
    "every-option": (
        RANKS.model_copy(update={"preflight": None}),
        Config(name="t", checks={}, slurm=FULL, cluster=Cluster(nodes=2)),
    ),
    "nodelist": (
        NODES.model_copy(update={"nodes": 5}),
        Config(name="t", checks={}, slurm=Slurm(nodelist="n[1-4,7]", exclude="n[5-6]"), cluster=Cluster(nodes=5)),
    ),
    "apptainer": (
        RANKS,
        Config(
            name="t",
            checks={},
            container=Container(runtime="apptainer", image="/shared/oumi latest.sif", mounts=("/mnt/data:/data:ro",)),
        ),
    ),
    "pyxis": (
        RANKS,
        Config(name="t", checks={}, container=Container(runtime="pyxis", image=IMAGE, mounts=("/mnt/data:/data",))),
    ),
}


def rendered(name: str) -> str:
    job, settings = CASES[name]
    text = SlurmLauncher(settings).render(job, Path("/shared/runs/today"), attempt=1).text
    return text.replace(sys.executable, "/opt/venv/bin/python")


@pytest.mark.parametrize("name", CASES)
def test_script_matches_golden_file(name: str) -> None:
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(rendered(name))
    assert rendered(name) == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(rendered(name))
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_values_are_quoted_for_the_shell(tmp_path: Path) -> None:
    """A real shell reads the exported values unchanged."""
    hostile = {"A": "$(touch pwned)", "B": "`touch pwned`; touch pwned", "C": 'it\'s "both"', "D": "a\nb"}
    text = SlurmLauncher(Config(name="t", checks={})).render(RANKS.model_copy(update={"env": hostile}), tmp_path).text
    start = text.index("export A=")
    exports = text[start : text.index("# Rendezvous")]
    code = exports + '\nprintf \'%s|\' "$A" "$B" "$C" "$D"'
    out = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert out.split("|")[:4] == list(hostile.values())
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("slurm", "gpus", "prefix"),
    [
        (Slurm(), None, "srun --nodelist={node}"),
        (
            Slurm(partition="gpu", account="ops", nodelist="n[1-3]", exclude="n4"),
            8,
            "srun --nodelist={node} --partition=gpu --account=ops --gpus-per-node=8",
        ),
    ],
)
def test_a_command_for_a_node_runs_in_the_trials_partition(slurm: Slurm, gpus: int | None, prefix: str) -> None:
    settings = Config(name="t", checks={}, launcher="slurm", slurm=slurm, cluster=Cluster(gpus_per_node=gpus))
    assert node_prefix(settings) == prefix


VALID = {
    "prints": "echo hello; echo trouble >&2; printf whole",
    "reads an unset variable": "echo $NOT_SET; true",
    "sets strict mode and changes the directory": "set -euo pipefail; cd /",
    "sets variables with names of the script": "export RUN_DIR=/x JOB_DIR=/x ATTEMPT_DIR=/x TOKEN=x node=x output=x",
}
BROKEN = {
    "fails": "false",
    "ends the shell": "exit 0",
    "ends the shell with an error": "exit 3",
    "fails on an unset variable": "set -u; echo $NOT_SET",
}


@pytest.mark.parametrize("launcher", [SlurmLauncher, TorchrunLauncher])
def test_umask_of_a_group(launcher: type[SlurmLauncher | TorchrunLauncher]) -> None:
    script = launcher(Config(name="t", checks={}, group="team")).render(NODES, Path("/runs/today")).text
    assert set(re.findall(r"umask[ =](\d+)", script, re.IGNORECASE)) == {"027"}


@pytest.mark.parametrize("text", [*VALID.values(), *BROKEN.values()], ids=[*VALID, *BROKEN])
def test_preflight_checks_the_environment_file(text: str, tmp_path: Path) -> None:
    source = tmp_path / "it's our env.sh"
    source.write_text(f"export FOUND=yes; {text}\n")
    settings = Config(name="t", checks={}, environment=Environment(source=str(source)))
    script = SlurmLauncher(settings).render(NODES, tmp_path).text
    preflight = script[script.index("report_error() {") : script.index("functions=")]
    environment = script[script.index("job_cwd=$PWD") : script.index("python=(")]
    begin = f"set -euo pipefail; export SLURMD_NODENAME=n0 SEATRIAL_RUN_DIR={tmp_path} SEATRIAL_TOKEN=\n"
    preflight_result = _bash(
        f'{begin}{preflight}\nbash -c "$(declare -f report_error shares_run_dir preflight); preflight"', tmp_path
    )
    assert ("environment.source" in preflight_result.stdout) == (text in BROKEN.values())
    if text in VALID.values():
        result = _bash(f'{begin}{environment}\necho "$SEATRIAL_RUN_DIR $PWD ${{FOUND-}}"', tmp_path)
        assert result.stdout.splitlines()[-1].endswith(f"{tmp_path} {tmp_path} yes")


def _bash(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_header_values_with_spaces_and_quotes(tmp_path: Path) -> None:
    hostile = Slurm(partition='it\'s $(a) "b" #c', constraint="a&b|c")
    text = SlurmLauncher(Config(name="t", checks={}, slurm=hostile)).render(NODES, tmp_path).text
    header = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    arguments = [argument for line in header for argument in shlex.split(line)]
    assert '--partition=it\'s $(a) "b" #c' in arguments
    assert "--constraint=a&b|c" in arguments
    assert len(arguments) == len(header)


@pytest.mark.parametrize(("error", "refused"), [(SlurmUnavailable, True), (ControllerDown, False)])
def test_a_host_without_slurm_conf_is_refused_and_a_controller_that_is_down_is_not(
    error: type[SlurmUnavailable], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error("this machine has no slurm.conf for the cluster")

    monkeypatch.setattr("seatrial.discover.slurm.ping", fail)
    with pytest.raises(UsageError, match="no slurm") if refused else nullcontext():
        require_client()


def test_sbatch_is_required_to_start_a_job_and_not_to_render_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = Config(name="t", checks={}, launcher="slurm")
    assert "#SBATCH" in select_launcher(settings, "nodes").render(NODES, tmp_path).text
    with pytest.raises(UsageError, match="sbatch is not in PATH"):
        trial_launcher(settings).require_access()


@pytest.mark.parametrize(("launcher", "names_the_choice"), [("auto", True), ("slurm", False)])
def test_a_host_without_slurm_conf_names_the_launcher_that_auto_chose(
    launcher: Literal["auto", "slurm"], names_the_choice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise NotConfigured("this machine has no slurm.conf")

    monkeypatch.setattr("seatrial.discover.slurm.ping", fail)
    config = Config(name="t", checks={}, launcher=launcher, cluster=Cluster(nodes=2))
    with pytest.raises(UsageError, match=r"no slurm\.conf") as caught:
        trial_launcher(config).require_access()
    assert ("--nodes 2 needs a launcher" in str(caught.value)) is names_the_choice
