"""Number of bad nodes that pairs can locate, and verdicts on pairs; real transfers: test_real_groups.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.bench.pairs import PairResults, PairTiming
from seatrial.checks.fabric.pairs import (
    CHECK,
    PairOptions,
    _answers,
    _pairs_by_switch,
    _switches_by_node,
)
from seatrial.hardware.pair_search import round_robin
from seatrial.model import Outcome, SeatrialError, Topology
from tests.checks.fabric.verdicts import measurement, outcomes
from tests.checks.training.check_helpers import make_context

GOOD = {
    "best_busbw node0/gpu0": 48,
    "gpu_share node0/gpu0": 1.0,
    "path_share node0->node1": 1.0,
    "shared_paths": 0,
    "wrong_elements": 0,
}
H200 = {"gpu": "NVIDIA H200", "world_size": 2, "nodes": 2}
COMPARABLE = {"backend": "nccl", "comparable": "yes", **H200}


@pytest.mark.parametrize(
    ("nodes", "partners", "bad"),
    [
        (2, 1, 0),  # either node may be at fault
        (3, 2, 1),
        (4, 3, 1),
        (8, 7, 3),  # a majority is good
        (9, 3, 2),
        (1000, 4, 3),  # one of four partners is good
    ],
)
def test_max_locatable_nodes(nodes: int, partners: int, bad: int) -> None:
    rounds = round_robin(nodes, partners + nodes % 2)  # of an odd number, one node is idle in each round
    assert pair_results(rounds, nodes).max_locatable == bad


def test_a_node_that_is_idle_in_one_round_has_fewer_partners() -> None:
    results = pair_results(round_robin(9, 4), 9)
    assert measurement(CHECK, _answers(results, 4, "nccl", {}), "n0/gpu0").facts["max_locatable_nodes"] == 2


LEAVES = {"n0": ("leaf0", "spine"), "n1": ("leaf0", "spine"), "n2": ("leaf1", "spine"), "n3": ("leaf1", "spine")}


def pair_results(rounds: list[list[tuple[int, int]]], nodes: int, slow: tuple[int, ...] = ()) -> PairResults:
    """The results of nodes with one rank each; the pair ``slow`` takes three times as long as the others."""
    timings = [
        PairTiming(rank, partner, (0.03 if {rank, partner} == {*slow} else 0.01,) * 12, None)
        for paired in rounds
        for a, b in paired
        for rank, partner in ((a, b), (b, a))
    ]
    members = {f"n{rank}": (rank,) for rank in range(nodes)}
    return PairResults(tuple(timings), 2**20, members, [f"{node}/gpu0" for node in members])


def test_switches_of_a_slow_path_are_evidence() -> None:
    results = pair_results(round_robin(4, 3), 4, slow=(1, 2))
    counts = _pairs_by_switch(results, LEAVES, Topology(source="t", switches=LEAVES))
    assert counts.value == {"source": "t", "inside a leaf switch": 2, "across": 4}
    for switches_by_node, slow in ((LEAVES, {"n1->n2": "leaf0 – spine – leaf1"}), ({}, {})):
        metrics = measurement(CHECK, _answers(results, 3, "nccl", switches_by_node), "n0/gpu0").metrics
        shared = [metric.evidence for metric in metrics if metric.name == "shared_paths"]
        assert shared == [{"slow_paths": slow, "single_pair": {}}]
        paths = {metric.subject: metric.evidence for metric in metrics if metric.name == "path_share"}
        evidence = {"switches": slow["n1->n2"], "single_pair": None} if slow else None
        assert (paths["n1->n2"], paths["n0->n1"]) == (evidence, None)


def switches_on(node: str, topology: Topology | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """The result of ``_switches_by_node`` in a group of one process on ``node``."""
    monkeypatch.setattr("seatrial.bench.rank.gather", lambda value: [value])
    context = replace(make_context(Path()), node=node, topology=topology)
    return _switches_by_node(context, [node])


def test_switches_by_host_name_or_slurms_name(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(source="t", switches=LEAVES)
    assert switches_on("n1.cluster.local", topology, monkeypatch) == {"n1.cluster.local": ("leaf0", "spine")}
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert switches_on("instance2026", topology, monkeypatch) == {"instance2026": ("leaf1", "spine")}
    assert switches_on("n1", None, monkeypatch) == {}


def test_a_file_must_have_every_node_and_slurm_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SeatrialError, match=r"topology racks\.yaml lacks n9"):
        switches_on("n9", Topology(source="racks.yaml", switches=LEAVES), monkeypatch)
    assert switches_on("n9", Topology(source="t", switches=LEAVES, is_file=False), monkeypatch) == {"n9": ()}


@pytest.mark.parametrize(
    ("metric", "value", "outcome"),
    [
        ("gpu_share node0/gpu0", 0.89, Outcome.FAIL),
        ("path_share node0->node1", 0.89, Outcome.FAIL),
        ("shared_paths", 1, Outcome.WARN),
        ("wrong_elements", 1, Outcome.FAIL),
    ],
)
def test_slow_nodes_and_paths_fail_and_shared_uplinks_warn(metric: str, value: float, outcome: Outcome) -> None:
    judged = outcomes(CHECK, GOOD, **COMPARABLE)
    judged.pop("best_busbw")  # its reference is the rate of the ports: tests/judge/test_groups.py
    assert set(judged.values()) == {Outcome.PASS}
    assert (
        outcomes(CHECK, {**GOOD, metric: value}, **COMPARABLE).items()
        >= {**judged, metric.partition(" ")[0]: outcome}.items()
    )


@pytest.mark.parametrize("facts", [{"backend": "gloo", "comparable": "yes"}, {"backend": "nccl", "comparable": "no"}])
def test_two_nodes_or_cpus_are_judged_on_data_only(facts: dict[str, str]) -> None:
    slow = {
        "best_busbw node0/gpu0": 1,
        "gpu_share node0/gpu0": 0.1,
        "path_share node0->node1": 0.1,
        "shared_paths": 3,
        "wrong_elements": 1,
    }
    judged = outcomes(CHECK, slow, **facts, **H200)
    judged.pop("best_busbw")
    assert judged.pop("wrong_elements") is Outcome.FAIL
    assert set(judged.values()) == {Outcome.SKIP}


def test_size_option_accepts_units() -> None:
    assert PairOptions.model_validate({"size": "1MiB"}).size == 2**20
