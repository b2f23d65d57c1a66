"""--nodelist, --exclude and the topology of a real Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.model import CLUSTER
from tests.paths import FIXTURES
from tests.processes import Program, load
from tests.rig.cluster import Cluster

pytestmark = pytest.mark.cluster

TRIAL = """
cluster: {gpus_per_node: 0}
telemetry: {enabled: false}
slurm: {queue_s: 90}
checks:
  collectives.pairs: {options: {size: 64KiB, seconds: 0.1}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """node0 and node1 on one leaf switch, node2 and node3 on another."""
    if reason := Cluster.reason_unavailable():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"cannot start a Slurm test cluster: {reason}")
    folder = tmp_path_factory.mktemp("rig")
    (folder / "topology.conf").write_text((FIXTURES / "topology/tree.conf").read_text())
    with Cluster(nodes=4, folder=folder, extra="TopologyPlugin=topology/tree") as cluster:
        yield cluster


def started(cluster: Cluster, folder: Path, *options: str | Path) -> Program:
    trial = folder / "pairs.yaml"
    trial.write_text(TRIAL)
    return Program("run", trial, "--launcher", "slurm", "--out", folder / "run", *options, env=cluster.env)


def test_the_listed_nodes_are_measured_with_slurms_topology(cluster: Cluster, tmp_path: Path) -> None:
    code, _, err = started(cluster, tmp_path, "--nodelist", "node[0,2]", "--exclude", "node3").finish()
    assert code == 0, err
    record = load(tmp_path / "run")
    assert [result.nodelist for result in record.results] == ["node[0,2]"]
    assert record.config["cluster"]["nodes"] == 2
    (job,) = record.jobs
    assert job.topology
    assert job.topology.source == "scontrol show topology"
    facts = next(measurement.facts for measurement in record.measurements if measurement.rank == 0)
    assert facts["pairs_by_switch"] == {
        "source": "scontrol show topology",
        "inside a leaf switch": 0,
        "across": 1,
    }
    assert {metric.subject for measurement in record.measurements for metric in measurement.metrics} >= {
        CLUSTER,
        "node0->node2",
    }


def test_a_file_with_other_nodes_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "racks.yaml"
    file.write_text("racks: {A: 'node[0-7]'}")
    code, _, err = started(cluster, tmp_path, "--nodes", "2", "--topology", file).finish()
    assert code == 2
    assert re.search(r"racks.yaml: Slurm has no node node4, node5, node6, node7", err)
