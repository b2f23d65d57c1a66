"""Node counts and efficiencies of the scaling check; real groups: test_real_groups.py."""

from __future__ import annotations

import pytest

from seatrial.bench.collectives import Timings
from seatrial.bench.subgroups import GroupResult
from seatrial.checks.fabric.scaling import CHECK, _observations, ranks_by_node_count
from seatrial.model import Metric, Outcome
from tests.checks.fabric.verdicts import outcomes


def result(ranks: int, seconds: float) -> GroupResult:
    return GroupResult(tuple(range(ranks)), Timings(windows=((seconds,) * ranks,) * 3, per_window=1, warmup=1), {})


def test_node_counts_are_powers_of_two_and_all_nodes() -> None:
    assert ranks_by_node_count([[node] for node in range(6)]) == {2: [0, 1], 4: [0, 1, 2, 3], 6: [0, 1, 2, 3, 4, 5]}
    assert list(ranks_by_node_count([[2 * node, 2 * node + 1] for node in range(3)])) == [1, 2, 3]


def test_busbw_uses_rank_count_and_efficiency_compares_all_nodes() -> None:
    """1 GB in 10 ms: 100 GB/s algbw, times 2(n-1)/n."""
    observations = list(_observations({1: result(2, 0.01), 2: result(4, 0.01), 4: result(8, 0.02)}, 10**9))
    values = {metric.name: metric.value for metric in observations if isinstance(metric, Metric)}
    assert values == pytest.approx(
        {
            "busbw.1node": 100.0,
            "busbw.2nodes": 150.0,
            "busbw.4nodes": 87.5,
            "efficiency.1node": 0.875,
            "efficiency.2nodes": 87.5 / 150,
            "wrong_elements": 0,
        }
    )


def test_only_data_is_judged() -> None:
    figures = {"busbw.2nodes": 1.0, "efficiency.1node": 0.01, "wrong_elements": 2}
    assert outcomes(CHECK, figures, backend="nccl") == {"wrong_elements": Outcome.FAIL}
