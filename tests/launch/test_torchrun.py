"""By hand: the scripts that a person starts on each node, and what the run directory makes of them afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seatrial.config.schema import Config, Container
from seatrial.launch.torchrun import TorchrunLauncher
from seatrial.model import Outcome, Verb
from tests import paths
from tests.launch.test_slurm import CASES
from tests.processes import call, load, run
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]

GOLDEN = paths.GOLDEN / "torchrun"
NAMES = ("ranks", "nodes", "apptainer")
TRIAL = """
checks:
  host.inventory:
  collectives.all_reduce: {options: {sizes: [1MiB], seconds_per_size: 0.2}}
"""


def rendered(name: str) -> str:
    job, settings = CASES[name]
    text = TorchrunLauncher(settings).render(job, Path("/shared/runs/today")).text
    return text.replace(sys.executable, "/opt/venv/bin/python")


@pytest.mark.parametrize("name", NAMES)
def test_the_script_is_the_one_that_was_read_and_approved(name: str) -> None:
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered(name))
    assert rendered(name) == golden.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    script = tmp_path / "torchrun.sh"
    script.write_text(rendered(name))
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_pyxis_needs_slurm() -> None:
    settings = Config(name="t", checks={}, container=Container(runtime="pyxis", image="i"))
    assert "Slurm" in (TorchrunLauncher(settings).available(2) or "")


def prepared(folder: Path) -> Path:
    """A run directory for two nodes of two processes, as ``render torchrun --out`` makes it."""
    (folder / "two.yaml").write_text(TRIAL)
    words = ("--nodes", "2", "--gpus-per-node", "0", "--out", folder / "run")
    code, out, err = call("render", "torchrun", folder / "two.yaml", *words)
    assert code == 0, err
    scripts = [(folder / "run" / "jobs" / name / "torchrun.sh").read_text() for name in ("nodes", "ranks")]
    assert out == "".join(f"{text}\n" for text in scripts)
    return folder / "run"


def by_hand(cluster: Cluster, run_dir: Path, job: str) -> None:
    """What a person does: the script on each node, with its number, at the same time."""
    command = ["env", "MASTER_ADDR=node0", "bash", str(run_dir / "jobs" / job / "torchrun.sh")]
    with ThreadPoolExecutor() as pool:
        ended = pool.map(lambda node: cluster.on(node, [*command, node.removeprefix("node")], 120), cluster.nodes)
    for done in ended:
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_was_started_by_hand_is_collected_by_resume(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """What nobody has started is an ERROR that says how to, and can be made up for."""
    two, run_dir = make_cluster(2), prepared(tmp_path)
    by_hand(two, run_dir, "nodes")
    assert run("run", "--resume", run_dir)[0] == 3
    errors = {one.check: one.reason for one in load(run_dir).verdicts if one.outcome is Outcome.ERROR}
    assert set(errors) == {"collectives.all_reduce"}
    assert f"Run first, on each node: bash {run_dir}/jobs/ranks/torchrun.sh NODE" in errors["collectives.all_reduce"]
    by_hand(two, run_dir, "ranks")
    code, out, err = run("run", "--resume", run_dir)
    assert code == 0, err
    record = load(run_dir)
    assert record.decision.value is Verb.ACCEPTED
    ranks = {one.subject for one in record.measurements if one.check == "collectives.all_reduce"}
    assert ranks == {"node0/rank0", "node0/rank1", "node1/rank2", "node1/rank3"}
    assert {one.subject for one in record.measurements if one.check == "host.inventory"} == {"node0", "node1"}
    assert "2 nodes × 2 processes · torchrun" in out


def test_without_the_first_nodes_address_it_says_what_to_set(tmp_path: Path) -> None:
    script = tmp_path / "torchrun.sh"
    script.write_text(rendered("ranks"))
    env = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    done = subprocess.run(["bash", script, "0"], env=env, capture_output=True, text=True, check=False)
    assert "MASTER_ADDR: set it to the name or address" in done.stderr


def test_how_many_gpus_a_node_has_must_be_said(tmp_path: Path) -> None:
    code, _, err = call("render", "torchrun", "--nodes", "2")
    assert (code, "--gpus-per-node" in err) == (2, True)


def test_out_is_for_torchrun_only(tmp_path: Path) -> None:
    code, _, err = call("render", "local", "--out", tmp_path / "run")
    assert (code, "torchrun only" in err) == (2, True)
