"""Number of bad nodes that pairs can locate, and verdicts on pairs; real transfers: test_real_groups.py."""

from __future__ import annotations

import pytest

from seatrial.checks.fabric.pairs import CHECK, PairOptions, _max_locatable
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

GOOD = {"gpu_share node0/gpu0": 1.0, "path_share node0->node1": 1.0, "shared_paths": 0, "wrong_elements": 0}
COMPARABLE = {"backend": "nccl", "comparable": "yes"}


@pytest.mark.parametrize(
    ("nodes", "rounds", "bad"),
    [
        (2, 1, 0),  # either node may be at fault
        (3, 3, 1),  # each pauses once: two partners
        (4, 3, 1),
        (8, 7, 3),  # a majority is good
        (9, 4, 2),  # each may pause once
        (1000, 4, 3),  # one of four partners is good
    ],
)
def test_max_locatable_nodes(nodes: int, rounds: int, bad: int) -> None:
    assert _max_locatable(nodes, rounds) == bad


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
    assert set(judged.values()) == {Outcome.PASS}
    assert outcomes(CHECK, {**GOOD, metric: value}, **COMPARABLE) == {**judged, metric.partition(" ")[0]: outcome}


@pytest.mark.parametrize("facts", [{"backend": "gloo", "comparable": "yes"}, {"backend": "nccl", "comparable": "no"}])
def test_two_nodes_or_cpus_are_judged_on_data_only(facts: dict[str, str]) -> None:
    slow = {"gpu_share node0/gpu0": 0.1, "path_share node0->node1": 0.1, "shared_paths": 3, "wrong_elements": 1}
    judged = outcomes(CHECK, slow, **facts)
    assert judged.pop("wrong_elements") is Outcome.FAIL
    assert set(judged.values()) == {Outcome.SKIP}


def test_size_option_accepts_units() -> None:
    assert PairOptions.model_validate({"size": "1MiB"}).size == 2**20
