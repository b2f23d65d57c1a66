"""A Slurm job that outlives a killed run: the next run in its directory cancels it, and results are not mixed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.model import DecisionValue
from tests.launch.test_slurm_on_rig import CHECK, nothing_is_left
from tests.processes import Program, load, ranks_in_check, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

TRIAL = """
cluster: {gpus_per_node: 0}
localize: false
telemetry: {enabled: false}
slurm: {queue_s: 90}
checks:
  host.inventory:
  collectives.all_reduce: {options: {sizes: [1MiB], min_seconds_per_size: 5}}
"""


def test_next_run_cancels_the_job_of_a_killed_run(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster, out = make_cluster(2), tmp_path / "it's a run"
    (tmp_path / "cluster.yaml").write_text(TRIAL)
    program = Program(
        "run", tmp_path / "cluster.yaml", "--launcher", "slurm", "--nodes", "2", "--out", out, env=cluster.env
    )
    rank = until(lambda: ranks_in_check(out, "ranks", CHECK, 4))[3]
    cluster.run_on("node1", ["kill", "-STOP", str(rank["pid"])])  # keeps the job running
    program.process.kill()
    program.finish()
    job_id = (out / "jobs/ranks/attempt1/slurm_job_id").read_text()
    assert cluster.run(["squeue", "--noheader", "--format=%A"]).stdout.split() == [job_id]
    held_job = ["sbatch", "--parsable", "--job-name=seatrial-ranks", "--hold", "--wrap", "sleep 300"]
    other_job = cluster.run(held_job).stdout.strip()

    code, _, err = Program("run", "--resume", out, env=cluster.env).finish()
    assert code == 0, err
    assert f"job {job_id} of an earlier run in" in err
    assert "JobState=CANCELLED" in cluster.run(["scontrol", "show", "job", job_id]).stdout
    assert cluster.run(["squeue", "--noheader", "--format=%A"]).stdout.split() == [other_job]
    record = load(out)
    assert record.decision.value is DecisionValue.ACCEPTED
    assert [result.attempt for result in record.results if result.job == "ranks"] == [2]
    old = (out / "jobs/ranks/attempt1/rank0.jsonl").read_text()
    assert "measurement" not in [key for line in old.splitlines() for key in json.loads(line)]


def test_ctrl_c_before_the_first_fetch_leaves_nothing_on_the_nodes(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster, runs, scratch = make_cluster(2), tmp_path / "runs", tmp_path / "scratch"
    for folder in (runs, scratch):
        folder.mkdir()
        for node in cluster.nodes:
            cluster.private_dir(folder, node)
    (tmp_path / "cluster.yaml").write_text(TRIAL.replace("host.inventory:", ""))
    options = ("--launcher", "slurm", "--nodes", "2", "--set", f"slurm.scratch={scratch}", "--out", runs / "run")
    program = Program("run", tmp_path / "cluster.yaml", *options, env=cluster.env)
    until(lambda: cluster.run_on("node1", ["find", str(scratch), "-name", "job.json"]).stdout)
    program.process.send_signal(signal.SIGINT)
    assert program.finish()[0] == 130
    assert nothing_is_left(cluster)
    assert (
        "".join(cluster.run_on(node, ["find", str(scratch), "-mindepth", "1"]).stdout for node in cluster.nodes) == ""
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_check_leaves_no_probe_job(
    make_cluster: Callable[..., Cluster], tmp_path: Path, number: signal.Signals
) -> None:
    cluster = make_cluster(1)
    (tmp_path / "one.yaml").write_text("checks: {slurm.binding: }")
    program = Program("run", tmp_path / "one.yaml", "--out", tmp_path / "run", env=cluster.env)
    until(lambda: not nothing_is_left(cluster))
    program.process.send_signal(number)
    program.finish()
    until(lambda: nothing_is_left(cluster), 30)
