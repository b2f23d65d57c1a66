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
            ("unlike", ONE, ("peers", "stranger")),
        )
    }
    return run(tmp_path_factory.mktemp("peers"), driver.__name__, scenarios)


def figures(measurement: Measurement, name: str) -> dict[str, float]:
    return {metric.subject: metric.value for metric in measurement.metrics if metric.name == name}


def test_the_first_of_a_node_tells_of_every_ordered_pair(runs: Runs) -> None:
    lead, *others = runs["one"]
    assert [one.error for one in runs["one"]] == [None] * 3
    assert set(figures(lead, "unidirectional")) == {
        f"node0/rank{a}->rank{b}" for a in range(3) for b in range(3) if a != b
    }
    assert [one.metrics for one in others] == [(), ()]
    assert figures(lead, "direct")["node0/rank0->rank1"] == 1
    assert figures(lead, "direct")["node0/rank1->rank0"] == 0


def test_both_ways_move_twice_as_much(runs: Runs) -> None:
    pair = "node0/rank1->rank2"
    assert figures(runs["one"][0], "unidirectional")[pair] == pytest.approx(
        PEER_SIZE / (2 * driver.UNIDIRECTIONAL_S) / 1e9
    )
    assert figures(runs["one"][0], "bidirectional")[pair] == pytest.approx(2 * PEER_SIZE / driver.BIDIRECTIONAL_S / 1e9)


def test_the_matrices_have_the_source_in_the_row_and_nothing_from_a_gpu_to_itself(runs: Runs) -> None:
    lead = runs["one"][0]
    speed = PEER_SIZE / driver.UNIDIRECTIONAL_S / 1e9
    rows = [[None if a == b else round(speed / (1 + a), 1) for b in range(3)] for a in range(3)]
    assert lead.facts["unidirectional_matrix"] == {"gpus": ["rank0", "rank1", "rank2"], "gb_s": rows}
    found = figures(lead, "bidirectional")
    both = [[None if a == b else round(found[f"node0/rank{a}->rank{b}"], 1) for b in range(3)] for a in range(3)]
    assert lead.facts["bidirectional_matrix"] == {"gpus": ["rank0", "rank1", "rank2"], "gb_s": both}


def judged(bidirectional: dict[str, float], gpu: str = "NVIDIA H200") -> dict[str, Outcome]:
    """By ``0>1``: what the rules say of copies both ways, where each goes at 396 GB/s one way."""
    pairs = {f"n/gpu{pair[0]}->gpu{pair[2]}": value for pair, value in bidirectional.items()}
    metrics = tuple(
        Metric(name=name, value=value, unit="GB/s", subject=subject)
        for subject, both in pairs.items()
        for name, value in (("unidirectional", 396.0), ("bidirectional", both))
    )
    facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": 1, "nodes": 1}
    one = Measurement(check=CHECK.name, subject="n/gpu0", metrics=metrics, facts=facts)
    found = judge_check(CHECK, [one], {}, "t", References(None, skus()))
    names = dict(zip(pairs, bidirectional, strict=True))
    return {names[verdict.subject]: verdict.outcome for verdict in found if verdict.metric == "bidirectional"}


def test_a_link_that_is_lame_both_ways_is_not_passed() -> None:
    good = {"0>1": 782.6, "1>0": 783.1, "0>2": 782.1, "2>0": 784.3, "1>2": 783.0, "2>1": 782.9}
    assert set(judged(good).values()) == {Outcome.PASS}
    assert judged({**good, "1>0": 698.0})["1>0"] is Outcome.WARN
    assert judged({**good, "1>0": 400.0, "0>1": 400.0}) == {
        pair: Outcome.FAIL if set(pair) == set("0>1") else Outcome.PASS for pair in good
    }
    assert judged({**good, "1>0": 750.0})["1>0"] is Outcome.WARN  # 95.8 % of what is known, and far from the others
    strange = judged({**good, "1>0": 400.0}, "NVIDIA Strange")
    assert set(strange.values()) == {Outcome.UNJUDGED, Outcome.FAIL}
    assert strange["1>0"] is Outcome.FAIL  # by the others of the trial alone


def test_a_node_with_one_gpu_does_not_keep_the_others_waiting(runs: Runs) -> None:
    assert [one.error or one.skipped for one in runs["two"]] == [None] * 3
    assert set(figures(runs["two"][0], "unidirectional")) == {"node0/rank0->rank1", "node0/rank1->rank0"}
    assert runs["two"][2].metrics == ()


def test_nodes_with_one_gpu_each_have_no_pairs(runs: Runs) -> None:
    assert {one.skipped for one in runs["three"]} == {"nodes with one GPU have no pair of them"}


def test_unlike_models_are_joined_so_that_no_sku_judges_them(runs: Runs) -> None:
    assert " + another model" in str(runs["unlike"][0].facts["cpu"]) or "another model + " in str(
        runs["unlike"][0].facts["cpu"]
    )
