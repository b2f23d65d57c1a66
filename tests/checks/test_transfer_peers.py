from __future__ import annotations

import pytest

from seatrial.bench.transfer import PEER_SIZE
from seatrial.checks.transfer_peers import CHECK
from seatrial.model import Measurement
from tests.bench.cluster import ONE, THREE, TWO, Scenario, run
from tests.checks import device_driver

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
    return run(tmp_path_factory.mktemp("peers"), device_driver.__name__, scenarios)


def figures(measurement: Measurement, name: str) -> dict[str, float]:
    return {metric.subject: metric.value for metric in measurement.metrics if metric.name == name}


def test_the_first_of_a_node_tells_of_every_ordered_pair(runs: Runs) -> None:
    lead, *others = runs["one"]
    assert [one.error for one in runs["one"]] == [None] * 3
    assert set(figures(lead, "one_way")) == {f"node0/rank{a}->rank{b}" for a in range(3) for b in range(3) if a != b}
    assert [one.metrics for one in others] == [(), ()]
    assert figures(lead, "direct")["node0/rank0->rank1"] == 1
    assert figures(lead, "direct")["node0/rank1->rank0"] == 0


def test_both_ways_move_twice_as_much(runs: Runs) -> None:
    pair = "node0/rank1->rank2"
    assert figures(runs["one"][0], "one_way")[pair] == pytest.approx(PEER_SIZE / (2 * device_driver.ONE_WAY_S) / 1e9)
    assert figures(runs["one"][0], "both_ways")[pair] == pytest.approx(2 * PEER_SIZE / device_driver.BOTH_WAYS_S / 1e9)


def test_the_matrix_has_the_source_in_the_row(runs: Runs) -> None:
    matrix = runs["one"][0].facts["one_way_matrix"]
    speed = PEER_SIZE / device_driver.ONE_WAY_S / 1e9
    rows = [[0.0 if a == b else round(speed / (1 + a), 1) for b in range(3)] for a in range(3)]
    assert matrix == {"gpus": ["rank0", "rank1", "rank2"], "gb_s": rows}


def test_a_node_with_one_gpu_does_not_keep_the_others_waiting(runs: Runs) -> None:
    assert [one.error or one.skipped for one in runs["two"]] == [None] * 3
    assert set(figures(runs["two"][0], "one_way")) == {"node0/rank0->rank1", "node0/rank1->rank0"}
    assert runs["two"][2].metrics == ()


def test_nodes_with_one_gpu_each_have_no_pairs(runs: Runs) -> None:
    assert {one.skipped for one in runs["three"]} == {"nodes with one GPU have no pair of them"}


def test_unlike_models_are_joined_so_that_no_sku_judges_them(runs: Runs) -> None:
    assert " + another model" in str(runs["unlike"][0].facts["cpu"]) or "another model + " in str(
        runs["unlike"][0].facts["cpu"]
    )
