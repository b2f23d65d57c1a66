"""The nodes that a run tests, where some of the trial are missing or lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.config.schema import Cluster, Config
from seatrial.model import Job, JobResult, JobState, MissingNode
from seatrial.pipeline.results import TrialResults
from seatrial.pipeline.run import _nodes_to_test, _on_same_nodes
from seatrial.pipeline.run_directory import RunDir
from tests.fakes.slurm import FakeSlurm, cluster
from tests.launch.scripted import GPU_CHECK, job
from tests.pipeline.fixtures import SilentDisplay, request

FOUR = job(GPU_CHECK).model_copy(update={"nodes": 4, "expected_nodes": 4})


def results(folder: Path, min_nodes: int | None, *lost: str) -> TrialResults:
    """Return the results of a run on four nodes in which a job lost these nodes."""
    config = Config(name="t", launcher="slurm", cluster=Cluster(nodes=4, min_nodes=min_nodes), checks={})
    run_dir = RunDir.create(folder / "run", request())
    found = TrialResults(run_dir, config, SilentDisplay())
    ended = JobResult(job="nodes", attempt=1, launcher="slurm", state=JobState.HUNG, started=0, seconds=1, startup_s=1)
    missing = tuple(MissingNode(name=name, state="no heartbeat") for name in lost)
    found.add_job_result(ended.model_copy(update={"nodelist": "n[0-3]" if lost else "", "missing_nodes": missing}))
    return found


@pytest.mark.parametrize(("min_nodes", "nodes"), [(None, 4), (3, 4), (2, 2)])
def test_with_min_nodes_the_nodes_that_are_there_are_tested(
    min_nodes: int | None, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSlurm(cluster("troubled")).install(monkeypatch)  # node1 is down, node2 drained
    found = results(tmp_path, min_nodes)
    assert _nodes_to_test(found) == nodes
    assert list(found.missing_nodes) == ([] if min_nodes is None else ["node1", "node2"])


@pytest.mark.parametrize(
    ("min_nodes", "expected"), [(None, ("ranks", 4, "n1")), (3, ("ranks-on3", 3, "n1")), (4, ("ranks", 4, "n1"))]
)
def test_later_jobs_run_without_a_lost_node(
    min_nodes: int | None, expected: tuple[str, int, str], tmp_path: Path
) -> None:
    found = results(tmp_path, min_nodes, "n1")
    later = _on_same_nodes(FOUR, found, 4)
    assert (later.name, later.nodes, later.exclude) == expected
    retry = FOUR.model_copy(update={"retry": 1})
    assert _on_same_nodes(retry, found, 4).nodes == 4, "a retry needs the nodes of the first measurement"


def test_a_missing_node_that_no_job_had_is_not_excluded(tmp_path: Path) -> None:
    found = results(tmp_path, None)
    found.add_missing_nodes([MissingNode(name="n1", state="IDLE+DRAIN")])
    same: Job = _on_same_nodes(FOUR, found, 4)
    assert same == FOUR
