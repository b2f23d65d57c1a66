"""A training whose rank fails, across the nodes of a real Slurm; see test_train_failure.py."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.checks.faults.training_failure import FAULTS
from seatrial.model import Outcome
from tests.checks.faults.test_training_failure import TRIAL, check
from tests.processes import Program, load, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

# The rig's Slurm follows processes by their parents: one that has lost its own outlives the job.
# Where the batch script sources it, on the first node; not where srun tries on every node whether it can be sourced.
ORPHAN = """case ${SLURM_STEP_ID:-batch}${SEATRIAL_JOB_DIR:-} in
    batch*/kill/*) (setsid sleep 300 > /dev/null 2>&1 &) ;;
esac
"""


@pytest.mark.timeout(600)
def test_faults_across_nodes_and_an_interruption(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """One run of the three leaves a process on a node, for real; the others are as they should be."""
    cluster = make_cluster(2)
    (tmp_path / "env.sh").write_text(ORPHAN)
    (tmp_path / "t.yaml").write_text(f"environment: {{source: {tmp_path}/env.sh}}\n{TRIAL}")
    here = ("run", tmp_path / "t.yaml", "--launcher", "slurm", "--nodes", "2", "--out")
    code, output, err = Program(*here, tmp_path / "run", env=cluster.env).finish(280)
    assert code == 1, output + err
    bad = [one for one in load(tmp_path / "run").verdicts if one.outcome is not Outcome.PASS]
    assert [(one.outcome, one.metric, one.subject) for one in bad] == [("FAIL", "leftover_processes.kill", "node0")]
    assert "sleeping: sleep 300" in bad[0].evidence
    measured = check(tmp_path / "run")
    assert {one.subject for one in measured.metrics if one.name == "leftover_processes.stop"} == {"node0", "node1"}
    for fault in FAULTS:
        assert "'culprit': 'rank 3 (node1/rank3, pid " in str(measured.facts[f"fault.{fault}"])
        assert "on node[0-1]" in str(measured.facts[f"job.{fault}"])
        assert "KillWait 2 s" in str(measured.facts[f"fault.{fault}"])

    program = Program(*here, tmp_path / "again", env=cluster.env)
    until(lambda: "RUNNING" in cluster.run(["squeue", "--noheader", "-o", "%T"]).stdout)
    program.process.send_signal(signal.SIGINT)
    assert program.finish()[0] == 130
    until(lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip() and not program.left_behind(), 30)
