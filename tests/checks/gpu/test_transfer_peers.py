from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.bench.transfer import PEER_SIZE
from seatrial.checks.gpu.transfer_peers import CHECK
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome
from tests.bench.cluster import ONE, THREE, TWO, Scenario, run
from tests.checks.gpu import driver

Runs = dict[str, list[Measurement]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    scenarios = {
        name: Scenario(CHECK.name, nodes=nodes, faults=faults)
        for name, nodes, faults in (
            ("one", ONE, ("peers",)),
            ("two", TWO, ("peers",)),
            ("three", THREE, ("peers",)),
            ("two_models", ONE, ("peers", "unique_model")),
        )
    }
    return run(tmp_path_factory.mktemp("peers"), driver.__name__, scenarios)


def values(measurement: Measurement, name: str) -> dict[str, float]:
    return {metric.subject: metric.value for metric in measurement.metrics if metric.name == name}


def test_local_rank_0_reports_every_ordered_pair(runs: Runs) -> None:
    first_rank, *others = runs["one"]
    assert [measurement.error for measurement in runs["one"]] == [None] * 3
    assert set(values(first_rank, "unidirectional")) == {
        f"node0/rank{a}->rank{b}" for a in range(3) for b in range(3) if a != b
    }
    assert [measurement.metrics for measurement in others] == [(), ()]
    evidence = {metric.subject: metric.evidence for metric in first_rank.metrics if metric.name == "unidirectional"}
    assert evidence["node0/rank0->rank1"] == {"peer access": "yes"}
    assert evidence["node0/rank1->rank0"] == {"peer access": "no"}


def test_bidirectional_counts_both_directions(runs: Runs) -> None:
    pair = "node0/rank1->rank2"
    assert values(runs["one"][0], "unidirectional")[pair] == pytest.approx(
        PEER_SIZE / (2 * driver.UNIDIRECTIONAL_S) / 1e9
    )
    assert values(runs["one"][0], "bidirectional")[pair] == pytest.approx(2 * PEER_SIZE / driver.BIDIRECTIONAL_S / 1e9)


def test_matrix_rows_are_sources_and_the_diagonal_is_none(runs: Runs) -> None:
    first_rank = runs["one"][0]
    speed = PEER_SIZE / driver.UNIDIRECTIONAL_S / 1e9
    rows = [[None if a == b else round(speed / (1 + a), 1) for b in range(3)] for a in range(3)]
    assert first_rank.facts["unidirectional_matrix"] == {"gpus": ["rank0", "rank1", "rank2"], "gb_s": rows}
    by_pair = values(first_rank, "bidirectional")
    bidirectional_rows = [
        [None if a == b else round(by_pair[f"node0/rank{a}->rank{b}"], 1) for b in range(3)] for a in range(3)
    ]
    assert first_rank.facts["bidirectional_matrix"] == {"gpus": ["rank0", "rank1", "rank2"], "gb_s": bidirectional_rows}


def judged(bidirectional: dict[str, float], gpu: str = "NVIDIA H200") -> dict[str, Outcome]:
    """Return outcomes of bidirectional by pair (``0>1``), with 396 GB/s unidirectional for every pair."""
    pairs = {f"n/gpu{pair[0]}->gpu{pair[2]}": value for pair, value in bidirectional.items()}
    metrics = tuple(
        Metric(name=name, value=value, unit="GB/s", subject=subject)
        for subject, rate in pairs.items()
        for name, value in (("unidirectional", 396.0), ("bidirectional", rate))
    )
    facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": 1, "nodes": 1}
    measurement = Measurement(check=CHECK.name, subject="n/gpu0", metrics=metrics, facts=facts)
    verdicts = judge_check(CHECK, [measurement], {}, "t", References(None, skus()))
    names = dict(zip(pairs, bidirectional, strict=True))
    return {names[verdict.subject]: verdict.outcome for verdict in verdicts if verdict.metric == "bidirectional"}


def test_slow_bidirectional_link() -> None:
    good = {"0>1": 782.6, "1>0": 783.1, "0>2": 782.1, "2>0": 784.3, "1>2": 783.0, "2>1": 782.9}
    assert set(judged(good).values()) == {Outcome.PASS}
    assert judged({**good, "1>0": 698.0})["1>0"] is Outcome.WARN
    assert judged({**good, "1>0": 400.0, "0>1": 400.0}) == {
        pair: Outcome.FAIL if set(pair) == set("0>1") else Outcome.PASS for pair in good
    }
    assert (
        judged({**good, "1>0": 750.0})["1>0"] is Outcome.WARN
    )  # 95.8 % of the reference, and far below the other pairs
    unknown_model = judged({**good, "1>0": 400.0}, "NVIDIA Unknown")
    assert set(unknown_model.values()) == {Outcome.UNJUDGED, Outcome.FAIL}
    assert unknown_model["1>0"] is Outcome.FAIL  # compared with the other pairs only


@pytest.mark.parametrize(("node_gpus", "outcome"), [(2, Outcome.FAIL), (4, Outcome.UNJUDGED)])
def test_the_value_of_a_bridge_is_for_nodes_with_one_bridge(node_gpus: int, outcome: Outcome) -> None:
    """Of four H100 NVL, pairs without a bridge copy over PCIe."""
    metric = Metric(name="unidirectional", value=50.0, unit="GB/s", subject="n/gpu0->gpu1")
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H100 NVL", "world_size": 1, "nodes": 1, "node_gpus": node_gpus}
    measurement = Measurement(check=CHECK.name, subject="n/gpu0", metrics=(metric,), facts=facts)
    verdicts = judge_check(CHECK, [measurement], {}, "t", References(None, skus()))
    assert [verdict.outcome for verdict in verdicts if verdict.metric == "unidirectional"] == [outcome]


def test_node_with_one_gpu_does_not_block(runs: Runs) -> None:
    assert [measurement.error or measurement.skipped for measurement in runs["two"]] == [None] * 3
    assert set(values(runs["two"][0], "unidirectional")) == {"node0/rank0->rank1", "node0/rank1->rank0"}
    assert runs["two"][2].metrics == ()


def test_nodes_with_one_gpu_are_skipped(runs: Runs) -> None:
    assert all("every node has one GPU" in str(measurement.skipped) for measurement in runs["three"])


def test_different_models_have_no_sku(runs: Runs) -> None:
    assert " + another model" in str(runs["two_models"][0].facts["cpu"]) or "another model + " in str(
        runs["two_models"][0].facts["cpu"]
    )
