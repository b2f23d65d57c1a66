"""The topology of a run: from a file, which must agree with Slurm's nodes, or from Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Cluster, Config, Slurm
from seatrial.discover import slurm
from seatrial.discover.gpu import GpuFacts
from seatrial.model import UsageError
from seatrial.pipeline.plan import NodeGpus, make_plan
from seatrial.pipeline.this_host import ThisHost
from seatrial.util.hostlist import expand
from seatrial.util.processes import CommandResult
from tests.fakes.slurm import FakeSlurm, cluster
from tests.paths import FIXTURES

HOST = ThisHost({}, GpuFacts())


def settings(file: Path | None = None, nodes: int = 4, launcher: str = "slurm", **options: str) -> Config:
    cluster = Cluster(nodes=nodes, gpus_per_node=8, topology=str(file) if file else None)
    checks = {"collectives.pairs": CheckSettings(), "host.inventory": CheckSettings()}
    return Config(name="t", launcher=launcher, cluster=cluster, slurm=Slurm(**options), checks=checks)


def topology_file(folder: Path, nodes: str) -> Path:
    path = folder / "racks.yaml"
    path.write_text(f"switches: {{leaf: {{nodes: '{nodes}'}}}}")
    return path


@pytest.fixture
def nodes_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm with node0 to node3."""
    FakeSlurm(cluster()).install(monkeypatch)
    monkeypatch.setattr(slurm, "hostnames", expand)


def answer(monkeypatch: pytest.MonkeyPatch, result: CommandResult) -> None:
    def run(argv: list[str], _seconds: float) -> CommandResult:
        assert argv == ["scontrol", "show", "topology"]
        return result

    monkeypatch.setattr(slurm, "installed", lambda: True)
    monkeypatch.setattr(slurm, "run_command", run)


def test_slurms_topology_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, CommandResult(0, (FIXTURES / "topology/show-tree.txt").read_text(), ""))
    topology = HOST.topology(settings())
    assert topology
    assert (topology.leaf("node2"), topology.source, topology.is_file) == ("leaf1", "scontrol show topology", False)


@pytest.mark.parametrize("out", ["", "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n"])
def test_slurm_without_a_usable_topology(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, CommandResult(0, out, (FIXTURES / "topology/show-none.err").read_text()))
    assert HOST.topology(settings()) is None


@pytest.mark.usefixtures("nodes_of_slurm")
def test_a_file_must_name_slurms_nodes(tmp_path: Path) -> None:
    topology = HOST.topology(settings(topology_file(tmp_path, "node[0-3]")))
    assert topology
    assert topology.is_file
    with pytest.raises(UsageError, match=r"Slurm has no node node4, node5"):
        HOST.topology(settings(topology_file(tmp_path, "node[0-5]")))
    with pytest.raises(UsageError, match=r"node2, node3 of partition gpu missing"):
        HOST.topology(settings(topology_file(tmp_path, "node[0-1]")))


@pytest.mark.usefixtures("nodes_of_slurm")
def test_a_file_needs_only_the_nodes_of_nodelist(tmp_path: Path) -> None:
    file = topology_file(tmp_path, "node[0-1]")
    assert HOST.topology(settings(file, nodes=2, nodelist="node[0-1]"))
    with pytest.raises(UsageError, match=r"node2 of --nodelist missing"):
        HOST.topology(settings(file, nodes=2, nodelist="node[1-2]"))


@pytest.mark.usefixtures("nodes_of_slurm")
def test_a_file_needs_only_the_nodes_of_the_partition(tmp_path: Path) -> None:
    assert HOST.topology(settings(topology_file(tmp_path, "node[0-1]"), nodes=2, partition="short"))


def test_other_launchers_use_a_file_only(tmp_path: Path) -> None:
    assert HOST.topology(settings(launcher="torchrun")) is None
    assert HOST.topology(settings(topology_file(tmp_path, "anything"), launcher="torchrun"))


def test_jobs_of_ranks_have_the_topology(tmp_path: Path) -> None:
    config = settings(topology_file(tmp_path, "n[0-3]"), launcher="torchrun")
    topology = HOST.topology(config)
    plan = make_plan(config, catalog(), NodeGpus(8), topology=topology)
    assert {job.name: job.topology for job in plan.jobs} == {"nodes": None, "ranks": topology}
