"""Pairs, rails and scaling among four real processes that take each other for several nodes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from seatrial.bench.collectives import AllocationError, Timings
from seatrial.bench.data_check import Mismatch
from seatrial.bench.subgroups import GroupResult
from seatrial.checks import catalog
from seatrial.checks.fabric import _results as figures
from seatrial.checks.fabric import each_node, rails, scaling
from seatrial.checks.fabric import pairs as collectives_pairs
from seatrial.diagnose.localize import localize
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Finding, Measurement, Metric, Outcome, Threshold
from tests.bench.cluster import Scenario, run
from tests.checks.fabric import fault_driver

Runs = dict[str, list[Measurement]]
FOUR = ("node0", "node1", "node2", "node3")
TWO = ("node0", "node0", "node1", "node1")
UNLIKE = ("node0", "node0", "node0", "node1")
ONE = ("node0",) * 4
PAIRS, RAILS, SCALING = (check.CHECK.name for check in (collectives_pairs, rails, scaling))
EACH_NODE = each_node.CHECK.name
BRIEF = {"size": "64KiB", "seconds": 0.1}
BOTH = {"sizes": ["4B", "8B", "64KiB"], "placement": "both", "dtype": "bfloat16", "seconds_per_size": 0.05}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    scenarios = {
        "pairs": Scenario(PAIRS, FOUR, BRIEF),
        "one_round": Scenario(PAIRS, FOUR, {**BRIEF, "rounds": 1}),
        "two_nodes": Scenario(PAIRS, TWO, BRIEF),
        "late_node": Scenario(PAIRS, FOUR, BRIEF, faults=("late",)),
        "late_path": Scenario(PAIRS, FOUR, {**BRIEF, "again": 1}, faults=("late_between_one_and_two",)),
        "corrupt": Scenario(PAIRS, FOUR, BRIEF, faults=("corrupt",)),
        "rails": Scenario(RAILS, TWO, BRIEF),
        "scaling": Scenario(SCALING, FOUR, BRIEF),
        "scaling_of_two": Scenario(SCALING, TWO, BRIEF),
        "each_node": Scenario(EACH_NODE, TWO, BRIEF),
        "each_node_of_three_and_one": Scenario(EACH_NODE, UNLIKE, BRIEF),
        "one_node_wrong": Scenario(EACH_NODE, TWO, BRIEF, faults=("wrong_sums",)),
        "no_room": Scenario(EACH_NODE, TWO, BRIEF, faults=("no_memory",)),
        "little_room": Scenario(EACH_NODE, TWO, BRIEF, faults=("little_memory",)),
        "one_rank_a_node": Scenario(EACH_NODE, FOUR, BRIEF),
        "both_placements": Scenario("collectives.all_gather", ONE, BOTH),
        "pairs_of_one": Scenario(PAIRS, ONE),
        "rails_of_one": Scenario(RAILS, ONE),
        "scaling_of_one": Scenario(SCALING, ONE),
        "each_node_of_one": Scenario(EACH_NODE, ONE),
    }
    out = tmp_path_factory.mktemp("scenes")
    return run(out, fault_driver.__name__, scenarios, fault_driver.RANKS)


def values(measurements: list[Measurement], name: str) -> dict[str, float]:
    assert [one.error for one in measurements] == [None] * len(measurements)
    return {metric.subject: metric.value for metric in measurements[0].metrics if metric.name == name}


def facts(measurements: list[Measurement]) -> dict[str, Any]:
    return measurements[0].facts


def outcomes(measurements: list[Measurement]) -> dict[str, set[Outcome]]:
    found: dict[str, set[Outcome]] = {}
    for verdict in judge_check(catalog()[measurements[0].check], measurements, {}, "t"):
        found.setdefault(verdict.metric, set()).add(verdict.outcome)
    return found


def on_a_fabric(measurements: list[Measurement]) -> list[Measurement]:
    """The same figures as if NCCL had brought them: those of CPUs that share two cores are not judged."""
    return [one.model_copy(update={"facts": {**one.facts, "backend": "nccl"}}) for one in measurements]


def found(measurements: list[Measurement]) -> list[Finding]:
    judged = on_a_fabric(measurements)
    check = catalog()[judged[0].check]
    return list(localize(judge_check(check, judged, {}, "t"), judged, catalog()))


@pytest.mark.parametrize("name", ["pairs_of_one", "rails_of_one", "scaling_of_one", "each_node_of_one"])
def test_one_node_is_a_skip_everywhere(runs: Runs, name: str) -> None:
    assert all("one node" in str(one.skipped) for one in runs[name])


@pytest.mark.parametrize("name", ["pairs", "rails", "scaling", "two_nodes"])
def test_all_that_is_measured_is_declared_and_of_the_first_rank(runs: Runs, name: str) -> None:
    lead, *others = runs[name]
    declared = catalog()[lead.check].metrics
    for metric in lead.metrics:
        assert declared[re.sub(r"\..*", ".*", metric.name)] == metric.unit
    assert all(not one.metrics and not one.facts for one in others)


@pytest.mark.parametrize("name", ["pairs", "two_nodes", "rails", "scaling"])
def test_a_rehearsal_on_cpus_judges_the_data_alone(runs: Runs, name: str) -> None:
    judged = outcomes(runs[name])
    assert judged.pop("wrong_elements") == {Outcome.PASS}
    assert set.union(set(), *judged.values()) <= {Outcome.SKIP}


def test_every_pair_of_nodes_has_its_figure(runs: Runs) -> None:
    pairs = {f"node{a}->node{b}" for a in range(4) for b in range(a + 1, 4)}
    assert set(values(runs["pairs"], "pair_busbw")) == set(values(runs["pairs"], "pair_share")) == pairs
    assert set(values(runs["pairs"], "best_busbw")) == {f"node{rank}/rank{rank}" for rank in range(4)}
    matrix = facts(runs["pairs"])["pair_matrix"]
    assert matrix["nodes"] == list(FOUR)
    assert all((row[i] is None) and sum(map(bool, row)) == 3 for i, row in enumerate(matrix["gb_s"]))
    assert "up to 1 bad node is told apart" in facts(runs["pairs"])["how"]


def test_one_round_is_one_partner_each(runs: Runs) -> None:
    assert set(values(runs["one_round"], "pair_busbw")) == {"node0->node3", "node1->node2"}
    assert facts(runs["one_round"])["distinguishable"] == 0


def test_two_nodes_do_not_outvote_each_other(runs: Runs) -> None:
    assert list(values(runs["two_nodes"], "pair_busbw")) == ["node0->node1"]
    judged = outcomes(on_a_fabric(runs["two_nodes"]))
    assert judged["best_share"] == judged["pair_share"] == {Outcome.SKIP}
    assert not found(runs["two_nodes"])


def test_a_node_that_is_slow_with_every_partner_is_named(runs: Runs) -> None:
    best = values(runs["late_node"], "best_share")
    assert min(best, key=lambda subject: best[subject]) == "node2/rank2"
    assert best["node2/rank2"] < 0.5
    named = [one for one in found(runs["late_node"]) if one.title == "A node is slow to every other node"]
    assert "node2" in [one.subject for one in named]
    assert Outcome.FAIL in outcomes(on_a_fabric(runs["late_node"]))["best_share"]


def test_a_path_that_is_slow_between_two_good_nodes_is_named(runs: Runs) -> None:
    shares = values(runs["late_path"], "pair_share")
    assert min(shares, key=lambda subject: shares[subject]) == "node1->node2"
    assert shares["node1->node2"] < 0.5
    assert list(facts(runs["late_path"])["alone"]) == ["node1->node2"]  # tried again, and as slow
    assert "node1->node2" in [one.subject for one in found(runs["late_path"]) if one.title.startswith("The path")]


def test_changed_data_fails_and_its_sender_has_no_good_partner(runs: Runs) -> None:
    measured = runs["corrupt"]
    assert values(measured, "wrong_elements") == {"cluster": 3}
    assert outcomes(measured)["wrong_elements"] == {Outcome.FAIL}
    wrong = facts(measured)["wrong_data"]
    assert {(one["from"], one["to"]) for one in wrong} == {("node3/rank3", f"node{i}/rank{i}") for i in range(3)}
    assert {one["offset"] for one in wrong} == {fault_driver.WRONG_OFFSET}
    assert values(measured, "best_share")["node3/rank3"] == 0
    assert "node3" in [one.subject for one in found(measured)]


def test_both_placements_have_their_figures_and_small_sizes_their_true_names(runs: Runs) -> None:
    measured = runs["both_placements"]
    for placement in ("", "_in_place"):
        assert set(values(measured, f"busbw{placement}.8B")) == {"cluster"}  # an element a rank is the least there is
        assert not values(measured, f"busbw{placement}.4B")
        assert facts(measured)[f"sizes{placement}"] == {"8B": 8, "64KiB": 2**16}
        for told in ("iterations", "spread", "drift_percent"):
            assert list(facts(measured)[f"{told}{placement}"]) == ["8B", "64KiB"]
    assert values(measured, "wrong_elements") == {"cluster": 0}


def test_a_rail_is_the_same_rank_of_every_node(runs: Runs) -> None:
    assert set(values(runs["rails"], "rail_busbw")) == {"rail0", "rail1"}
    assert rails.group_by_rail({"a": (0, 1, 2), "b": (3, 4, 5)}) == [[0, 3], [1, 4], [2, 5]]
    assert facts(runs["rails"])["comparable"] == "no"  # of two, nobody knows which is right


def test_what_is_wrong_in_a_group_is_told_to_the_bit() -> None:
    timings = Timings(windows=((1.0, 1.0),), per_window=1, warmup=1)
    bad, good = GroupResult((1, 3), timings, {3: Mismatch(2, 5, "1.0", "2.0", "0x1")}), GroupResult((0, 2), timings, {})
    metric, fact = figures.group_wrong_data_results({"rail0": good, "rail1": bad})
    assert isinstance(metric, Metric)
    assert isinstance(fact, Fact)
    assert metric.value == 2
    assert fact.value == [
        {"group": "rail1", "rank": 3, "wrong": 2, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    ]


def test_scaling_goes_by_powers_of_two_and_says_what_it_is_measured_by(runs: Runs) -> None:
    lead = runs["scaling"][0]
    assert {metric.name for metric in lead.metrics} == {
        *("busbw.2nodes", "busbw.4nodes"),  # one rank alone reduces nothing
        *("efficiency.2nodes", "wrong_elements"),
    }
    by_two = {metric.name: metric.value for metric in runs["scaling_of_two"][0].metrics}
    assert by_two["efficiency.1node"] == by_two["busbw.2nodes"] / by_two["busbw.1node"]
    assert facts(runs["scaling_of_two"])["efficiency"]["1node"] == {"of 1node": 1}
    assert lead.series[0].x == (2, 4)


@pytest.mark.parametrize(("nodes", "counts"), [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_the_steps_of_scaling(nodes: int, counts: list[int]) -> None:
    members = [[2 * node, 2 * node + 1] for node in range(nodes)]
    steps = scaling.ranks_by_node_count(members)
    assert list(steps) == counts
    assert steps[nodes] == list(range(2 * nodes))


def test_each_node_tells_its_own_figure_and_shape(runs: Runs) -> None:
    measured = runs["each_node"]
    assert [[metric.subject for metric in one.metrics] for one in measured] == [["node0"] * 3, [], ["node1"] * 3, []]
    for one in (measured[0], measured[2]):
        assert {metric.name for metric in one.metrics} == {"busbw.64KiB", "wrong_elements", "sizes_not_allocated"}
        assert (one.facts["world_size"], one.facts["nodes"], one.facts["gpu"]) == (2, 1, None)
        assert "among the 2 ranks of this node, 2 nodes at the same time" in str(one.facts["how"])


def test_of_another_size_than_is_known_it_is_said_that_nothing_judges_it(runs: Runs) -> None:
    judged = judge_check(catalog()[EACH_NODE], on_a_fabric(runs["each_node"]), {}, "t")
    told = [one for one in judged if one.metric == "busbw.8GiB"]
    assert [(one.subject, one.outcome) for one in told] == [("node0", Outcome.ERROR), ("node1", Outcome.ERROR)]
    assert "the trial's options ask for a size of 64KiB" in told[0].message
    assert outcomes(runs["each_node"]) == {
        "busbw.8GiB": {Outcome.SKIP},
        "wrong_elements": {Outcome.PASS},
        "sizes_not_allocated": {Outcome.PASS},
    }


def test_wrong_sums_are_those_of_their_node(runs: Runs) -> None:
    said = judge_check(catalog()[EACH_NODE], runs["one_node_wrong"], {}, "t")
    wrong = [one for one in said if one.fix]
    assert {one.subject for one in said} == {"node0", "node1"}
    assert [(one.subject, one.metric, one.outcome) for one in wrong] == [("node1", "wrong_elements", Outcome.FAIL)]
    assert f'"offset": {fault_driver.WRONG_OFFSET}' in wrong[0].evidence


def test_a_node_without_a_figure_is_not_passed_over(runs: Runs) -> None:
    """One of its ranks alone: of unlike nodes something is missing."""
    judged = judge_check(catalog()[EACH_NODE], on_a_fabric(runs["each_node_of_three_and_one"]), {}, "t")
    assert {one.metric for one in judged if one.subject == "node1" and one.outcome is Outcome.ERROR} == {
        "busbw.8GiB",
        "wrong_elements",
        "sizes_not_allocated",
    }


def test_one_rank_a_node_has_nobody_beside_it(runs: Runs) -> None:
    assert all("one rank a node" in str(one.skipped) for one in runs["one_rank_a_node"])


def test_where_nothing_fits_on_one_rank_it_is_an_error_on_all(runs: Runs) -> None:
    for one in runs["no_room"]:
        assert str(one.error).startswith(
            "SeatrialError: no buffer could be allocated: {'64KiB': 'node0/rank1: CUDA out"
        )
        assert not one.metrics


REFUSAL = "node1/rank2: CUDA out of memory. Tried to allocate 1.00 GiB"


def test_what_does_not_fit_on_one_rank_is_halved_on_all_and_told(runs: Runs) -> None:
    measured = runs["little_room"]
    assert [one.error for one in measured] == [None] * 4
    for lead in measured[0], measured[2]:
        names = {metric.name: metric.value for metric in lead.metrics}
        assert names.keys() == {"busbw.16KiB", "wrong_elements", "sizes_not_allocated"}
        assert names["sizes_not_allocated"] == 2
        assert lead.facts["not_allocated"] == {"64KiB": REFUSAL, "32KiB": REFUSAL}
        assert "all-reduce of 16KiB, in place of 64KiB, which did not fit everywhere, among" in str(lead.facts["how"])


def test_a_size_that_did_not_fit_is_not_accepted_in_silence(runs: Runs) -> None:
    measured = runs["little_room"]
    refused = [
        one for one in judge_check(catalog()[EACH_NODE], measured, {}, "t") if one.metric == "sizes_not_allocated"
    ]
    assert [(one.subject, one.outcome) for one in refused] == [("node0", Outcome.ERROR), ("node1", Outcome.ERROR)]
    assert REFUSAL in refused[0].evidence
    asked = {"busbw.64KiB": Threshold.parse("> 1 GB/s")}
    said = judge_check(catalog()[EACH_NODE], on_a_fabric(measured), asked, "t")
    missing = [one for one in said if one.metric == "busbw.64KiB"]
    assert {one.outcome for one in missing} == {Outcome.ERROR}
    assert f"busbw.64KiB was not measured (no memory at {REFUSAL})" in missing[0].message


def test_of_thousands_of_ranks_without_memory_a_sentence_names_a_few() -> None:
    told = str(AllocationError(dict.fromkeys(range(8192), "full")))
    assert told == "no memory on rank 0: full; rank 1: full; rank 2: full; rank 3: full and 8188 more"
