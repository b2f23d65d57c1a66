from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from seatrial.checks.slurm.nodes import CHECK
from seatrial.model import Outcome
from tests.fakes.slurm import NEWER_NODES, NODES, PARTITIONS, CheckRunner, cluster, recorded, run_check, success

# partition of the nodes in NEWER_NODES
MAIN_IS_DEFAULT = success(recorded("scontrol-show-partition.txt").out.replace("=gpu\n", "=main\n", 1))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckRunner:
    return CheckRunner(CHECK, monkeypatch, tmp_path)


def test_a_healthy_cluster(runner: CheckRunner) -> None:
    assert runner.not_passed(cluster()) == {}


def test_allocated_nodes_are_usable(runner: CheckRunner) -> None:
    """Three nodes are ALLOCATED, and the fourth is drained."""
    assert runner.not_passed(cluster("busy"), nodes=3) == {"in_service node3": Outcome.WARN}


def test_drained_node_below_expected_count(runner: CheckRunner) -> None:
    bad = runner.not_passed(cluster("busy"), nodes=4)
    assert bad == {"in_service node3": Outcome.WARN, "nodes_missing": Outcome.FAIL}


def test_evidence_has_the_drain_reason(runner: CheckRunner) -> None:
    measured = runner.measure(cluster("busy"), (4, 2)).metrics
    evidence = {(metric.name, metric.subject): metric.evidence for metric in measured}
    state = "IDLE+DRAIN: fan broken"
    assert (evidence["in_service", "node3"], evidence["in_service", "node2"]) == (state, None)
    assert evidence["nodes_missing", "cluster"] == {"partition": "gpu", "unusable": {"node3": state}}


def test_down_node_and_drained_node(runner: CheckRunner) -> None:
    bad = {"up node1": Outcome.WARN, "in_service node2": Outcome.WARN}
    assert runner.not_passed(cluster("troubled"), nodes=2) == bad
    assert runner.not_passed(cluster("troubled"), nodes=3) == {**bad, "nodes_missing": Outcome.FAIL}


def test_only_nodes_of_the_trials_jobs_are_counted(runner: CheckRunner) -> None:
    """node1 is down and node2 is drained; partition short has node0 and node1."""
    lists = {"node[0-2]": "node0\nnode1\nnode2", "node1": "node1"}
    replies = {
        **cluster("troubled"),
        **{f"scontrol show hostnames {shlex.quote(names)}": success(nodes) for names, nodes in lists.items()},
    }

    def usable(**options: str) -> tuple[float, float, set[str]]:
        measured = runner.measure(replies, (9, None), **options).metrics
        counts = {metric.name: metric.value for metric in measured if metric.subject == "cluster"}
        return 9 - counts["nodes_missing"], counts["nodes"], {metric.subject for metric in measured} - {"cluster"}

    assert usable() == (2, 4, {"node0", "node1", "node2", "node3"}), "Slurm's default partition"
    assert usable(partition="short") == (1, 2, {"node0", "node1"})
    assert usable(nodelist="node[0-2]") == (1, 3, {"node0", "node1", "node2"})
    assert usable(exclude="node1") == (2, 3, {"node0", "node2", "node3"})
    assert usable(partition="nosuch") == (0, 0, set())


def test_states_of_slurm_24(runner: CheckRunner) -> None:
    replies = {NODES: success(NEWER_NODES.read_text()), PARTITIONS: MAIN_IS_DEFAULT}
    assert runner.not_passed(replies, nodes=3) == {
        "in_service gpu3": Outcome.WARN,
        "up gpu4": Outcome.WARN,
        "free_of_reservations gpu7": Outcome.WARN,
        "up gpu8": Outcome.WARN,
    }


@pytest.mark.parametrize(
    ("reservation", "option", "free"),
    [
        ("week47", None, False),
        ("week47", "week47", True),
        ("maintenance", "week47", False),
        ("", "week47", True),  # no ReservationName: sbatch reports a mismatch
        ("", None, False),
    ],
)
def test_reserved_node_is_usable_with_its_reservation(
    runner: CheckRunner, reservation: str, option: str | None, free: bool
) -> None:
    before, gpu7, after = NEWER_NODES.read_text().partition("NodeName=gpu7 ")
    after = after.replace("\n\n", f"\n   ReservationName={reservation}\n\n", 1) if reservation else after
    replies = {NODES: success(before + gpu7 + after), PARTITIONS: MAIN_IS_DEFAULT}
    values = {
        (metric.name, metric.subject): metric.value
        for metric in runner.measure(replies, (4, None), **({"reservation": option} if option else {})).metrics
    }
    assert values["free_of_reservations", "gpu7"] == free
    assert values["free_of_reservations", "gpu1"]
    assert values["nodes_missing", "cluster"] == 1 - free


def test_no_nodes(runner: CheckRunner) -> None:
    replies = {**cluster(), NODES: success("No nodes in the system\n")}
    bad = runner.not_passed(replies)
    assert bad.pop("nodes_missing") is Outcome.FAIL
    assert set(bad.values()) == {Outcome.ERROR}  # no node has metrics


def test_no_controller(runner: CheckRunner) -> None:
    down = recorded("scontrol-show-nodes-controller-down.txt")
    replies = {**cluster(), NODES: down}
    assert runner.not_passed(replies) == {"login": Outcome.ERROR}


def test_no_slurm_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
