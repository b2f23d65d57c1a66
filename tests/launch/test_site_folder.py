"""The files of a site's folder: golden files, bash, shellcheck, and the trials among them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.config.layers import ResolvedTrial, resolve
from seatrial.launch.site_folder import Site, SiteValue, render
from seatrial.operate import site as site_pipeline
from tests import paths

NOT_READ = SiteValue(None, "Slurm could not be read")
COMPLETE = Site(
    folder='/shared/it\'s "our" site',
    venv=SiteValue("/shared/my venv", "--venv"),
    partition=SiteValue("gpu", "Slurm's default partition"),
    account=SiteValue("ops", "--account"),
    nodes=SiteValue(4, "nodes of partition gpu in Slurm"),
    gpus_per_node=SiteValue(8, "Gres of the nodes of partition gpu"),
    max_minutes=SiteValue(45, "MaxTime of partition gpu"),
)
SITES = {
    "complete": COMPLETE,
    "without-slurm": COMPLETE._replace(
        folder="/shared/site",
        venv=SiteValue(None, "seatrial does not run in a virtual environment"),
        partition=NOT_READ,
        account=NOT_READ,
        nodes=NOT_READ,
        gpus_per_node=NOT_READ,
        max_minutes=NOT_READ,
        slurm_error="no slurm.conf. Run first: ls -l /etc/slurm",
    ),
    "cpu-only": COMPLETE._replace(
        folder="/shared/site", nodes=SiteValue(1, "--nodes"), gpus_per_node=SiteValue(0, "--gpus-per-node")
    ),
}
SCHEMAS = catalog()


def resolved(path: str | Path) -> ResolvedTrial:
    return resolve(str(path), environ={}, schemas=SCHEMAS)


@pytest.mark.parametrize("name", SITES)
def test_files_match_golden_files(name: str) -> None:
    files = render(SITES[name])
    # without the checks, which are those of acceptance.yaml
    files["site.yaml"] = files["site.yaml"].partition("\nchecks:\n")[0] + "\n"
    text = "".join(f"===== {path}\n{content}" for path, content in sorted(files.items()))
    golden = paths.GOLDEN / "site" / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", SITES)
def test_scripts_pass_bash_and_shellcheck(name: str, tmp_path: Path) -> None:
    site_pipeline.write(tmp_path / "site", render(SITES[name]))
    scripts = [*(tmp_path / "site" / "jobs").iterdir(), *(tmp_path / "site").glob("*.sh")]
    for command in (["bash", "-n"], [Path(sys.executable).parent / "shellcheck"]):
        done = subprocess.run([*command, *scripts], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SITES)
def test_trials_are_valid_and_accept_what_acceptance_accepts(name: str, tmp_path: Path) -> None:
    site_pipeline.write(tmp_path / "site", render(SITES[name]))
    trial = resolved(tmp_path / "site" / "site.yaml")
    acceptance = resolved("acceptance").config.checks
    assert trial.config.checks == acceptance
    assert trial.config.launcher == "slurm"
    assert trial.config.environment.source == f"{SITES[name].folder}/env.sh"
    set_here = {key: trial.origins[key] != "default" for key in ("cluster.nodes", "slurm.partition")}
    assert set(set_here.values()) == {name != "without-slurm"}
    if name == "complete":
        config = trial.config
        assert (config.cluster.nodes, config.cluster.gpus_per_node) == (4, 8)
        assert (config.slurm.partition, config.slurm.account) == ("gpu", "ops")
        assert config.environment.venv == "/shared/my venv"
    (oumi,) = resolved(tmp_path / "site" / "oumi.yaml").config.checks.values()
    command = oumi.options["command"]
    assert isinstance(command, list)
    assert command[-2:] == [f"{SITES[name].folder}/oumi.sif", "oumi"]
    assert ("--nv" in command) == (name != "cpu-only")


def test_bash_reads_hostile_paths_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "our" $(touch pwned) `touch pwned` site'
    site_pipeline.write(folder, render(COMPLETE._replace(folder=str(folder), venv=NOT_READ)))
    code = f'source {shlex.quote(str(folder / "env.sh"))}; printf \'%s|\' "$REPO_ROOT" "$RUNS_ROOT" "$HF_HOME"'
    done = subprocess.run(["bash", "-euc", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("|")[:3] == [str(folder), f"{folder}/runs", f"{folder}/huggingface"]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("name", ["fsdp_2nodes", "preprocess"])
def test_an_option_instead_of_the_config_ends_the_job_with_the_command_to_submit(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    site_pipeline.write(folder, render(COMPLETE._replace(folder=str(folder), venv=NOT_READ)))
    script = f"jobs/{name}.sbatch"
    argv = ["bash", str(folder / script), "--set", "max_steps=4"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    config = "fsdp-mistral-7b" if name == "fsdp_2nodes" else "function-calling-qwen2-7b"
    assert (done.returncode, done.stdout) == (2, "")
    assert f"sbatch {script} {config} --set max_steps=4" in done.stderr


def test_git_ignores_results_and_caches_and_nothing_else(tmp_path: Path) -> None:
    files = render(COMPLETE)
    site_pipeline.write(tmp_path / "site", files)
    for name in ("huggingface", "logs", "runs", "tokens"):
        (tmp_path / "site" / name / "file").touch()
    git = ["git", "-C", str(tmp_path / "site")]
    subprocess.run([*git, "init", "--quiet"], check=True)
    listed = [*git, "ls-files", "--others", "--exclude-standard"]
    assert set(subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()) == set(files)


def test_configs_of_the_workloads_exist() -> None:
    for site in (COMPLETE, SITES["cpu-only"]):
        for text in render(site).values():
            for line in text.splitlines():
                if line.startswith("config=${1:-"):
                    name = line.removeprefix("config=${1:-").removesuffix("}")
                    assert (paths.ROOT / "configs" / f"{name}.yaml").is_file()
