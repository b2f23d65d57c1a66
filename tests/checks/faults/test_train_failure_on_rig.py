"""train.failure on a real Slurm test cluster; see test_train_failure.py."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.checks.faults.train_failure import FAULTS
from seatrial.model import Outcome
from tests.checks.faults.test_train_failure import TRIAL, single_measurement
from tests.processes import Program, load, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

# Starts an orphan in the batch script on the first node, but not in the srun step that sources the file on every node.
# The test cluster tracks processes by parent, so that the orphan survives the job.
ORPHAN = """case ${SLURM_STEP_ID:-batch}${SEATRIAL_JOB_DIR:-} in
    batch*/kill/*) (setsid sleep 300 > /dev/null 2>&1 &) ;;
esac
"""


@pytest.mark.timeout(600)
def test_faults_on_two_nodes_and_interruption(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """The run with fault kill leaves a process on a node; the other runs pass."""
    cluster = make_cluster(2)
    (tmp_path / "env.sh").write_text(ORPHAN)
    (tmp_path / "t.yaml").write_text(f"environment: {{source: {tmp_path}/env.sh}}\n{TRIAL}")
    arguments = ("run", tmp_path / "t.yaml", "--launcher", "slurm", "--nodes", "2", "--out")
    code, output, err = Program(*arguments, tmp_path / "run", env=cluster.env).finish(280)
    assert code == 1, output + err
    not_passed = [verdict for verdict in load(tmp_path / "run").verdicts if verdict.outcome is not Outcome.PASS]
    assert [(verdict.outcome, verdict.metric, verdict.subject) for verdict in not_passed] == [
        ("FAIL", "leftover_processes.kill", "node0")
    ]
    assert "sleeping: sleep 300" in not_passed[0].evidence
    measurement = single_measurement(tmp_path / "run")
    assert {metric.subject for metric in measurement.metrics if metric.name == "leftover_processes.stop"} == {
        "node0",
        "node1",
    }
    evidence = {metric.name: str(metric.evidence) for metric in measurement.metrics}
    for fault in FAULTS:
        assert "'root_cause': 'rank 3 (node1/rank3, pid " in evidence[f"root_cause_named.{fault}"]
        assert "on node[0-1]" in evidence[f"leftover_jobs.{fault}"]
        assert "KillWait 2 s" in evidence[f"ended_in_time.{fault}"]

    program = Program(*arguments, tmp_path / "interrupted", env=cluster.env)
    until(lambda: "RUNNING" in cluster.run(["squeue", "--noheader", "-o", "%T"]).stdout)
    program.process.send_signal(signal.SIGINT)
    assert program.finish()[0] == 130
    until(lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip() and not program.left_behind(), 30)
