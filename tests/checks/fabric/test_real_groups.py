"""Pairs, rails, scaling and each_node among four real processes that simulate several nodes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.fabric import each_node, localization, one_gpu, rails, scaling
from seatrial.checks.fabric import pairs as collectives_pairs
from seatrial.diagnose.causes import Run
from seatrial.diagnose.localize import localize
from seatrial.diagnose.slow_nodes import search_findings
from seatrial.judge.rules import judge_check
from seatrial.model import Finding, Measurement, Outcome, Threshold
from tests.bench.cluster import Scenario, run
from tests.checks.fabric import fault_driver

pytestmark = pytest.mark.training

Runs = dict[str, list[Measurement]]
FOUR = ("node0", "node1", "node2", "node3")
TWO = ("node0", "node0", "node1", "node1")
UNEVEN = ("node0", "node0", "node0", "node1")
ONE = ("node0",) * 4
PAIRS, RAILS, SCALING = (check.CHECK.name for check in (collectives_pairs, rails, scaling))
EACH_NODE, SEARCH, ONE_GPU = each_node.CHECK.name, localization.CHECK.name, one_gpu.CHECK.name
SHORT_OPTIONS = {"size": "64KiB", "seconds": 0.02}  # transfers use the cores for all of these seconds
LATE_OPTIONS = {"size": "64KiB", "seconds": 0.1}  # where times are compared
SEARCH_OPTIONS = {"size": "1MiB", "seconds": 0.02}
BOTH = {"sizes": ["4B", "8B", "64KiB"], "in_place": "both", "dtype": "bfloat16", "seconds_per_size": 0.05}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    scenarios = {
        "pairs": Scenario(PAIRS, FOUR, SHORT_OPTIONS),
        "one_round": Scenario(PAIRS, FOUR, {**SHORT_OPTIONS, "rounds": 1}),
        "two_nodes": Scenario(PAIRS, TWO, SHORT_OPTIONS),
        "late_node": Scenario(PAIRS, FOUR, LATE_OPTIONS, faults=("late",)),
        "late_path": Scenario(PAIRS, FOUR, {**LATE_OPTIONS, "max_retries": 1}, faults=("late_between_one_and_two",)),
        "corrupt": Scenario(PAIRS, FOUR, SHORT_OPTIONS, faults=("corrupt",)),
        "rails": Scenario(RAILS, TWO, SHORT_OPTIONS),
        "scaling": Scenario(SCALING, FOUR, SHORT_OPTIONS),
        "scaling_two_nodes": Scenario(SCALING, TWO, SHORT_OPTIONS),
        "each_node": Scenario(EACH_NODE, TWO, SHORT_OPTIONS),
        "each_node_uneven": Scenario(EACH_NODE, UNEVEN, SHORT_OPTIONS),
        "wrong_data_on_one_node": Scenario(EACH_NODE, TWO, SHORT_OPTIONS, faults=("wrong_sums",)),
        "no_memory": Scenario(EACH_NODE, TWO, SHORT_OPTIONS, faults=("no_memory",)),
        "little_memory": Scenario(EACH_NODE, TWO, SHORT_OPTIONS, faults=("little_memory",)),
        "one_gpu": Scenario(ONE_GPU, TWO),
        "one_gpu_wrong_data": Scenario(ONE_GPU, TWO, faults=("wrong_sums",)),
        "one_rank_per_node": Scenario(EACH_NODE, FOUR, SHORT_OPTIONS),
        "in_place_variant": Scenario("collectives.all_gather", ONE, BOTH),
        "search_late_node": Scenario(SEARCH, FOUR, {**SEARCH_OPTIONS, "seconds": 0.1}, faults=("late",)),
        "search_corrupt": Scenario(SEARCH, FOUR, SEARCH_OPTIONS, faults=("corrupt",)),
        "search_two_nodes": Scenario(SEARCH, TWO, SEARCH_OPTIONS),
        "search_one_node": Scenario(SEARCH, ONE),
        "pairs_one_node": Scenario(PAIRS, ONE),
        "rails_one_node": Scenario(RAILS, ONE),
        "scaling_one_node": Scenario(SCALING, ONE),
        "each_node_one_node": Scenario(EACH_NODE, ONE),
    }
    out = tmp_path_factory.mktemp("groups")
    return run(out, fault_driver.__name__, scenarios, fault_driver.RANKS)


def values(measurements: list[Measurement], name: str) -> dict[str, float]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    return {metric.subject: metric.value for metric in measurements[0].metrics if metric.name == name}


def facts(measurements: list[Measurement]) -> dict[str, Any]:
    return measurements[0].facts


def outcomes(measurements: list[Measurement]) -> dict[str, set[Outcome]]:
    by_metric: dict[str, set[Outcome]] = {}
    for verdict in judge_check(catalog()[measurements[0].check], measurements, {}, "t"):
        by_metric.setdefault(verdict.metric, set()).add(verdict.outcome)
    return by_metric


def as_on_nccl(measurements: list[Measurement]) -> list[Measurement]:
    """The measurements with backend nccl: those of CPUs are not judged."""
    return [
        measurement.model_copy(update={"facts": {**measurement.facts, "backend": "nccl", "gpu": "NVIDIA Unknown"}})
        for measurement in measurements
    ]


def findings(measurements: list[Measurement]) -> list[Finding]:
    judged = as_on_nccl(measurements)
    check = catalog()[judged[0].check]
    return list(localize(Run(judge_check(check, judged, {}, "t"), judged, catalog())))


@pytest.mark.parametrize("name", ["pairs_one_node", "rails_one_node", "scaling_one_node", "each_node_one_node"])
def test_one_node_is_a_skip(runs: Runs, name: str) -> None:
    assert all("one node" in str(measurement.skipped) for measurement in runs[name])


@pytest.mark.parametrize("name", ["pairs", "rails", "scaling", "two_nodes"])
def test_first_rank_reports_declared_metrics(runs: Runs, name: str) -> None:
    first_rank, *others = runs[name]
    declared = catalog()[first_rank.check].units
    for metric in first_rank.metrics:
        assert declared[re.sub(r"\..*", ".*", metric.name)] == metric.unit
    assert all(not measurement.metrics and not measurement.facts for measurement in others)


@pytest.mark.parametrize("name", ["pairs", "two_nodes", "rails", "scaling"])
def test_cpu_runs_judge_only_the_data(runs: Runs, name: str) -> None:
    judged = outcomes(runs[name])
    assert judged.pop("wrong_elements") == {Outcome.PASS}
    assert set.union(set(), *judged.values()) <= {Outcome.SKIP}


def test_every_pair_of_nodes_is_reported(runs: Runs) -> None:
    pairs = {f"node{a}->node{b}" for a in range(4) for b in range(a + 1, 4)}
    assert set(values(runs["pairs"], "pair_busbw")) == set(values(runs["pairs"], "path_share")) == pairs
    assert set(values(runs["pairs"], "best_busbw")) == {f"node{rank}/rank{rank}" for rank in range(4)}
    matrix = facts(runs["pairs"])["pair_matrix"]
    assert matrix["nodes"] == list(FOUR)
    assert all((row[i] is None) and sum(map(bool, row)) == 3 for i, row in enumerate(matrix["gb_s"]))
    assert facts(runs["pairs"])["max_locatable_nodes"] == 1


def test_one_round_has_one_partner_per_node(runs: Runs) -> None:
    assert set(values(runs["one_round"], "pair_busbw")) == {"node0->node3", "node1->node2"}
    assert facts(runs["one_round"])["max_locatable_nodes"] == 0


def test_two_nodes_are_not_compared(runs: Runs) -> None:
    assert list(values(runs["two_nodes"], "pair_busbw")) == ["node0->node1"]
    judged = outcomes(as_on_nccl(runs["two_nodes"]))
    assert judged["gpu_share"] == judged["path_share"] == {Outcome.SKIP}
    assert not findings(runs["two_nodes"])


def test_node_that_is_slow_with_every_partner_is_located(runs: Runs) -> None:
    best = values(runs["late_node"], "gpu_share")
    assert min(best, key=lambda subject: best[subject]) == "node2/rank2"
    assert best["node2/rank2"] < 0.5
    assert ("node2", "A node is slow to every other node") in [
        (finding.subject, finding.title) for finding in findings(runs["late_node"])
    ]
    assert Outcome.FAIL in outcomes(as_on_nccl(runs["late_node"]))["gpu_share"]


def test_slow_path_between_good_nodes_is_located(runs: Runs) -> None:
    shares = values(runs["late_path"], "path_share")
    assert min(shares, key=lambda subject: shares[subject]) == "node1->node2"
    assert shares["node1->node2"] < 0.5
    (shared,) = (metric for metric in runs["late_path"][0].metrics if metric.name == "shared_paths")
    evidence: Any = shared.evidence
    assert list(evidence["single_pair"]) == ["node1->node2"]  # retried, and still slow
    assert "node1->node2" in [
        finding.subject for finding in findings(runs["late_path"]) if finding.title.startswith("The path")
    ]


def test_wrong_data_fails_and_its_sender_has_no_good_partner(runs: Runs) -> None:
    measured = runs["corrupt"]
    assert values(measured, "wrong_elements") == {"cluster": 3}
    assert outcomes(measured)["wrong_elements"] == {Outcome.FAIL}
    (evidence,) = (metric.evidence for metric in measured[0].metrics if metric.name == "wrong_elements")
    wrong: Any = evidence["wrong_data"] if isinstance(evidence, dict) else []
    assert {(entry["from"], entry["to"]) for entry in wrong} == {("node3/rank3", f"node{i}/rank{i}") for i in range(3)}
    assert {entry["offset"] for entry in wrong} == {fault_driver.WRONG_OFFSET}
    assert values(measured, "gpu_share")["node3/rank3"] == 0
    assert "node3" in [finding.subject for finding in findings(measured)]


def test_in_place_variant_is_reported_and_small_sizes_are_exact(runs: Runs) -> None:
    measured = runs["in_place_variant"]
    for suffix in ("", "_in_place"):
        assert set(values(measured, f"busbw{suffix}.8B")) == {"cluster"}  # minimum: one element per rank
        assert not values(measured, f"busbw{suffix}.4B")
        assert facts(measured)[f"sizes{suffix}"] == {"8B": 8, "64KiB": 2**16}
        for name in ("iterations", "spread", "drift_percent"):
            assert list(facts(measured)[f"{name}{suffix}"]) == ["8B", "64KiB"]
    assert values(measured, "wrong_elements") == {"cluster": 0}


def test_rail_has_the_same_rank_of_every_node(runs: Runs) -> None:
    assert set(values(runs["rails"], "rail_busbw")) == {"rail0", "rail1"}
    assert rails.group_by_rail({"a": (0, 1, 2), "b": (3, 4, 5)}) == [[0, 3], [1, 4], [2, 5]]
    first_rank = runs["rails"][0]
    assert values(runs["rails"], "rail_share") == {}
    assert [absent.metric for absent in first_rank.absent] == ["rail_share"]  # with two rails either may be slow


def test_scaling_reports_powers_of_two_and_efficiency(runs: Runs) -> None:
    first_rank = runs["scaling"][0]
    assert {metric.name for metric in first_rank.metrics} == {
        *("busbw.2nodes", "busbw.4nodes"),  # not with one rank
        *("efficiency.2nodes", "network_busbw", "link_efficiency", "wrong_elements"),
    }
    two_nodes = {metric.name: metric.value for metric in runs["scaling_two_nodes"][0].metrics}
    speed, slower_link = two_nodes["busbw.2nodes"], min(two_nodes["busbw.1node"], two_nodes["network_busbw"])
    # speeds have seven digits
    assert two_nodes["efficiency.1node"] == pytest.approx(speed / two_nodes["busbw.1node"], rel=1e-6)
    assert two_nodes["link_efficiency"] == pytest.approx(speed / slower_link, rel=1e-6)
    assert two_nodes.keys() == {
        *("busbw.1node", "busbw.2nodes", "efficiency.1node", "network_busbw", "link_efficiency", "wrong_elements")
    }
    assert first_rank.series[0].x == (2, 4)


def test_each_node_reports_its_metrics_and_shape(runs: Runs) -> None:
    measured = runs["each_node"]
    assert [[metric.subject for metric in measurement.metrics] for measurement in measured] == [
        ["node0"] * 4,
        [],
        ["node1"] * 4,
        [],
    ]
    for first_rank in (measured[0], measured[2]):
        assert {metric.name for metric in first_rank.metrics} == {
            "busbw.64KiB",
            "node_share",
            "wrong_elements",
            "sizes_not_allocated",
        }
        assert (first_rank.facts["world_size"], first_rank.facts["nodes"], first_rank.facts["gpu"]) == (2, 1, None)
        for value in ("2 ranks of this node", "2 nodes"):
            assert value in str(first_rank.facts["method"])


def test_size_without_reference_is_an_error(runs: Runs) -> None:
    judged = judge_check(catalog()[EACH_NODE], as_on_nccl(runs["each_node"]), {}, "t")
    missing = [verdict for verdict in judged if verdict.metric == "busbw.8GiB"]
    assert [(verdict.subject, verdict.outcome) for verdict in missing] == [
        ("node0", Outcome.ERROR),
        ("node1", Outcome.ERROR),
    ]
    assert "size 64KiB" in missing[0].message
    assert outcomes(runs["each_node"]) == {
        "busbw.8GiB": {Outcome.SKIP},
        "node_share": {Outcome.SKIP},
        "wrong_elements": {Outcome.PASS},
        "sizes_not_allocated": {Outcome.PASS},
    }


def test_wrong_data_is_reported_for_its_node(runs: Runs) -> None:
    judged = judge_check(catalog()[EACH_NODE], runs["wrong_data_on_one_node"], {}, "t")
    wrong = [verdict for verdict in judged if verdict.fix]
    assert {verdict.subject for verdict in judged} == {"node0", "node1"}
    assert [(verdict.subject, verdict.metric, verdict.outcome) for verdict in wrong] == [
        ("node1", "wrong_elements", Outcome.FAIL)
    ]
    assert f'"offset": {fault_driver.WRONG_OFFSET}' in wrong[0].evidence


def test_each_gpu_reduces_with_itself(runs: Runs) -> None:
    for scenario, wrong_rank in (("one_gpu", None), ("one_gpu_wrong_data", 2)):
        measurements = runs[scenario]
        values = [{metric.name: metric.value for metric in measurement.metrics} for measurement in measurements]
        assert all(value["latency.1KiB"] > 0 for value in values)
        assert [value["wrong_elements"] for value in values] == [int(rank == wrong_rank) for rank in range(4)]
    judged = judge_check(catalog()[ONE_GPU], runs["one_gpu_wrong_data"], {}, "t")
    assert {(verdict.subject, verdict.outcome) for verdict in judged if verdict.fix} == {("node1/rank2", Outcome.FAIL)}


def test_node_with_a_single_rank_is_an_error(runs: Runs) -> None:
    """Every node must have as many ranks as planned."""
    judged = judge_check(catalog()[EACH_NODE], as_on_nccl(runs["each_node_uneven"]), {}, "t")
    assert {
        verdict.metric for verdict in judged if verdict.subject == "node1" and verdict.outcome is Outcome.ERROR
    } == {
        "busbw.8GiB",
        "node_share",
        "wrong_elements",
        "sizes_not_allocated",
    }


def test_one_rank_per_node_is_a_skip(runs: Runs) -> None:
    assert all("one rank per node" in str(measurement.skipped) for measurement in runs["one_rank_per_node"])


def test_no_allocated_size_is_an_error_on_all_ranks(runs: Runs) -> None:
    for measurement in runs["no_memory"]:
        assert str(measurement.error).startswith(
            "SeatrialError: out of memory at every size: 64KiB: node0/rank1: CUDA out"
        )
        assert not measurement.metrics


REASON = "node1/rank2: CUDA out of memory. Tried to allocate 1.00 GiB"


def test_size_is_halved_on_all_ranks_until_it_fits(runs: Runs) -> None:
    measured = runs["little_memory"]
    assert [measurement.error for measurement in measured] == [None] * 4
    for first_rank in measured[0], measured[2]:
        by_name = {metric.name: metric.value for metric in first_rank.metrics}
        assert by_name.keys() == {"busbw.16KiB", "node_share", "wrong_elements", "sizes_not_allocated"}
        assert by_name["sizes_not_allocated"] == 2
        (not_allocated,) = (each for each in first_rank.metrics if each.name == "sizes_not_allocated")
        assert not_allocated.evidence == {"not_allocated": {"64KiB": REASON, "32KiB": REASON}}
        assert "all-reduce of 16 KiB (64 KiB did not fit on all ranks)" in str(first_rank.facts["method"])


def test_size_that_did_not_fit_is_an_error(runs: Runs) -> None:
    measured = runs["little_memory"]
    verdicts = [
        verdict
        for verdict in judge_check(catalog()[EACH_NODE], measured, {}, "t")
        if verdict.metric == "sizes_not_allocated"
    ]
    assert [(verdict.subject, verdict.outcome) for verdict in verdicts] == [
        ("node0", Outcome.ERROR),
        ("node1", Outcome.ERROR),
    ]
    assert REASON in verdicts[0].evidence
    thresholds = {"busbw.64KiB": Threshold.parse("> 1 GB/s")}
    judged = judge_check(catalog()[EACH_NODE], as_on_nccl(measured), thresholds, "t")
    missing = [verdict for verdict in judged if verdict.metric == "busbw.64KiB"]
    assert {verdict.outcome for verdict in missing} == {Outcome.ERROR}
    assert REASON in missing[0].message


def slow_subjects(runs: Runs, scenario: str) -> list[tuple[str, str]]:
    assert all(measurement.error is None for measurement in runs[scenario]), runs[scenario]
    findings = search_findings(Run((), (), catalog(), searches=runs[scenario]))
    return [(finding.cause, finding.subject) for finding in findings]


def test_search_names_the_late_node(runs: Runs) -> None:
    assert slow_subjects(runs, "search_late_node") == [("slow_node", "node2")]
    evidence = {metric.name: metric.evidence for metric in runs["search_late_node"][0].metrics}
    assert evidence == {"slow_ranks": ["node2/rank2"], "slow_paths": [], "slow_rails": [], "wrong_elements": None}
    assert facts(runs["search_late_node"])["ranks_by_node"] == {
        node: [f"{node}/rank{rank}"] for rank, node in enumerate(FOUR)
    }
    verdicts = judge_check(catalog()[SEARCH], runs["search_late_node"], {}, "t")
    good = dict.fromkeys(("slow_paths", "slow_rails", "wrong_elements"), Outcome.PASS)
    assert {verdict.metric: verdict.outcome for verdict in verdicts} == {"slow_ranks": Outcome.FAIL, **good}


def test_search_reports_wrong_data(runs: Runs) -> None:
    values = {metric.name: metric.value for metric in runs["search_corrupt"][0].metrics}
    assert values["wrong_elements"] > 0


def test_search_on_two_nodes_compares_the_directions_of_their_pair(runs: Runs) -> None:
    """Not the result: on CPUs, the two directions of a healthy pair differ too much."""
    facts = runs["search_two_nodes"][0].facts
    assert (facts["nodes"], facts["steps"]) == (2, 9)


def test_search_on_one_node_is_skipped(runs: Runs) -> None:
    assert {measurement.skipped for measurement in runs["search_one_node"]} == {"one node: there are no pairs of nodes"}
