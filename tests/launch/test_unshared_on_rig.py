"""A run directory on the login node only: results are fetched through srun.

train.failure kills and stops ranks with a shared one, and is interrupted: checks/faults/test_train_failure_on_rig.py.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.diagnose.hangs import CAUSE as HANG
from seatrial.discover.rank_stacks import read_evidence
from seatrial.model import DecisionValue, JobState, Outcome
from seatrial.telemetry import files as telemetry
from seatrial.util.hostlist import expand
from tests.launch.test_slurm_on_rig import CHECK, ONLY, SHORT_TIMEOUT, errors, nothing_is_left
from tests.processes import Program, load, ranks_in_check, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

TRIAL = """
cluster: {gpus_per_node: 0}
localize: false
telemetry: {enabled: false}
limits: {heartbeat_timeout_s: 20}
slurm: {queue_s: 90}
checks:
  host.inventory:
  filesystem.shared:
  collectives.all_reduce: {options: {sizes: [1MiB], min_seconds_per_size: SECONDS}}
  nodes.reachable:
"""


class Site:
    """Two nodes that share neither the run directory nor the scratch directory."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: tuple[str, ...] = ("node0", "node1")) -> None:
        self.cluster, self.folder = cluster, folder
        self.out, self.scratch = folder / "runs" / "run", folder / "scratch"
        (folder / "runs").mkdir()
        self.scratch.mkdir()
        for node in cluster.nodes:
            cluster.private_dir(self.scratch, node)
        for node in nodes:
            cluster.private_dir(folder / "runs", node)

    def started(self, seconds: float = 1, *more: str, first: str = "") -> Program:
        trial = self.folder / "cluster.yaml"
        trial.write_text(TRIAL.replace("SECONDS", str(seconds)))
        options = ("--launcher", "slurm", "--nodes", "2", "--set", f"slurm.scratch={self.scratch}", *more)
        return Program("run", trial, *options, "--out", self.out, env=self.cluster.env, first=first)

    def left_on_nodes(self) -> str:
        return "".join(
            self.cluster.run_on(node, ["find", str(self.scratch), "-mindepth", "1"]).stdout
            for node in self.cluster.nodes
        )


@pytest.fixture
def make_site(make_cluster: Callable[..., Cluster], tmp_path: Path) -> Callable[..., Site]:
    return lambda *nodes: Site(make_cluster(2), tmp_path, nodes) if nodes else Site(make_cluster(2), tmp_path)


@pytest.mark.parametrize("without", [("node0", "node1"), ("node0",)])
def test_results_are_fetched_from_unshared_nodes(make_site: Callable[..., Site], without: tuple[str, ...]) -> None:
    site = make_site(*without)
    code, _, err = site.started(1, "--set", "telemetry.enabled=true").finish()
    assert code == 0, err
    record = load(site.out)
    assert record.decision.value is DecisionValue.ACCEPTED
    environments: Any = record.environment["nodes"]
    assert [entry["nodes"] for entry in environments] == [["node0", "node1"]]
    assert len([measurement for measurement in record.measurements if measurement.check == CHECK]) == 4
    assert Outcome.WARN in {verdict.outcome for verdict in record.verdicts if verdict.metric == "paths_not_shared"}
    attempt = site.out / "jobs" / "ranks" / "attempt1"
    assert {path.name for path in attempt.glob("rank?.jsonl")} == {f"rank{number}.jsonl" for number in range(4)}
    assert list(attempt.glob("logs/node1/**/stderr.log"))
    assert "not shared: node1" in (attempt / "launcher.err").read_text() or "node1" not in without
    assert "rendezvous at" in (attempt / "launcher.out").read_text()
    assert site.left_on_nodes() == ""
    assert nothing_is_left(site.cluster)
    assert not list(site.out.glob("jobs/**/collect*"))
    sampled = {device.node for device in telemetry.read_devices(site.out / "jobs" / "ranks" / telemetry.TELEMETRY_FILE)}
    assert sampled == {"node0", "node1"}


def test_killed_remote_rank_is_the_cause_and_logs_are_fetched(make_site: Callable[..., Site]) -> None:
    site = make_site()
    program = site.started(60, *ONLY, "--only", "nodes.reachable")
    rank = until(lambda: ranks_in_check(site.out, "ranks", CHECK, 4))[3]
    assert rank["node"] == "node1"
    site.cluster.run_on("node1", ["kill", "-KILL", str(rank["pid"])])
    assert program.finish()[0] == 3
    reasons = errors(load(site.out))
    assert set(reasons) == {CHECK}
    assert "node1/rank3" in reasons[CHECK]
    assert "killed by SIGKILL" in reasons[CHECK]
    assert site.left_on_nodes() == ""
    assert nothing_is_left(site.cluster)


def test_stopped_remote_rank_is_the_cause_and_logs_and_stacks_are_fetched(make_site: Callable[..., Site]) -> None:
    site = make_site()
    program = site.started(60, *SHORT_TIMEOUT, *ONLY)
    rank = until(lambda: ranks_in_check(site.out, "ranks", CHECK, 4))[2]
    site.cluster.run_on("node1", ["kill", "-STOP", str(rank["pid"])])
    assert program.finish()[0] == 3
    record = load(site.out)
    assert JobState.HUNG in {result.state for result in record.results}
    assert "node1/rank2" in errors(record)[CHECK]
    (cause,) = [finding for finding in record.findings if finding.cause == HANG]
    assert (cause.subject, cause.confidence) == ("node1/rank2", "high")
    assert "process state T" in cause.title
    assert [explained.check for explained in cause.explains] == [CHECK]
    # the stacks of the others, on both nodes; they may wait at different places of the operation
    with_stack = re.findall(r"ranks? ([\d, -]+): (?!no Python stack)", cause.evidence)
    assert sorted(rank for ranks in with_stack for rank in expand(f"[{ranks.replace(' ', '')}]")) == ["0", "1", "3"]
    attempt = site.out / "jobs" / "ranks" / "attempt1"
    assert list(attempt.glob("logs/node1/**/stderr.log"))
    evidence = read_evidence(attempt, 4)
    assert evidence is not None
    assert [snapshot.state for snapshot in evidence.snapshots].index("T") == 2
    assert [bool(snapshot.frames) for snapshot in evidence.snapshots] == [True, True, False, True]
    assert evidence.ranks_at_fault == (2,)
    assert site.left_on_nodes() == ""
    assert nothing_is_left(site.cluster)


def test_ctrl_c_leaves_no_job_and_no_files_on_nodes(make_site: Callable[..., Site]) -> None:
    site = make_site()
    program = site.started(60)
    until(lambda: ranks_in_check(site.out, "ranks", CHECK, 4))
    program.process.send_signal(signal.SIGINT)
    assert program.finish()[0] == 130
    assert {measurement.check for measurement in load(site.out).measurements} == {"host.inventory", "filesystem.shared"}
    assert site.left_on_nodes() == ""
    assert nothing_is_left(site.cluster)


def test_failed_fetch_is_an_error(make_site: Callable[..., Site]) -> None:
    """A firewall rejects connections from the nodes to the login node."""
    site = make_site()
    login = site.cluster.run_on("node0", ["getent", "hosts", "ctl"]).stdout.split()[0]
    closed = ["-p", "tcp", "--syn", "--dport", "32768:60999", "-j", "REJECT"]
    for node in site.cluster.nodes:
        site.cluster.run_on(node, ["iptables", "-A", "OUTPUT", "-d", login, *closed])
    soon = "from seatrial.launch import collect; collect.NO_DATA_TIMEOUT_S = 12"
    code, _, err = site.started(1, "--only", "host.inventory", first=soon).finish()
    assert code == 3, err
    reason = errors(load(site.out))["host.inventory"]
    assert "through srun failed: no data from any node for 12 s" in reason
    assert f"in {site.scratch}/seatrial-1" in reason
    assert nothing_is_left(site.cluster)
