"""Whole trials through the fake kubectl, which runs the pods as processes: verdict, Ctrl-C, SIGKILL and a lost node.

KILL_MOMENTS: at how many random moments a trial of two jobs is killed and resumed; by default at one, of one job.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.bench.tcp import listen
from seatrial.launch.kubernetes_objects import object_name, rendezvous_port
from seatrial.model import DecisionValue, JobState, Outcome
from seatrial.pipeline.rejudge import rejudge
from tests.fakes.kubectl import Cluster
from tests.launch.on_fake_cluster import both
from tests.processes import Program, load, ranks_in_check, until

pytestmark = pytest.mark.cluster

CHECK = "collectives.all_reduce"
TRIAL = """
launcher: kubernetes
cluster: {nodes: 2, gpus_per_node: 0}
localize: false
telemetry: {enabled: false}
limits: {heartbeat_timeout_s: 20}
kubernetes: {image: registry.example/seatrial:1, namespace: ml}
checks:
  host.inventory:
"""
RANKS = "  collectives.all_reduce: {options: {sizes: [1MiB], min_seconds_per_size: SECONDS}}\n"
MOMENTS = os.environ.get("KILL_MOMENTS", "")
# output of a pod in the format of results, without the token and with the token of another run
NOISE = ["garbage \x1b[31m", "0 .all 2", "f" * 32 + " 1 0 .all 2", "f" * 32 + " 2 1 .all 2"]


class Site:
    """A cluster of two nodes, and a run directory on this host."""

    def __init__(self, folder: Path) -> None:
        self.out = next(filter(_has_free_ports, _run_dirs(folder)))
        self.folder, self.cluster = folder, Cluster(folder / "cluster")

    def started(self, seconds: float | None, **scenario: object) -> Program:
        """Start a trial; ``seconds`` of all-reduce, or None for no such check."""
        self.cluster.install(self.folder / "bin", **scenario)
        trial = self.folder / "trial.yaml"
        trial.write_text(TRIAL if seconds is None else TRIAL + RANKS.replace("SECONDS", str(seconds)))
        return self.program("run", trial, "--out", self.out)

    def program(self, *arguments: str | Path) -> Program:
        return Program(*arguments, env={"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"})

    def nothing_is_left(self) -> None:
        assert self.cluster.left_behind() == []
        assert self.cluster.unexpected_calls == []


def _run_dirs(folder: Path) -> Iterator[Path]:
    while True:
        yield folder / f"run-{os.urandom(4).hex()}"


def _has_free_ports(run_dir: Path) -> bool:
    """Whether no process listens on the ports of the rendezvous: the pods are processes of this host."""
    for attempt in (1, 2):
        try:
            listen(rendezvous_port(object_name(run_dir, "ranks", attempt))).close()
        except OSError:
            return False
    return True


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    created = Site(tmp_path)
    yield created
    created.cluster.stop()


def test_trial_reaches_its_verdict_over_streams_that_break(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_SET_TELEMETRY__ENABLED", "true")
    code, out, err = site.started(0.2, cut=[5, 0, 40, 30], noise=NOISE).finish()
    assert code == 0, err
    record = load(site.out)
    assert record.decision.value is DecisionValue.ACCEPTED
    assert {measured.subject for measured in record.measurements if measured.check == "host.inventory"} == {
        "node-a",
        "node-b",
    }
    assert len([measured for measured in record.measurements if measured.check == CHECK]) == 4
    assert [result.nodelist for result in record.results] == ["node-a,node-b"] * 2
    assert "2 nodes" in out
    site.nothing_is_left()


def test_checks_between_nodes_pass_with_pod_names_only_and_without_a_claim(site: Site) -> None:
    """Cluster DNS has no names of nodes, and the run directory of each pod is an emptyDir."""
    site.cluster.install(site.folder / "bin")
    trial = site.folder / "trial.yaml"
    trial.write_text(f"{TRIAL}  nodes.reachable:\n  nodes.connectivity:\n  filesystem.shared:\n")
    code, _, err = site.program("run", trial, "--out", site.out).finish()
    record = load(site.out)
    outcomes: dict[str, set[Outcome]] = {}
    for each in rejudge(record).verdicts:
        outcomes.setdefault(each.check, set()).add(each.outcome)
    assert outcomes["nodes.reachable"] == outcomes["nodes.connectivity"] == {Outcome.PASS}
    assert outcomes["filesystem.shared"] == {Outcome.SKIP}
    assert (code, record.decision.value) == (0, DecisionValue.ACCEPTED), err
    connectivity = next(each for each in record.measurements if each.check == "nodes.connectivity" and each.metrics)
    unresolved = [metric.evidence for metric in connectivity.metrics if metric.name == "names_unresolved"]
    assert unresolved == [{"unresolved": {}}]
    site.nothing_is_left()


def test_a_job_whose_image_is_missing_ends_the_run_with_one_cause(site: Site) -> None:
    site.cluster.install(site.folder / "bin", pods=both("image_missing"))
    trial = site.folder / "trial.yaml"
    trial.write_text(f"{TRIAL}  nodes.connectivity:\n  kubernetes.pods: {{options: {{wait_s: 1}}}}\n")
    code, out, err = site.program("run", trial, "--out", site.out).finish()
    assert code == 3, err
    record = load(site.out)
    (finding,) = record.findings
    assert (finding.cause, finding.subject) == ("kubernetes_image_missing", "node-a")
    assert finding.source == "job nodes"
    assert [result.state for result in record.results] == [JobState.REJECTED]
    assert record.measurements == ()
    assert record.stop_reason in record.decision.reason
    bad = {(each.check, each.metric) for each in record.verdicts if each.outcome in (Outcome.FAIL, Outcome.ERROR)}
    assert {(each.check, each.metric) for each in finding.explains} == bad
    assert {check for check, _ in bad} == {"host.inventory", "nodes.connectivity", "kubernetes.pods"}
    assert out.count("the image cannot be pulled, since the registry does not have it") >= 1
    assert rejudge(record).findings == record.findings
    site.nothing_is_left()


def test_ctrl_c_deletes_everything(site: Site) -> None:
    program = site.started(None)
    until(lambda: any(" logs " in call for call in site.cluster.calls))
    program.process.send_signal(signal.SIGINT)
    code, _, err = program.finish()
    assert code == 130, err
    site.nothing_is_left()


def test_lost_node_is_named_and_its_pod_deleted(site: Site) -> None:
    program = site.started(120)
    until(lambda: ranks_in_check(site.out, "ranks", CHECK, 4), seconds=240)
    site.cluster.lose_node("node-b")
    code, _, err = program.finish()
    assert code == 3, err
    record = load(site.out)
    assert record.results[-1].failed_subject == "node-b"
    assert "kubectl describe node node-b" in record.results[-1].cause
    site.nothing_is_left()


def test_kubelet_that_cannot_be_reached_is_named_and_the_other_node_is_measured(site: Site) -> None:
    nodes = [
        {"kind": "Node", "metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        for name in ("node-a", "node-b")
    ]
    error = "dial tcp 10.0.0.5:10250: connect: connection refused"
    code, out, err = site.started(None, kubelets={"node-b": error}, objects=nodes).finish()
    assert code == 3, err
    record = load(site.out)
    measured = [each for each in record.measurements if not each.error]
    assert [each.subject for each in measured if each.check == "host.inventory"] == ["node-a"]
    (finding,) = record.findings
    assert (finding.cause, finding.subject) == ("kubernetes_kubelet_unreachable", "node-b")
    assert error in finding.evidence
    assert {key.check for key in finding.explains} == {"host.inventory"}
    assert "run-directory-of-the-pod" not in out + err + record.model_dump_json()
    site.nothing_is_left()


@pytest.mark.parametrize("moment", range(int(MOMENTS or 1)))
def test_run_that_is_killed_at_a_random_moment_is_resumed(site: Site, moment: int) -> None:
    choice = random.Random(os.urandom(8))
    seconds = 0.2 if MOMENTS else None
    calls, delay_s = choice.randint(8, 36 if MOMENTS else 15), choice.random()  # of about 45 or 20 in all
    program = site.started(seconds)
    until(lambda: program.process.poll() is not None or len(site.cluster.calls) >= calls)
    time.sleep(delay_s)
    program.process.kill()
    program.finish()
    print(f"moment {moment}: killed after {calls} calls and {delay_s:.2f} s; left:", site.cluster.left_behind(0))
    resumed = site.program("run", "--resume", site.out) if site.out.exists() else site.started(seconds)
    code, _, err = resumed.finish()
    assert code == 0, err
    assert load(site.out).decision.value is DecisionValue.ACCEPTED
    assert len(load(site.out).measurements) == (6 if MOMENTS else 2)
    site.nothing_is_left()
