"""The same as test_collectives_gpu_pairs among four real processes over gloo, with faults put in."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from seatrial.checks.fabric.gpu_pairs import CHECK
from seatrial.diagnose.localize import localize
from seatrial.discover.nvlinks import NVLINK
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.report.sections import is_grid
from tests.bench.cluster import Scenario, run
from tests.checks.fabric import fault_driver
from tests.checks.fabric.test_gpu_pairs import BUSBW, alone, failed, verdicts

Runs = dict[str, list[Measurement]]
ONE, TWO, FOUR = ("node0",) * 4, ("node0", "node0", "node1", "node1"), ("node0", "node1", "node2", "node3")
UNLIKE = ("node0", "node0", "node0", "node1")
BRIEF = {"size": "64KiB", "seconds": 0.1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    scenarios = {
        "no_memory": Scenario(CHECK.name, ONE, BRIEF, faults=("no_memory",)),
        "one_node": Scenario(CHECK.name, ONE, BRIEF),
        "two_nodes": Scenario(CHECK.name, TWO, BRIEF),
        "late": Scenario(CHECK.name, ONE, {**BRIEF, "again": True}, faults=("late",)),
        "late_path": Scenario(CHECK.name, ONE, {**BRIEF, "again": True}, faults=("late_between_one_and_two",)),
        "shared": Scenario(CHECK.name, ONE, {**BRIEF, "again": True}, faults=("shared_link",)),
        "corrupt": Scenario(CHECK.name, ONE, BRIEF, faults=("corrupt",)),
        "corrupt_of_two_nodes": Scenario(CHECK.name, TWO, BRIEF, faults=("corrupt",)),
        "alone": Scenario(CHECK.name, FOUR, BRIEF),
        "three_and_one": Scenario(CHECK.name, UNLIKE, BRIEF),
    }
    return run(tmp_path_factory.mktemp("pairs"), fault_driver.__name__, scenarios, fault_driver.RANKS)


def values(measurements: list[Measurement], name: str) -> dict[str, float]:
    assert [one.error for one in measurements] == [None] * len(measurements)
    return {metric.subject: metric.value for one in measurements for metric in one.metrics if metric.name == name}


def as_on_gpus(measurements: list[Measurement]) -> list[Measurement]:
    """The same figures as if NCCL had brought them: those of CPUs that share two cores are not judged."""
    return [_as_on_gpus(one) if one.metrics else one for one in measurements]


def located(measurements: list[Measurement]) -> list[str]:
    return [
        one.subject for one in localize(judge_check(CHECK, measurements, {}, "t"), measurements, {CHECK.name: CHECK})
    ]


def _as_on_gpus(lead: Measurement) -> Measurement:
    facts = {**lead.facts, "backend": "nccl", "joined": NVLINK}
    metrics = tuple(replace(one, name=BUSBW) if one.name == "busbw.64KiB" else one for one in lead.metrics)
    return lead.model_copy(update={"facts": facts, "metrics": metrics})


def test_every_pair_of_a_node_has_its_figure_from_the_first_rank(runs: Runs) -> None:
    lead, *others = runs["one_node"]
    pairs = {f"node0/rank{a}->rank{b}" for a, b in combinations(range(4), 2)}
    assert set(values(runs["one_node"], "busbw.64KiB")) == set(values(runs["one_node"], "path_share")) == pairs
    assert set(values(runs["one_node"], "gpu_share")) == {f"node0/rank{rank}" for rank in range(4)}
    for metric in lead.metrics:
        assert CHECK.metrics[re.sub(r"\..*", ".*", metric.name)] == metric.unit
        assert metric.name in ("shared_links", "wrong_elements") or metric.samples
    assert all(not one.metrics and not one.facts for one in others)
    assert "6 pairs of the 4 ranks of this node in 3 rounds" in str(lead.facts["how"])
    assert Outcome.ERROR not in verdicts(as_on_gpus(runs["one_node"])).values()


def test_every_node_has_its_own_pairs_and_its_own_matrix(runs: Runs) -> None:
    measurements = runs["two_nodes"]
    assert list(values(measurements, "busbw.64KiB")) == ["node0/rank0->rank1", "node1/rank2->rank3"]
    told: list[Any] = [one.facts.get("matrix", {}) for one in measurements]
    assert [one.get("gpus") for one in told] == [["rank0", "rank1"], None, ["rank2", "rank3"], None]
    assert is_grid(told[0])
    (forth, back) = told[2]["gb_s"]
    assert forth[0] is None
    assert forth[1] == back[0] > 0
    assert [[metric.subject for metric in one.metrics if metric.name == "wrong_elements"] for one in measurements] == [
        ["node0"],
        [],
        ["node1"],
        [],
    ]
    for lead in measurements[0], measurements[2]:
        assert (lead.facts["world_size"], lead.facts["nodes"], lead.facts["gpu"]) == (2, 1, None), "of two of a node"
        assert (
            "1 pair of the 2 ranks of this node in 1 round of the circle method, all disjoint pairs of 2 nodes"
            in str(lead.facts["how"])
        )
    assert Outcome.ERROR not in verdicts(as_on_gpus(measurements)).values()
    assert {outcome for (metric, _), outcome in verdicts(measurements).items() if metric != "wrong_elements"} == {
        Outcome.SKIP
    }


def test_a_rank_that_is_late_with_every_partner_is_named(runs: Runs) -> None:
    shares = values(runs["late"], "gpu_share")
    assert min(shares, key=lambda subject: shares[subject]) == "node0/rank2"
    assert shares["node0/rank2"] < 0.5
    assert "node0/rank2" in failed(as_on_gpus(runs["late"]), "gpu_share")
    assert {f"node0/rank{min(2, one)}->rank{max(2, one)}" for one in (0, 1, 3)} <= {*alone(runs["late"])}


def test_a_path_that_is_late_is_tried_alone_and_named(runs: Runs) -> None:
    shares = values(runs["late_path"], "path_share")
    assert min(shares, key=lambda subject: shares[subject]) == "node0/rank1->rank2"
    assert shares["node0/rank1->rank2"] < 0.5
    assert "node0/rank1->rank2" in alone(runs["late_path"])
    assert "node0/rank1->rank2" in located(as_on_gpus(runs["late_path"]))


def test_two_pairs_on_one_link_are_good_alone(runs: Runs) -> None:
    for pair in ("node0/rank0->rank3", "node0/rank1->rank2"):
        rates = alone(runs["shared"])[pair]
        assert rates["alone"] > 1.5 * rates["among others"]
        assert values(runs["shared"], "busbw.64KiB")[pair] == rates["alone"]
    assert values(runs["shared"], "shared_links")["node0"] >= 1


@pytest.mark.parametrize(("name", "received"), [("corrupt", (0, 1, 2)), ("corrupt_of_two_nodes", (2,))])
def test_changed_data_names_who_sent_it_and_who_received_it(runs: Runs, name: str, received: tuple[int, ...]) -> None:
    measurements = runs[name]
    home = "node1" if len(received) == 1 else "node0"
    of_node = {one.subject.partition("/")[0]: one for one in reversed(measurements)}
    assert values(measurements, "wrong_elements") == {**dict.fromkeys(of_node, 0), home: len(received)}
    told: Any = of_node[home].facts["wrong_data"]
    assert {(one["from"], one["to"]) for one in told} == {(f"{home}/rank3", f"{home}/rank{one}") for one in received}
    assert {one["offset"] for one in told} == {fault_driver.WRONG_OFFSET}
    assert all(int(one["xor"], 16) for one in told)
    assert failed(measurements, "wrong_elements") == {home}


def test_what_does_not_fit_on_one_rank_is_told_on_all_of_them(runs: Runs) -> None:
    assert {one.error for one in runs["no_memory"]} == {
        "SeatrialError: no memory for two buffers of 64KiB: rank 1: CUDA out of memory. Tried to allocate 1.00 GiB"
    }


def test_nodes_with_one_gpu_have_no_pairs(runs: Runs) -> None:
    assert {one.skipped for one in runs["alone"]} == {"nodes with one GPU have no pair of them"}


def test_a_node_without_a_pair_among_others_is_not_passed_over(runs: Runs) -> None:
    """Every node is to have as many ranks as the plan says: of one that has a single one something is missing."""
    said = verdicts(as_on_gpus(runs["three_and_one"]))
    assert len(values(runs["three_and_one"], "busbw.64KiB")) == 3
    assert {where for (_, where), outcome in said.items() if outcome is Outcome.ERROR} == {"node1"}
    assert said[BUSBW, "node1"] is Outcome.ERROR
