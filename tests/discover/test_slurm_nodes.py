"""Nodes that Slurm cannot give to a job, from recorded output of scontrol."""

from __future__ import annotations

import shlex

import pytest

from seatrial.config.schema import JobPlacement
from seatrial.discover import slurm_output
from seatrial.discover.slurm_facts import JobRecord, SlurmNode
from seatrial.discover.slurm_nodes import (
    CandidateNodes,
    PendingJob,
    candidate_nodes,
    gpus_per_node,
    node_state,
    placement_of_smaller_job,
)
from seatrial.model import UsageError
from tests.fakes.slurm import NEWER_NODES, NODES, FakeSlurm, Reply, cluster, failure, recorded, success


def candidates(node: SlurmNode, reservation: str | None = None) -> CandidateNodes:
    return CandidateNodes((node,), "gpu", reservation)


def missing(nodes: CandidateNodes, needed: int = 4) -> dict[str, str]:
    shortage = nodes.shortage(needed)
    return {node.name: node.state for node in shortage.missing} if shortage else {}


def answers(state: str, **hostlists: str) -> dict[str, Reply]:
    lists = {f"scontrol show hostnames {shlex.quote(nodes)}": success(names) for nodes, names in hostlists.items()}
    return {**cluster(state), **lists}


def test_down_and_drained_nodes_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(cluster("troubled")).install(monkeypatch)
    nodes = candidate_nodes(JobPlacement())
    assert missing(nodes) == {
        "node1": "DOWN+NOT_RESPONDING: Not responding; port 6818 of node1 refuses connections",
        "node2": "IDLE+DRAIN: fan broken",
    }
    assert nodes.shortage(2) is None, "two others are enough"


def test_busy_nodes_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(cluster("busy")).install(monkeypatch)
    nodes = candidate_nodes(JobPlacement())
    assert "ALLOCATED" in {node.state for node in nodes.nodes}
    assert missing(nodes) == {"node3": "IDLE+DRAIN: fan broken"}


def test_only_nodes_of_the_partition_and_the_node_lists_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(answers("troubled", node2="node2")).install(monkeypatch)
    assert {node.name for node in candidate_nodes(JobPlacement(partition="short")).nodes} == {"node0", "node1"}
    assert {node.name for node in candidate_nodes(JobPlacement(nodelist="node2")).nodes} == {"node2"}
    assert {node.name for node in candidate_nodes(JobPlacement(exclude="node2")).nodes} == {"node0", "node1", "node3"}


@pytest.mark.parametrize(
    ("constraint", "names"),
    [
        ("h200", {"gpu1", "gpu2"}),
        ("h200&ib", {"gpu1"}),
        ("h200|a100", {"gpu1", "gpu2", "gpu3"}),
        ("moon", set()),
        ("[h200*1&a100*1]", {"gpu1", "gpu2", "gpu3", "gpu4"}),  # only Slurm evaluates other constraints
    ],
)
def test_only_nodes_with_the_features_are_candidates(
    monkeypatch: pytest.MonkeyPatch, constraint: str, names: set[str]
) -> None:
    features = {"gpu1": "h200,ib", "gpu2": "h200", "gpu3": "a100,ib", "gpu4": "(null)"}
    records = NEWER_NODES.read_text().split("\n\n")[: len(features)]
    texts = (record.replace("=h200,ib", f"={each}") for record, each in zip(records, features.values(), strict=True))
    FakeSlurm({NODES: success("\n\n".join(texts))}).install(monkeypatch)
    nodes = candidate_nodes(JobPlacement(partition="main", constraint=constraint)).nodes
    assert {node.name for node in nodes} == names


def test_a_pending_job_gives_partition_node_lists_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = slurm_output.parse_jobs(recorded("scontrol-show-jobs-node-not-available.txt").out)
    (job,) = (job for job in jobs if job.id == "37")
    assert (job.partition, job.requested_nodes, job.excluded_nodes, job.node_count) == ("gpu", "node1", "", 1)
    FakeSlurm(answers("troubled", node1="node1")).install(monkeypatch)
    assert list(missing(candidate_nodes(JobPlacement(), job), 1)) == ["node1"]


@pytest.mark.parametrize(
    ("state", "is_missing"),
    [
        ("IDLE+NOT_RESPONDING", False),  # becomes DOWN after SlurmdTimeout
        ("DOWN+REBOOT_ISSUED", False),
        ("IDLE+DRAIN+REBOOT_REQUESTED", False),
        ("IDLE+CLOUD+POWERED_DOWN", False),
        ("ALLOCATED+COMPLETING", False),
        ("ALLOCATED+DRAIN", True),
        ("IDLE+MAINTENANCE+RESERVED", True),
        ("IDLE+INVALID_REG", True),
        ("FAILING", True),
    ],
)
def test_only_nodes_that_do_not_return_by_themselves_are_missing(state: str, is_missing: bool) -> None:
    text = NEWER_NODES.read_text().replace("State=IDLE ", f"State={state} ", 1)
    node = slurm_output.parse_nodes(text)[0]
    assert bool(missing(candidates(node), 1)) is is_missing


def test_nodes_of_the_trials_own_reservation_are_candidates() -> None:
    (node,) = (node for node in slurm_output.parse_nodes(NEWER_NODES.read_text()) if node.name == "gpu7")
    assert missing(candidates(node), 1)
    assert not missing(candidates(node, reservation="acceptance"), 1)


def test_a_partition_without_nodes_gives_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(cluster("troubled")).install(monkeypatch)
    assert candidate_nodes(JobPlacement(), JobRecord(id="7", state="PENDING", partition="nosuch")).shortage(4) is None


def test_gpus_per_node_of_the_candidates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """node0 and node1 of partition short have two GPUs; of the default partition gpu, node3 has one."""
    before, node3, after = recorded("scontrol-show-nodes-healthy.txt").out.partition("NodeName=node3 ")
    nodes = success(before + node3 + after.replace("Gres=gpu:fake:2", "Gres=gpu:fake:1", 1))
    FakeSlurm({**answers("healthy", **{"node[0-2]": "node0\nnode1\nnode2"}), NODES: nodes}).install(monkeypatch)
    assert gpus_per_node(JobPlacement(partition="short")) == 2
    assert gpus_per_node(JobPlacement(nodelist="node[0-2]")) == 2
    assert gpus_per_node(JobPlacement(partition="nosuch")) == 0
    with pytest.raises(UsageError, match=r"nodes of partition gpu have different numbers of GPUs \(\[1, 2]\)"):
        gpus_per_node(JobPlacement())


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(3, {"nodelist": "node[0-2]", "exclude": None}), (1, {"nodelist": None, "exclude": "node3"})],
)
def test_a_smaller_job_excludes_the_nodes_outside_the_list(
    monkeypatch: pytest.MonkeyPatch, nodes: int, expected: dict[str, str | None]
) -> None:
    FakeSlurm(answers("healthy", **{"node[0-2]": "node0\nnode1\nnode2"})).install(monkeypatch)
    placement = JobPlacement(partition="gpu", nodelist="node[0-2]")
    assert placement_of_smaller_job(placement, nodes) == placement.model_copy(update=expected)


def test_a_smaller_job_without_a_list_needs_no_query() -> None:
    placement = JobPlacement(partition="gpu", exclude="node3")
    assert placement_of_smaller_job(placement, 1) == placement


@pytest.mark.parametrize(
    ("reason", "waited_s", "needed", "never"),
    [
        ("PartitionDown", 0, 1, True),
        ("Resources", 0, 3, False),
        ("Resources", 4, 2, False),
        ("Resources", 4, 3, True),  # node1 is down, node2 is drained
    ],
)
def test_a_pending_job_that_never_starts(
    monkeypatch: pytest.MonkeyPatch, reason: str, waited_s: float, needed: int, never: bool
) -> None:
    fake = FakeSlurm(cluster("troubled")).install(monkeypatch)
    pending = PendingJob(JobPlacement())
    job = JobRecord(id="7", state="PENDING", reason=reason)
    assert pending.never_starts(job, waited_s, needed) is never
    assert pending.never_starts(job, waited_s, needed) is never
    assert fake.commands.count(NODES) == (waited_s > 3), "one query within 20 s"
    assert ("2 of 4 nodes" in pending.reason(job, needed)) is (never and waited_s > 3)


def test_a_host_name_with_a_domain_is_found_by_its_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = failure("Node node2.example.com not found")
    nodes = recorded("scontrol-show-nodes-troubled.txt")
    replies: dict[str, Reply] = {
        "scontrol show node node2.example.com": unknown,
        "scontrol show node node2": nodes,
        "scontrol show node other": failure("Node other not found"),
    }
    FakeSlurm(replies).install(monkeypatch)
    state = "IDLE+DRAIN: fan broken; port 6818 of node2 refuses connections"
    assert node_state("node2.example.com") == ("node2", state), "its ranks are silent"
    assert node_state("other") == ("other", "")
