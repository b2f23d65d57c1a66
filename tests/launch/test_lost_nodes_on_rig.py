"""Nodes of a real Slurm cluster that are lost during a job, or drained before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.model import DecisionValue, Outcome
from tests.launch.test_slurm_on_rig import CHECK, errors
from tests.processes import Program, load, ranks_in_check, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

TRIAL = """
cluster: {gpus_per_node: 0, nodes: 3}
localize: false
telemetry: {enabled: false}
launcher: slurm
limits: {heartbeat_timeout_s: 15}
slurm: {queue_s: 90}
checks:
  collectives.all_reduce: {options: {sizes: [1MiB], min_seconds_per_size: 120}}
  nodes.reachable:
"""
SLURM = "SlurmdTimeout=300\nMessageTimeout=10"  # Slurm's defaults: Slurm itself takes minutes to set a dead node DOWN


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    path = tmp_path / "three.yaml"
    path.write_text(TRIAL)
    return path


def test_a_killed_node_is_named_and_the_others_go_on(
    make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path
) -> None:
    cluster, out = make_cluster(3, extra=SLURM), tmp_path / "run"
    program = Program("run", trial, "--min-nodes", "2", "--out", out, env=cluster.env)
    until(lambda: ranks_in_check(out, "ranks", CHECK, 6))
    killed = time.time()
    cluster.kill_node("node1")
    code, _, err = program.finish()
    assert code == 3, err
    record = load(out)
    assert record.decision.value is DecisionValue.INCOMPLETE
    lost, rest = record.results
    assert (lost.failed_subject, [node.name for node in lost.missing_nodes]) == ("node1", ["node1"])
    assert lost.started + lost.seconds - killed < 110, "before the end of the check"
    assert set(errors(record)) == {CHECK}
    assert (rest.job, rest.nodelist) == ("ranks-on2", "node[0,2]")
    assert {job.name: (job.nodes, job.checks) for job in record.jobs} == {
        "ranks": (3, (CHECK,)),
        "ranks-on2": (2, ("nodes.reachable",)),
    }
    assert [node.name for node in record.missing_nodes] == ["node1"]


def test_a_drained_node_is_named_and_with_min_nodes_the_others_are_tested(
    make_cluster: Callable[..., Cluster], trial: Path, tmp_path: Path
) -> None:
    cluster, out = make_cluster(3, extra=SLURM), tmp_path / "run"
    cluster.drain("node1", "fan broken")
    only = ("--only", "nodes.reachable", "--set", "slurm.queue_s=600")
    started = time.monotonic()
    code, _, err = Program("run", trial, *only, "--out", out, env=cluster.env).finish()
    assert code == 3, err
    assert time.monotonic() - started < 300, "it does not wait for queue_s"
    record = load(out)
    assert [(node.name, node.state) for node in record.missing_nodes] == [("node1", "IDLE+DRAIN: fan broken")]
    assert record.decision.reason.startswith("missing nodes: node1 (IDLE+DRAIN: fan broken)")
    assert record.results[0].failed_subject == "node1"
    out = tmp_path / "smaller"
    code, _, err = Program("run", trial, *only, "--min-nodes", "2", "--out", out, env=cluster.env).finish()
    assert code == 3, err
    record = load(out)
    assert record.decision.value is DecisionValue.INCOMPLETE
    assert record.decision.reason.startswith("2 of 3 nodes tested, missing nodes: node1")
    assert {measurement.subject.partition("/")[0] for measurement in record.measurements} == {"node0", "node2"}
    assert {verdict.outcome for verdict in record.verdicts} <= {Outcome.PASS, Outcome.WARN, Outcome.SKIP}
