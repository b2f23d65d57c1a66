"""The job scripts of a site's folder on a real Slurm cluster; docs/test_pages_on_rig.py runs discovery.sbatch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from seatrial.discover.slurm_output import parse_jobs
from tests.processes import Program, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

ENDED = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


def test_scripts_are_valid_and_a_training_completes(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make_cluster(2, gpus_per_node=2)
    folder = tmp_path / "our site's folder"
    code, out, err = Program("init", folder, env=cluster.env).finish()
    assert code == 0, err
    assert "nodes: 2 (nodes of partition " in out
    assert "gpus_per_node: 2 (Gres of " in out
    scripts = sorted((folder / "jobs").iterdir())
    assert len(scripts) == 9
    for script in scripts:
        tested = cluster.run(["sbatch", "--test-only", str(script)])
        assert tested.returncode == 0, f"{script}: {tested.stderr}"
        assert "to start at" in tested.stderr

    folder = tmp_path / "without GPUs"
    assert Program("init", folder, "--gpus-per-node", "0", env=cluster.env).finish()[0] == 0
    few_steps = ["--set", "max_steps=3", "--set", "untimed_steps=1"]
    single = submit(cluster, folder / "jobs" / "train_1gpu.sbatch", "tiny/throughput", *few_steps)
    assert end(cluster, single) == "COMPLETED", (folder / "logs" / f"train_1gpu-{single}.out").read_text()
    metrics = folder / "runs" / f"train_1gpu-{single}" / "metrics.json"
    assert metrics.is_file()
    several = submit(cluster, folder / "jobs" / "ddp_2nodes.sbatch", "tiny/throughput", *few_steps)
    log = folder / "logs" / f"ddp_2nodes-{several}.out"
    assert end(cluster, several) == "COMPLETED", log.read_text()
    assert "2 nodes with 2 ranks" in log.read_text()
    assert (folder / "runs" / f"ddp_2nodes-{several}" / "metrics.json").is_file()
    code, out, err = Program("watch", several, "--json", env=cluster.env).finish()
    assert code == 0, err
    watched = json.loads(out)
    assert (watched["state"], watched["ended"], watched["log"]) == ("COMPLETED", True, str(log))
    assert (watched["training"]["step"], watched["training"]["max_steps"]) == (3, 3)


def submit(cluster: Cluster, script: Path, *arguments: str, flags: Sequence[str] = ()) -> str:
    done = cluster.run(["sbatch", "--parsable", *flags, str(script), *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def end(cluster: Cluster, job_id: str) -> str:
    """Wait for the end of the job and return its state."""

    def state() -> str | None:
        (job,) = parse_jobs(cluster.run(["scontrol", "show", "job", job_id]).stdout)
        return job.state if job.state in ENDED else None

    return str(until(state))
