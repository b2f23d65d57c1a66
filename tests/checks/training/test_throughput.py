"""Training speed of a GPU, a node and the cluster: stages, efficiency, rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.training import throughput
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import Metric


def test_stages_grow_and_none_is_run_twice() -> None:
    both = {"a": (0, 2), "b": (1, 3)}
    assert throughput.groups_by_stage(both) == {
        "gpu": [[0], [1], [2], [3]],
        "node": [[0, 2], [1, 3]],
        "cluster": [[0, 1, 2, 3]],
    }
    assert list(throughput.groups_by_stage({"a": (0, 1)})) == ["gpu", "node"]
    assert list(throughput.groups_by_stage({"a": (0,), "b": (1,)})) == ["gpu", "cluster"]
    assert list(throughput.groups_by_stage({"a": (0,)})) == ["gpu"]


def test_efficiency_is_of_a_stage_over_its_baseline() -> None:
    def at(speed: float, ranks: int) -> TrainingResult:
        return TrainingResult({"tokens_per_second_per_gpu": speed}, Path(), "", ranks=tuple(range(ranks)))

    runs = {"gpu": [at(100, 1), at(120, 1), at(110, 1)], "node": [at(99, 2), at(99, 2)], "cluster": [at(88, 4)]}
    found = {one.name: one.value for one in throughput._scaling(runs) if isinstance(one, Metric)}
    assert found == pytest.approx(
        {
            "efficiency.node_vs_gpu": 90.0,
            "efficiency.cluster_vs_gpu": 80.0,
            "efficiency.cluster_vs_node": 100 * 88 / 99,
        }
    )


def test_layers_are_cut_only_of_the_shipped_model() -> None:
    assert throughput.layers_override(throughput.ThroughputOptions()) == (f"model.layers={throughput.LAYERS}",)
    assert throughput.layers_override(throughput.ThroughputOptions(layers=0)) == ()
    assert throughput.layers_override(throughput.ThroughputOptions(config="mine.yaml")) == ()
