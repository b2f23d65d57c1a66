"""Jobs that the user starts with torchrun on each node; `run --resume` collects their results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seatrial.model import DecisionValue, Outcome
from tests.processes import call, load, run
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

TRIAL = """
telemetry: {enabled: false}
checks:
  host.inventory:
  collectives.all_reduce: {options: {sizes: [1MiB], seconds_per_size: 0.2}}
"""


def prepared(folder: Path) -> Path:
    """Render a run directory for two nodes with two processes each."""
    (folder / "cluster.yaml").write_text(TRIAL)
    options = ("--nodes", "2", "--gpus-per-node", "0", "--out", folder / "run")
    code, out, err = call("render", "torchrun", folder / "cluster.yaml", *options)
    assert code == 0, err
    scripts = [(folder / "run" / "jobs" / name / "torchrun.sh").read_text() for name in ("nodes", "ranks")]
    assert out == "".join(f"{text}\n" for text in scripts)
    return folder / "run"


def start_by_hand(cluster: Cluster, run_dir: Path, job: str) -> None:
    """Run the script on each node at the same time."""
    command = ["env", "MASTER_ADDR=node0", "bash", str(run_dir / "jobs" / job / "torchrun.sh")]
    with ThreadPoolExecutor() as pool:
        ended = pool.map(lambda node: cluster.run_on(node, [*command, node.removeprefix("node")], 120), cluster.nodes)
    for result in ended:
        assert result.returncode == 0, result.stderr


def test_resume_collects_ranks_started_by_the_user(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """A job that was not started is one cause with the command; --resume after the start completes it."""
    cluster, run_dir = make_cluster(2), prepared(tmp_path)
    start_by_hand(cluster, run_dir, "nodes")
    assert run("run", "--resume", run_dir)[0] == 3
    record = load(run_dir)
    (finding,) = record.findings
    assert {item.check for item in record.verdicts if item.outcome is Outcome.ERROR} == {"collectives.all_reduce"}
    assert finding.first_command == f"MASTER_ADDR=HOST bash {run_dir}/jobs/ranks/torchrun.sh NODE"
    assert "jobs/nodes/" not in finding.evidence, "this job is complete"
    start_by_hand(cluster, run_dir, "ranks")
    code, out, err = run("run", "--resume", run_dir)
    assert code == 0, err
    record = load(run_dir)
    assert record.decision.value is DecisionValue.ACCEPTED
    ranks = {
        measurement.subject for measurement in record.measurements if measurement.check == "collectives.all_reduce"
    }
    assert ranks == {"node0/rank0", "node0/rank1", "node1/rank2", "node1/rank3"}
    assert {measurement.subject for measurement in record.measurements if measurement.check == "host.inventory"} == {
        "node0",
        "node1",
    }
    assert "2 nodes × 2 processes · torchrun" in out
