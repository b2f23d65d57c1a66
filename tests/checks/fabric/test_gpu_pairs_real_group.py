"""GPU pairs among four real processes over gloo with injected faults; synthetic nodes: test_gpu_pairs.py."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from seatrial.checks.fabric.gpu_pairs import CHECK
from seatrial.diagnose.causes import Run
from seatrial.diagnose.localize import localize
from seatrial.discover.nvlinks import NVLINK
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from tests.bench.cluster import Scenario, run
from tests.checks.fabric import fault_driver
from tests.checks.fabric.test_gpu_pairs import BUSBW, failed, retry_rates, verdicts

pytestmark = pytest.mark.training

Runs = dict[str, list[Measurement]]
ONE, TWO, FOUR = ("node0",) * 4, ("node0", "node0", "node1", "node1"), ("node0", "node1", "node2", "node3")
UNEVEN = ("node0", "node0", "node0", "node1")
SHORT_OPTIONS = {"size": "64KiB", "seconds": 0.1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    scenarios = {
        "no_memory": Scenario(CHECK.name, ONE, SHORT_OPTIONS, faults=("no_memory",)),
        "one_node": Scenario(CHECK.name, ONE, SHORT_OPTIONS),
        "two_nodes": Scenario(CHECK.name, TWO, SHORT_OPTIONS),
        "late": Scenario(CHECK.name, ONE, {**SHORT_OPTIONS, "retry_slow_pairs": True}, faults=("late",)),
        "late_path": Scenario(
            CHECK.name, ONE, {**SHORT_OPTIONS, "retry_slow_pairs": True}, faults=("late_between_one_and_two",)
        ),
        "shared": Scenario(CHECK.name, ONE, {**SHORT_OPTIONS, "retry_slow_pairs": True}, faults=("shared_link",)),
        "corrupt": Scenario(CHECK.name, ONE, SHORT_OPTIONS, faults=("corrupt",)),
        "corrupt_two_nodes": Scenario(CHECK.name, TWO, SHORT_OPTIONS, faults=("corrupt",)),
        "one_rank_per_node": Scenario(CHECK.name, FOUR, SHORT_OPTIONS),
        "three_and_one": Scenario(CHECK.name, UNEVEN, SHORT_OPTIONS),
    }
    return run(tmp_path_factory.mktemp("pairs"), fault_driver.__name__, scenarios, fault_driver.RANKS)


def values(measurements: list[Measurement], name: str) -> dict[str, float]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    return {
        metric.subject: metric.value
        for measurement in measurements
        for metric in measurement.metrics
        if metric.name == name
    }


def as_on_gpus(measurements: list[Measurement]) -> list[Measurement]:
    """The measurements with backend nccl: those of CPUs are not judged."""
    return [_as_on_gpus(measurement) if measurement.metrics else measurement for measurement in measurements]


def located(measurements: list[Measurement]) -> list[str]:
    return [
        finding.subject
        for finding in localize(Run(judge_check(CHECK, measurements, {}, "t"), measurements, {CHECK.name: CHECK}))
    ]


def _as_on_gpus(first_rank: Measurement) -> Measurement:
    facts = {**first_rank.facts, "backend": "nccl", "gpu": "NVIDIA Unknown", "link": NVLINK}
    metrics = tuple(
        replace(metric, name=BUSBW) if metric.name == "busbw.64KiB" else metric for metric in first_rank.metrics
    )
    return first_rank.model_copy(update={"facts": facts, "metrics": metrics})


def test_first_rank_reports_every_pair(runs: Runs) -> None:
    first_rank, *others = runs["one_node"]
    pairs = {f"node0/rank{a}->rank{b}" for a, b in combinations(range(4), 2)}
    assert set(values(runs["one_node"], "busbw.64KiB")) == set(values(runs["one_node"], "path_share")) == pairs
    assert set(values(runs["one_node"], "gpu_share")) == {f"node0/rank{rank}" for rank in range(4)}
    for metric in first_rank.metrics:
        assert CHECK.units[re.sub(r"\..*", ".*", metric.name)] == metric.unit
        assert metric.name in ("shared_links", "wrong_elements") or metric.samples
    assert all(not measurement.metrics and not measurement.facts for measurement in others)
    for value in ("6 pairs", "4 ranks", "3 rounds"):
        assert value in str(first_rank.facts["method"])
    assert Outcome.ERROR not in verdicts(as_on_gpus(runs["one_node"])).values()


def test_each_node_has_its_pairs_and_matrix(runs: Runs) -> None:
    measurements = runs["two_nodes"]
    assert list(values(measurements, "busbw.64KiB")) == ["node0/rank0->rank1", "node1/rank2->rank3"]
    matrices: list[Any] = [measurement.facts.get("matrix", {}) for measurement in measurements]
    assert [matrix.get("gpus") for matrix in matrices] == [["rank0", "rank1"], None, ["rank2", "rank3"], None]
    assert set(matrices[0]) == {"gpus", "gb_s"}, "the report prints this form as a matrix"
    (forward, backward) = matrices[2]["gb_s"]
    assert forward[0] is None
    assert forward[1] == backward[0] > 0
    assert [
        [metric.subject for metric in measurement.metrics if metric.name == "wrong_elements"]
        for measurement in measurements
    ] == [
        ["node0"],
        [],
        ["node1"],
        [],
    ]
    for first_rank in measurements[0], measurements[2]:
        assert (first_rank.facts["world_size"], first_rank.facts["nodes"], first_rank.facts["gpu"]) == (2, 1, None), (
            "of two ranks of a node"
        )
        for value in ("1 pair", "2 ranks", "1 round", "2 nodes"):
            assert value in str(first_rank.facts["method"])
    assert Outcome.ERROR not in verdicts(as_on_gpus(measurements)).values()
    assert {outcome for (metric, _), outcome in verdicts(measurements).items() if metric != "wrong_elements"} == {
        Outcome.SKIP
    }


def test_rank_that_is_slow_with_every_partner_is_located(runs: Runs) -> None:
    shares = values(runs["late"], "gpu_share")
    assert min(shares, key=lambda subject: shares[subject]) == "node0/rank2"
    assert shares["node0/rank2"] < 0.5
    assert "node0/rank2" in failed(as_on_gpus(runs["late"]), "gpu_share")
    assert {f"node0/rank{min(2, rank)}->rank{max(2, rank)}" for rank in (0, 1, 3)} <= {*retry_rates(runs["late"])}


def test_slow_path_is_retried_and_located(runs: Runs) -> None:
    shares = values(runs["late_path"], "path_share")
    assert min(shares, key=lambda subject: shares[subject]) == "node0/rank1->rank2"
    assert shares["node0/rank1->rank2"] < 0.5
    assert "node0/rank1->rank2" in retry_rates(runs["late_path"])
    assert "node0/rank1->rank2" in located(as_on_gpus(runs["late_path"]))


def test_pairs_on_a_shared_link_are_fast_in_the_retry(runs: Runs) -> None:
    for pair in ("node0/rank0->rank3", "node0/rank1->rank2"):
        rates = retry_rates(runs["shared"])[pair]
        assert rates["single"] > 1.5 * rates["concurrent"]
        assert values(runs["shared"], "busbw.64KiB")[pair] == pytest.approx(rates["single"])
    assert values(runs["shared"], "shared_links")["node0"] >= 1


@pytest.mark.parametrize(("name", "received"), [("corrupt", (0, 1, 2)), ("corrupt_two_nodes", (2,))])
def test_wrong_data_names_sender_and_receiver(runs: Runs, name: str, received: tuple[int, ...]) -> None:
    measurements = runs[name]
    node = "node1" if len(received) == 1 else "node0"
    by_node = {measurement.subject.partition("/")[0]: measurement for measurement in reversed(measurements)}
    assert values(measurements, "wrong_elements") == {**dict.fromkeys(by_node, 0), node: len(received)}
    (evidence,) = (metric.evidence for metric in by_node[node].metrics if metric.name == "wrong_elements")
    wrong_data: Any = evidence["wrong_data"] if isinstance(evidence, dict) else []
    assert {(entry["from"], entry["to"]) for entry in wrong_data} == {
        (f"{node}/rank3", f"{node}/rank{rank}") for rank in received
    }
    assert {entry["offset"] for entry in wrong_data} == {fault_driver.WRONG_OFFSET}
    assert all(int(entry["xor"], 16) for entry in wrong_data)
    assert failed(measurements, "wrong_elements") == {node}


def test_out_of_memory_on_one_rank_is_an_error_on_all(runs: Runs) -> None:
    for measurement in runs["no_memory"]:
        for value in ("SeatrialError", "64 KiB", "rank 1: CUDA out of memory. Tried to allocate 1.00 GiB"):
            assert value in str(measurement.error)


def test_nodes_with_one_gpu_are_a_skip(runs: Runs) -> None:
    assert all("one GPU per node" in str(measurement.skipped) for measurement in runs["one_rank_per_node"])


def test_node_with_a_single_rank_is_an_error(runs: Runs) -> None:
    """Every node must have as many ranks as planned."""
    outcomes = verdicts(as_on_gpus(runs["three_and_one"]))
    assert len(values(runs["three_and_one"], "busbw.64KiB")) == 3
    assert {subject for (_, subject), outcome in outcomes.items() if outcome is Outcome.ERROR} == {"node1"}
    assert outcomes[BUSBW, "node1"] is Outcome.ERROR
