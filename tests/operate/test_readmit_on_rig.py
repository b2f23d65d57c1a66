"""Readmission on a real Slurm test cluster: a good node, one with a shaped link, and one that someone else drained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.operate.drain_limit import prepare
from tests.fakes.kubectl import Cluster as KubernetesCluster
from tests.operate.test_kubernetes_nodes import OUR_TAINT, condition, node
from tests.processes import Program
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

OURS = "seatrial 20261120-020000-quick: REJECTED: slow link"
TRIAL = """
telemetry: {enabled: false}
retry: false
checks:
  host.inventory:
  nodes.reachable:
"""
# a threshold that no network meets starts the search for slow nodes
OPTIONS = "options: {sizes: [1MiB], seconds_per_size: 0.2}"
SLOW = (
    TRIAL.partition("  host.")[0] + f"  collectives.all_reduce: {{{OPTIONS}, expect: {{busbw.1MiB: '> 1e6 GB/s'}}}}\n"
)


class Site:
    """A cluster, and a readmission with the changes that the flags name."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def readmit(self, name: str, trial: str, *flags: str) -> tuple[int, str]:
        file, out = self.folder / "t.yaml", self.folder / name
        file.write_text(trial)
        arguments = ("readmit", name, "--trial", file, "--gpus-per-node", "0", "--undrain", "--out", out)
        code, output, err = Program(*arguments, *flags, env=self.cluster.env, cwd=self.folder).finish(300)
        return code, output + err

    def record(self, name: str) -> dict[str, object]:
        document: dict[str, object] = json.loads((self.folder / name / "readmit.json").read_text())
        return document

    def state(self, name: str) -> str:
        """Return state, reason and comment of a node, as ``scontrol`` shows them."""
        lines = self.cluster.run(["scontrol", "show", "node", name]).stdout.split("\n")
        shown = [line.strip() for line in lines if line.strip().startswith(("State=", "Reason=", "Comment="))]
        return "; ".join([shown[0].partition(" ")[0], *(line.partition(" [")[0] for line in shown[1:])])


@pytest.mark.timeout(400)
def test_good_node_returns_and_nodes_of_others_do_not(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    site = Site(make_cluster(4), tmp_path)
    site.cluster.drain("node1", OURS)
    site.cluster.drain("node3", "fan broken")
    code, output = site.readmit("node3", TRIAL)
    assert (code, "someone else took it out of service" in output) == (3, True), output
    assert site.state("node3") == "State=IDLE+DRAIN; Reason=fan broken"
    code, output = site.readmit("node1", TRIAL, "--comment")
    assert code == 0, output
    assert site.state("node1") == "State=IDLE; Comment=seatrial node1: ACCEPTED"
    record = site.record("node1")
    assert [partner["node"] for partner in record["partners"]] == ["node0", "node2"]  # type: ignore[attr-defined]
    assert float(str(record["seconds"])) < 180
    assert "No reservations" in site.cluster.run(["scontrol", "show", "reservation"]).stdout


@pytest.mark.timeout(400)
def test_bad_node_between_two_good_ones_is_drained_again(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    site = Site(make_cluster(3), tmp_path)
    site.cluster.slow_link("node1", "200mbit")
    site.cluster.drain("node1", OURS)
    (tmp_path / "state").mkdir()
    prepare(tmp_path / "state")
    code, output = site.readmit("node1", SLOW, "--drain", "--state-dir", str(tmp_path / "state"))
    assert code == 1, output
    assert site.state("node1") == (
        "State=IDLE+DRAIN; Reason=seatrial node1: REJECTED: node1 is slow to every other node"
    )
    assert [site.state(partner) for partner in ("node0", "node2")] == ["State=IDLE"] * 2
    assert (site.record("node1")["suspects"], site.record("node1")["trials"]) == (
        {},
        [str(tmp_path / "node1" / "trial1")],
    )
    assert "No reservations" in site.cluster.run(["scontrol", "show", "reservation"]).stdout


@pytest.mark.timeout(200)
def test_readmission_in_kubernetes(tmp_path: Path) -> None:
    cluster, trial = KubernetesCluster(tmp_path / "cluster"), tmp_path / "t.yaml"
    objects = [node("new", OUR_TAINT, gpus=0), *(node(name, accepted="True", gpus=0) for name in ("a", "b"))]
    cluster.install(tmp_path / "bin", objects=objects, nodes=["new", "a", "b"])
    trial.write_text(TRIAL + "kubernetes: {image: registry.example/seatrial:1, namespace: ml}\n")
    arguments = ("readmit", "new", "--launcher", "kubernetes", "--trial", trial, "--gpus-per-node", "0")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    program = Program(*arguments, "--undrain", "--condition", "--out", tmp_path / "run", env={"PATH": path})
    code, output, err = program.finish(180)
    cluster.stop()
    assert code == 0, output + err
    changed = next(each for each in cluster.objects if each["metadata"]["name"] == "new")
    accepted = condition(changed)
    assert accepted is not None
    assert (accepted["status"], accepted["message"]) == ("True", "seatrial run: ACCEPTED")
    assert changed["spec"]["taints"] == []
    assert cluster.left_behind() == []
    assert cluster.unexpected_calls == []
