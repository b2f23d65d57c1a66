"""Scripts of the torchrun launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from seatrial.config.schema import Config, Container
from seatrial.launch.torchrun import TorchrunLauncher
from seatrial.model import CLUSTER, JobState
from tests import paths
from tests.launch.test_slurm import CASES as SLURM_CASES
from tests.launch.test_slurm import IMAGE, NODES
from tests.processes import call, load

GOLDEN = paths.GOLDEN / "torchrun"
CASES = {
    **{name: SLURM_CASES[name] for name in ("ranks", "nodes", "apptainer")},
    "docker": (
        NODES,
        Config(name="t", checks={}, container=Container(runtime="docker", image=IMAGE, mounts=("/mnt/data:/data:ro",))),
    ),
}


def rendered(name: str) -> str:
    job, settings = CASES[name]
    text = TorchrunLauncher(settings).render(job, Path("/shared/runs/today")).text
    return text.replace(sys.executable, "/opt/venv/bin/python")


@pytest.mark.parametrize("name", CASES)
def test_script_matches_golden_file(name: str) -> None:
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered(name))
    assert rendered(name) == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    script = tmp_path / "torchrun.sh"
    script.write_text(rendered(name))
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_node_is_a_number_below_the_number_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "torchrun.sh").write_text(rendered("nodes"))
    for node in ("", "2", "node0"):
        result = subprocess.run(["bash", tmp_path / "torchrun.sh", node], capture_output=True, text=True, check=False)
        assert (result.returncode, "usage" in result.stderr) == (2, True)


def test_missing_master_addr_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "torchrun.sh"
    script.write_text(rendered("ranks"))
    env = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    result = subprocess.run(["bash", script, "0"], env=env, capture_output=True, text=True, check=False)
    assert "MASTER_ADDR: set it to the host name or address" in result.stderr


def test_resume_reports_the_node_that_refused(tmp_path: Path) -> None:
    """A venv without seatrial; after the correction the script removes its error."""
    venv.create(tmp_path / "bare", with_pip=False)
    (tmp_path / "t.yaml").write_text("launcher: torchrun\nchecks: {host.inventory: }\n")
    options = ("--gpus-per-node", "0", "--set", f"environment.venv={tmp_path / 'bare'}", "--out", tmp_path / "run")
    assert call("render", "torchrun", tmp_path / "t.yaml", *options)[0] == 0
    script = ["bash", str(tmp_path / "run" / "jobs" / "nodes" / "torchrun.sh"), "0"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, "cannot run seatrial" in done.stderr) == (1, True)
    assert call("run", "--resume", tmp_path / "run")[0] == 3
    record = load(tmp_path / "run")
    (result,) = record.results
    assert (result.state, result.failed_subject) == (JobState.REFUSED, record.host)
    assert f"cannot run seatrial with {tmp_path}/bare/bin/python" in record.decision.reason

    (site,) = (tmp_path / "bare").glob("lib/python3*/site-packages")
    (site / "installed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{paths.ROOT / 'src'}\n")
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert call("run", "--resume", tmp_path / "run")[0] == 0


def test_run_is_one_cause_that_names_the_scripts_of_all_jobs(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("launcher: torchrun\nchecks: {host.inventory: , nodes.reachable: }\n")
    run_dir = tmp_path / "run"
    code, out, err = call("run", tmp_path / "t.yaml", "--nodes", "2", "--gpus-per-node", "0", "--out", run_dir)
    assert code == 3, err
    assert len((out + err).splitlines()) <= 20
    record = load(run_dir)
    (result,) = record.results
    (finding,) = record.findings
    assert (result.state, record.measurements, finding.subject) == (JobState.REJECTED, (), CLUSTER)
    assert {key.check for key in finding.explains} == {"host.inventory", "nodes.reachable"}
    scripts = [run_dir / "jobs" / name / "torchrun.sh" for name in ("nodes", "ranks")]
    assert finding.first_command == f"bash {scripts[0]} NODE"
    assert f"MASTER_ADDR=HOST bash {scripts[1]} NODE" in record.decision.reason
    assert all(script.stat().st_mode & 0o777 == 0o600 for script in scripts)


def test_torchrun_requires_gpus_per_node(tmp_path: Path) -> None:
    code, _, err = call("render", "torchrun", "--nodes", "2")
    assert (code, "--gpus-per-node" in err) == (2, True)


def test_out_requires_torchrun(tmp_path: Path) -> None:
    code, _, err = call("render", "local", "--out", tmp_path / "run")
    assert (code, "--out requires torchrun" in err) == (2, True)
