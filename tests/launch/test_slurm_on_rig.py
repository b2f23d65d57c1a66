"""The Slurm launcher on a real cluster: trials across nodes, and failures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from seatrial.diagnose.job_failures import JOB_REJECTED
from seatrial.model import CLUSTER, DecisionValue, JobState, Outcome, Trial
from tests.processes import Program, load, ranks_in_check, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

CHECK = "collectives.all_reduce"
# all-reduce runs for ten seconds, so that a test can send signals meanwhile
TRIAL = """
cluster: {gpus_per_node: 0}
localize: false
telemetry: {enabled: false}
slurm: {queue_s: 90}
checks:
  host.inventory:
  collectives.all_reduce: {options: {sizes: [1MiB], min_seconds_per_size: 10}}
  nodes.reachable:
"""
# for tests that wait for a missing heartbeat; otherwise torchrun may take seconds to end after its ranks
SHORT_TIMEOUT = ("--set", "limits.heartbeat_timeout_s=12")
ONLY = ("--only", CHECK)  # for tests that need no other check


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(2)


@pytest.fixture
def sound(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(TRIAL)
    return path


def started(cluster: Cluster, trial: Path, out: Path, *more: str) -> Program:
    return Program("run", trial, "--launcher", "slurm", "--nodes", "2", "--out", out, *more, env=cluster.env)


def nothing_is_left(cluster: Cluster) -> bool:
    queue = cluster.run(["squeue", "--noheader"]).stdout
    return not queue.strip()


def errors(record: Trial) -> dict[str, str]:
    return {verdict.check: verdict.message for verdict in record.verdicts if verdict.outcome is Outcome.ERROR}


def test_a_trial_across_nodes(sound: Cluster, trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, output, err = started(sound, trial, out, "--set", f"checks.{CHECK}.options.min_seconds_per_size=1").finish()
    assert code == 0, err
    record = load(out)
    assert record.decision.value is DecisionValue.ACCEPTED
    assert {result.launcher for result in record.results} == {"slurm"}
    assert {measurement.subject for measurement in record.measurements if measurement.check == "host.inventory"} == {
        "node0",
        "node1",
    }
    ranks = {measurement.subject for measurement in record.measurements if measurement.check == CHECK}
    assert ranks == {"node0/rank0", "node0/rank1", "node1/rank2", "node1/rank3"}
    assert "2 nodes" in output
    assert [result.nodelist for result in record.results] == ["node[0-1]", "node[0-1]"]
    assert len({result.scheduler_id for result in record.results}) == 2
    assert "#SBATCH --nodelist='node[0-1]'" in (out / "jobs/ranks/attempt1/command.sh").read_text()
    assert nothing_is_left(sound)
    script = (out / "jobs" / "ranks" / "attempt1" / "command.sh").read_text()
    assert script.strip() == (out / "jobs" / "ranks" / "attempt1" / "job.sbatch").read_text().strip()


def test_job_that_cannot_start_reports_the_reason(cluster: Cluster, trial: Path, tmp_path: Path) -> None:
    cluster.drain("node1", "fan broken")
    out = tmp_path / "run"
    code, _, err = started(cluster, trial, out, "--set", "slurm.queue_s=3").finish()
    assert code == 3
    record = load(out)
    (result,) = record.results
    assert (result.state, record.measurements) == (JobState.REJECTED, ())
    expected = ("DOWN, DRAINED or reserved", "ReqNodeNotAvail, UnavailableNodes:node1")  # depends on the state of Slurm
    assert "PENDING" in record.decision.reason
    assert any(text in record.decision.reason for text in expected)
    (finding,) = record.findings
    assert {key.check for key in finding.explains} == {"host.inventory", CHECK, "nodes.reachable"}
    assert "waiting: Slurm job" in err
    assert nothing_is_left(cluster)


TYPO = ("--nodes", "64", "--gpus-per-node", "8", "--set", "slurm.partition=nosuch")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (TYPO, "sbatch: error: invalid partition specified: nosuch"),
        (("--gpus-per-node", "0", "--set", "slurm.constraint=moon"), "Invalid feature specification"),
        (("--nodes", "2", "--gpus-per-node", "8"), "Requested node configuration is not available"),
        (("--nodes", "64", "--gpus-per-node", "0"), "PENDING: PartitionConfig; waiting will not help"),
    ],
    ids=["partition", "feature", "GPUs", "nodes"],
)
def test_a_rejected_job_ends_the_run_with_one_cause(
    sound: Cluster, tmp_path: Path, options: tuple[str, ...], expected: str
) -> None:
    out = tmp_path / "run"
    program = Program("run", "quick", "--launcher", "slurm", *options, "--out", out, env=sound.env)
    code, output, err = program.finish()
    assert code == 3, err
    record = load(out)
    (result,) = record.results
    (finding,) = record.findings
    assert result.state is JobState.REJECTED
    assert all(measurement.skipped for measurement in record.measurements), "checks that need GPUs"
    assert (finding.subject, finding.confidence) == (CLUSTER, "high")
    assert finding.first_command
    assert expected in finding.evidence
    assert expected in record.decision.reason
    assert len((output + err).splitlines()) <= 20
    assert nothing_is_left(sound)


def test_resume_goes_on_after_a_rejection(cluster: Cluster, trial: Path, tmp_path: Path) -> None:
    """The partition is drained before the second job, and is up again before --resume."""
    out, sbatch = tmp_path / "run", tmp_path / "bin" / "sbatch"
    update = "scontrol update PartitionName=gpu State="
    sbatch.parent.mkdir()
    second = f"[ ! -e {tmp_path}/first ] || {update}DRAIN; touch {tmp_path}/first"
    sbatch.write_text(f'#!/bin/sh\n{second}\nexec {shutil.which("sbatch")} "$@"\n')
    sbatch.chmod(0o755)
    options = ("--launcher", "slurm", "--nodes", "2", "--set", f"checks.{CHECK}.options.min_seconds_per_size=1")
    env = {**cluster.env, "PATH": f"{sbatch.parent}:{os.environ['PATH']}"}
    assert Program("run", trial, *options, "--out", out, env=env).finish()[0] == 3
    rejected = load(out)
    assert [result.state for result in rejected.results] == [JobState.COMPLETED, JobState.REJECTED]
    assert "job ranks was rejected: " in rejected.decision.reason
    assert "Required partition not available" in rejected.decision.reason
    assert {measurement.check for measurement in rejected.measurements} == {"host.inventory"}
    assert [finding.subject for finding in rejected.findings if finding.cause == JOB_REJECTED] == [CLUSTER]
    assert cluster.run(f"{update}UP".split()).returncode == 0
    code, _, err = Program("run", "--resume", out, env=cluster.env).finish()
    assert code == 0, err
    record = load(out)
    assert [result.job for result in record.results] == ["nodes", "ranks", "ranks"], "the first job is not repeated"
    assert record.decision.value is DecisionValue.ACCEPTED
    assert JOB_REJECTED not in {finding.cause for finding in record.findings}


def test_a_controller_that_restarts_delays_the_job(
    make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path
) -> None:
    cluster, out = make_cluster(2, extra="MessageTimeout=2"), tmp_path / "run"
    cluster.stop_controller()
    program = started(cluster, trial, out, "--only", "host.inventory")
    assert program.process.stderr is not None
    (line,) = islice((line for line in program.process.stderr if "trying again for 60 s" in line), 1)
    assert "the controller does not answer" in line
    assert "Run first: scontrol ping" in line
    cluster.start_controller()
    _, _, err = program.finish()
    assert [result.state for result in load(out).results] == [JobState.COMPLETED], err


@pytest.mark.timeout(450)
def test_node_failure_during_the_job(cluster: Cluster, trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = started(cluster, trial, out, *SHORT_TIMEOUT, *ONLY)
    heartbeats = until(lambda: ranks_in_check(out, "ranks", CHECK, 4))
    pids = [str(heartbeat["pid"]) for heartbeat in heartbeats if heartbeat["node"] == "node1"]
    cluster.kill_slurmd("node1")
    cluster.run_on("node1", ["kill", "-KILL", *pids])
    assert program.finish(260)[0] == 3
    assert "node1" in errors(load(out))[CHECK]
