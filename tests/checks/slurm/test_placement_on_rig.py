"""The Slurm checks use the partition and the nodes of the trial, where the trial's partition is not Slurm's default."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import DecisionValue, Measurement, Outcome, Trial
from tests.processes import Program, load
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

PARTITIONS = {"cpu": "node0", "gpu": "node[1-3]", "large": "node[0-3]"}
TRIAL = """
cluster: {nodes: 3, gpus_per_node: 0}
launcher: slurm
telemetry: {enabled: false}
slurm: {partition: gpu}
checks:
  slurm.nodes:
  slurm.partitions:
  slurm.jobs:
  slurm.binding:
  slurm.isolation:
"""


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(4, partitions=PARTITIONS)


def run(cluster: Cluster, folder: Path, *more: str, expected_code: int = 0) -> Trial:
    (folder / "trial.yaml").write_text(TRIAL)
    out = folder / f"run{len(list(folder.glob('run*')))}"
    program = Program("run", folder / "trial.yaml", "--out", out, *more, env=cluster.env)
    code, _, err = program.finish(seconds=240)
    assert code == expected_code, err
    assert not cluster.run(["squeue", "--all", "--noheader"]).stdout
    return load(out)


def measurement(record: Trial, check: str) -> Measurement:
    (result,) = (each for each in record.measurements if each.check == check)
    return result


def nodes_of_probe_jobs(record: Trial) -> dict[str, set[str]]:
    """Return check → nodes on which its probe jobs ran."""
    evidence: dict[str, Any] = {each.name: each.evidence for each in measurement(record, "slurm.jobs").metrics}
    srun_node = next(line for line in evidence["srun_exit_code"] if line.startswith("node=")).removeprefix("node=")
    tasks = {each.subject for each in measurement(record, "slurm.binding").metrics if each.name == "cpus_missing"}
    isolation = {metric.subject for metric in measurement(record, "slurm.isolation").metrics}
    return {
        "slurm.jobs": {evidence["sbatch_exit_code"]["nodes"], evidence["signal_delivered"]["nodes"], srun_node},
        "slurm.binding": {name.partition("/")[0] for name in tasks},
        "slurm.isolation": isolation,
    }


def test_probe_jobs_run_in_the_trials_partition(cluster: Cluster, tmp_path: Path) -> None:
    record = run(cluster, tmp_path)
    assert record.decision.value is DecisionValue.ACCEPTED
    nodes = nodes_of_probe_jobs(record)
    assert nodes["slurm.binding"] == {"node1", "node2", "node3"}
    assert nodes["slurm.jobs"] | nodes["slurm.isolation"] <= {"node1", "node2", "node3"}
    counted = {metric.name: metric.value for metric in measurement(record, "slurm.nodes").metrics}
    assert (counted["nodes"], counted["nodes_missing"]) == (3, 0)


def test_probe_jobs_run_on_the_trials_node_list(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm requires all nodes of a node list, but most probe jobs have one node."""
    nodelist = ("--nodes", "2", "--nodelist", "node[2-3]")
    nodes = nodes_of_probe_jobs(run(cluster, tmp_path, *nodelist, "--set", "slurm.partition=large"))
    assert nodes["slurm.binding"] == {"node2", "node3"}
    assert nodes["slurm.jobs"] | nodes["slurm.isolation"] <= {"node2", "node3"}


def test_probe_jobs_use_the_trials_reservation_and_excluded_nodes(cluster: Cluster, tmp_path: Path) -> None:
    reservation = ["scontrol", "create", "reservation", "ReservationName=week47", "Nodes=node[1-3]", "Users=root"]
    assert cluster.run([*reservation, "StartTime=now", "Duration=60", "Flags=MAINT"]).returncode == 0
    settings = ("slurm.reservation=week47", "slurm.exclude=node1", "cluster.nodes=2")
    record = run(cluster, tmp_path, *(word for setting in settings for word in ("--set", setting)))
    nodes = nodes_of_probe_jobs(record)
    assert nodes["slurm.binding"] == {"node2", "node3"}
    assert nodes["slurm.jobs"] | nodes["slurm.isolation"] <= {"node2", "node3"}
    assert {metric.subject for metric in measurement(record, "slurm.nodes").metrics} == {"node2", "node3", "cluster"}


def test_options_of_a_check_win(cluster: Cluster, tmp_path: Path) -> None:
    settings = ("checks.slurm.jobs.options.partition=cpu", "checks.slurm.nodes.options.partition=large")
    record = run(cluster, tmp_path, *(word for setting in settings for word in ("--set", setting)))
    nodes = nodes_of_probe_jobs(record)
    assert nodes["slurm.jobs"] == {"node0"}
    assert nodes["slurm.binding"] == {"node1", "node2", "node3"}
    counted = {metric.name: metric.value for metric in measurement(record, "slurm.nodes").metrics}
    assert counted["nodes"] == 4


def test_a_drained_node_of_the_partition_is_missing_at_once(cluster: Cluster, tmp_path: Path) -> None:
    cluster.drain("node3", "fan broken")
    only = ("--only", "slurm.nodes", "--only", "slurm.binding")
    started = time.monotonic()
    record = run(cluster, tmp_path, *only, expected_code=1)
    assert time.monotonic() - started < 100, "a probe job is pending for at most 300 s"
    outcomes = {(v.check, v.metric): v.outcome for v in record.verdicts if v.subject == "cluster"}
    assert outcomes["slurm.nodes", "nodes_missing"] is Outcome.FAIL
    error = measurement(record, "slurm.binding").error or ""
    assert "2 of 3 nodes of partition gpu are usable, 3 needed: node3 is IDLE+DRAIN: fan broken" in error


def test_a_partition_that_is_down_fails_at_once(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.run(["scontrol", "update", "partitionname=gpu", "state=down"]).returncode == 0
    started = time.monotonic()
    record = run(cluster, tmp_path, expected_code=1)
    assert time.monotonic() - started < 100, "three probe jobs are pending for at most 300 s each"
    failed = {(v.check, v.metric) for v in record.verdicts if v.outcome is Outcome.FAIL}
    assert failed == {("slurm.partitions", "partitions_up")}
    for check in ("slurm.jobs", "slurm.binding", "slurm.isolation"):
        error = measurement(record, check).error or ""
        assert "PartitionDown; waiting will not help" in error, check
