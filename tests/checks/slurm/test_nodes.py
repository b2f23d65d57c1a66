from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.slurm.nodes import CHECK
from seatrial.model import Outcome
from tests.fakes.slurm import NEWER_NODES, NODES, CheckRunner, cluster, recorded, run_check, success


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckRunner:
    return CheckRunner(CHECK, monkeypatch, tmp_path)


def test_a_healthy_cluster(bench: CheckRunner) -> None:
    assert bench.not_passed(cluster()) == {}


def test_nodes_with_jobs_on_them_are_usable(bench: CheckRunner) -> None:
    """Three nodes are ALLOCATED there, and the fourth is drained."""
    assert bench.not_passed(cluster("busy"), nodes=3) == {"in_service node3": Outcome.WARN}


def test_a_drained_node_of_those_promised(bench: CheckRunner) -> None:
    bad = bench.not_passed(cluster("busy"), nodes=4)
    assert bad == {"in_service node3": Outcome.WARN, "nodes_missing": Outcome.FAIL}


def test_the_reason_is_told(bench: CheckRunner) -> None:
    verdicts = {v.metric: v for v in bench.verdicts(cluster("busy")) if v.outcome in (Outcome.FAIL, Outcome.WARN)}
    for metric in ("in_service", "nodes_missing"):
        assert '{"node3": "IDLE+DRAIN: fan broken"}' in verdicts[metric].evidence


def test_a_dead_node_and_a_drained_one(bench: CheckRunner) -> None:
    bad = {"up node1": Outcome.FAIL, "in_service node2": Outcome.WARN}
    assert bench.not_passed(cluster("troubled"), nodes=2) == bad
    assert bench.not_passed(cluster("troubled"), nodes=3) == {**bad, "nodes_missing": Outcome.FAIL}


def test_states_of_a_newer_slurm(bench: CheckRunner) -> None:
    assert bench.not_passed({NODES: success(NEWER_NODES.read_text())}, nodes=3) == {
        "in_service gpu3": Outcome.WARN,
        "up gpu4": Outcome.FAIL,
        "free_of_reservations gpu7": Outcome.WARN,
        "up gpu8": Outcome.FAIL,
    }


@pytest.mark.parametrize(
    ("holder", "ours", "free"),
    [
        ("week47", None, False),
        ("week47", "week47", True),
        ("maintenance", "week47", False),
        ("", "week47", True),  # Slurm does not say which: the job will tell
        ("", None, False),
    ],
)
def test_a_reserved_node_is_usable_by_who_names_its_reservation(
    bench: CheckRunner, holder: str, ours: str | None, free: bool
) -> None:
    before, gpu7, after = NEWER_NODES.read_text().partition("NodeName=gpu7 ")
    after = after.replace("\n\n", f"\n   ReservationName={holder}\n\n", 1) if holder else after
    replies = {NODES: success(before + gpu7 + after)}
    found = {
        (one.name, one.subject): one.value
        for one in bench.measure(replies, (4, None), **({"reservation": ours} if ours else {})).metrics
    }
    assert found["free_of_reservations", "gpu7"] == free
    assert found["free_of_reservations", "gpu1"]
    assert found["nodes_usable", "cluster"] == 3 + free
    assert found["nodes_missing", "cluster"] == 1 - free


def test_no_nodes_at_all(bench: CheckRunner) -> None:
    replies = {NODES: success("No nodes in the system\n")}
    bad = bench.not_passed(replies)
    assert bad.pop("nodes_missing") is Outcome.FAIL
    assert set(bad.values()) == {Outcome.ERROR}  # nobody measured the nodes


def test_no_controller(bench: CheckRunner) -> None:
    down = recorded("scontrol-show-nodes-controller-down.txt")
    replies = {**cluster(), NODES: down}
    assert bench.not_passed(replies) == {"login": Outcome.ERROR}


def test_no_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
