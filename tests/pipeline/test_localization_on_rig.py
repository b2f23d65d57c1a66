"""The search for slow nodes on a real Slurm test cluster: the node with a shaped link is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import Program, load
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

CHECK, METRIC = "collectives.all_reduce", "busbw.1MiB"
TRIAL = f"""
retry: false
telemetry: {{enabled: false}}
checks:
  {CHECK}: {{options: {{sizes: [1MiB], seconds_per_size: 0.5}}, expect: {{{METRIC}: "> 1e6 GB/s"}}}}
"""


@pytest.mark.timeout(400)
def test_node_with_a_slow_link_explains_the_slow_all_reduce(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(4)
    cluster.slow_link("node2", "200mbit")
    (tmp_path / "t.yaml").write_text(TRIAL)
    arguments = ("run", tmp_path / "t.yaml", "--launcher", "slurm", "--nodes", "4", "--gpus-per-node", "0")
    code, output, err = Program(*arguments, "--out", tmp_path / "run", env=cluster.env).finish(300)
    assert code == 1, output + err
    trial = load(tmp_path / "run")
    (finding,) = [finding for finding in trial.findings if finding.cause.startswith("slow_")]
    assert (finding.cause, finding.subject, finding.confidence) == ("slow_node", "node2", "high")
    assert (CHECK, METRIC) in {(each.check, each.metric) for each in finding.explains}
    assert finding.first_command.startswith("srun --nodelist=node2 ")
    assert [result.job for result in trial.results] == ["ranks", "localization"]
    assert {measurement.check for measurement in trial.measurements} == {CHECK}
