"""A training whose nodes are killed: Slurm starts the job again on other nodes, and it ends with the same losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.discover.slurm_facts import JobRecord
from seatrial.discover.slurm_output import parse_jobs
from seatrial.util.hostlist import expand
from tests.launch.test_site_on_rig import end, submit
from tests.processes import Program, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

SLURM = "SlurmdTimeout=10"  # Slurm requeues the job when it sets the lost node DOWN
OPTIONS = ("max_steps=60", "untimed_steps=1", "profile_steps=0", "deterministic=true", "checkpoint.every=10")


def test_a_job_that_loses_two_nodes_resumes_with_the_same_losses(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster, folder = make_cluster(4, extra=SLURM), tmp_path / "site"
    code, _, err = Program("init", folder, "--gpus-per-node", "0", env=cluster.env).finish()
    assert code == 0, err
    script = folder / "jobs" / "fsdp_2nodes.sbatch"
    arguments = ["tiny/fsdp-mistral-7b", *(word for option in OPTIONS for word in ("--set", option))]
    job = submit(cluster, script, *arguments, "--set", "checkpoint.requeue=true", flags=["--requeue"])
    steps = folder / "runs" / f"fsdp_2nodes-{job}" / "steps.jsonl"
    undisturbed = submit(cluster, script, *arguments)
    lost = []
    for position, completed in ((-1, 15), (0, 35)):  # the first node runs the job script
        until(lambda: steps.exists() and len(losses(steps)) >= completed, seconds=300)  # noqa: B023
        lost.append(expand(state(cluster, job).nodes)[position])
        cluster.kill_node(lost[-1])
        until(lambda: state(cluster, job).pending)
        # Slurm starts a requeued job two minutes later, so that credentials of its first start have expired
        assert cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"]).returncode == 0
    assert end(cluster, job) == "COMPLETED", log(folder, job)
    assert end(cluster, undisturbed) == "COMPLETED", log(folder, undisturbed)
    starts = [json.loads(line) for line in (steps.parent / "starts.jsonl").read_text().splitlines()]
    assert [start["restart"] for start in starts] == [0, 1, 2]
    assert starts[0]["completed_steps"] < starts[1]["completed_steps"] < starts[2]["completed_steps"]
    assert not {*lost} & {*expand(starts[2]["nodes"])}
    assert log(folder, job).startswith(f"job {job} on node[0-1]: ")  # the output of the first start is kept
    for start in starts[1:]:
        text = f"restart {start['restart']} of at most 3, on {start['nodes']}: continuing after step "
        assert text + str(start["completed_steps"]) in log(folder, job)
    assert losses(steps) == losses(folder / "runs" / f"fsdp_2nodes-{undisturbed}" / "steps.jsonl")
    assert len(losses(steps)) == 60


def state(cluster: Cluster, job_id: str) -> JobRecord:
    (job,) = parse_jobs(cluster.run(["scontrol", "show", "job", job_id]).stdout)
    return job


def losses(path: Path) -> list[tuple[int, float]]:
    """Step and loss of each complete line."""
    lines = path.read_text().splitlines(keepends=True)
    return [(step["step"], step["loss"]) for step in map(json.loads, (line for line in lines if line.endswith("\n")))]


def log(folder: Path, job: str) -> str:
    return (folder / "logs" / f"fsdp_2nodes-{job}.out").read_text()
