"""Nodes that Slurm cannot give to a job, from recorded output of scontrol."""

from __future__ import annotations

import pytest

from seatrial.config.schema import Cluster, Config, Slurm
from seatrial.discover import slurm_output
from seatrial.discover.slurm_facts import JobRecord
from seatrial.launch.slurm_nodes import CandidateNodes, candidate_nodes, node_state
from tests.fakes.slurm import NEWER_NODES, FakeSlurm, Reply, cluster, failure, recorded, success


def settings(**slurm: object) -> Config:
    return Config(name="t", checks={}, cluster=Cluster(nodes=4), slurm=Slurm.model_validate(slurm))


def missing(nodes: CandidateNodes, needed: int = 4) -> dict[str, str]:
    shortage = nodes.shortage(needed)
    return {node.name: node.state for node in shortage.missing} if shortage else {}


def answers(state: str, **hostlists: str) -> dict[str, Reply]:
    lists = {f"scontrol show hostnames {nodes}": success(names) for nodes, names in hostlists.items()}
    return {**cluster(state), **lists}


def test_down_and_drained_nodes_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(cluster("troubled")).install(monkeypatch)
    nodes = candidate_nodes(settings())
    assert missing(nodes) == {
        "node1": "DOWN+NOT_RESPONDING: Not responding; port 6818 of node1 refuses connections",
        "node2": "IDLE+DRAIN: fan broken",
    }
    assert nodes.shortage(2) is None, "two others are enough"


def test_busy_nodes_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(cluster("busy")).install(monkeypatch)
    nodes = candidate_nodes(settings())
    assert "ALLOCATED" in {node.state for node in nodes.nodes}
    assert missing(nodes) == {"node3": "IDLE+DRAIN: fan broken"}


def test_only_nodes_of_the_partition_and_the_node_lists_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(answers("troubled", node2="node2")).install(monkeypatch)
    assert {node.name for node in candidate_nodes(settings(partition="short")).nodes} == {"node0", "node1"}
    assert {node.name for node in candidate_nodes(settings(nodelist="node2")).nodes} == {"node2"}
    assert {node.name for node in candidate_nodes(settings(exclude="node2")).nodes} == {"node0", "node1", "node3"}
    monkeypatch.setenv("SBATCH_PARTITION", "short")
    assert {node.name for node in candidate_nodes(settings()).nodes} == {"node0", "node1"}


def test_a_pending_job_gives_partition_node_lists_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = slurm_output.parse_jobs(recorded("scontrol-show-jobs-node-not-available.txt").out)
    (job,) = (job for job in jobs if job.id == "37")
    assert (job.partition, job.requested_nodes, job.excluded_nodes, job.node_count) == ("gpu", "node1", "", 1)
    FakeSlurm(answers("troubled", node1="node1")).install(monkeypatch)
    assert list(missing(candidate_nodes(settings(), job), 1)) == ["node1"]


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
    assert bool(missing(CandidateNodes((node,), settings()), 1)) is is_missing


def test_nodes_of_the_trials_own_reservation_are_candidates() -> None:
    (node,) = (node for node in slurm_output.parse_nodes(NEWER_NODES.read_text()) if node.name == "gpu7")
    assert missing(CandidateNodes((node,), settings()), 1)
    assert not missing(CandidateNodes((node,), settings(reservation="acceptance")), 1)


def test_a_partition_without_nodes_gives_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(cluster("troubled")).install(monkeypatch)
    assert candidate_nodes(settings(), JobRecord(id="7", state="PENDING", partition="nosuch")).shortage(4) is None


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
