"""train.throughput: stages, efficiency, layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.training import throughput
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import Metric


def test_identical_stages_run_once() -> None:
    two_nodes = {"a": (0, 2), "b": (1, 3)}
    assert throughput.groups_by_stage(two_nodes) == {
        "gpu": [[0], [1], [2], [3]],
        "node": [[0, 2], [1, 3]],
        "cluster": [[0, 1, 2, 3]],
    }
    assert list(throughput.groups_by_stage({"a": (0, 1)})) == ["gpu", "node"]
    assert list(throughput.groups_by_stage({"a": (0,), "b": (1,)})) == ["gpu", "cluster"]
    assert list(throughput.groups_by_stage({"a": (0,)})) == ["gpu"]


def test_efficiency_relative_to_each_baseline() -> None:
    def result(speed: float, ranks: int) -> TrainingResult:
        return TrainingResult({"tokens_per_second_per_gpu": speed}, Path(), "", ranks=tuple(range(ranks)))

    runs = {
        "gpu": [result(100, 1), result(120, 1), result(110, 1)],
        "node": [result(99, 2), result(99, 2)],
        "cluster": [result(88, 4)],
    }
    values = {item.name: item.value for item in throughput._scaling(runs) if isinstance(item, Metric)}
    assert values == pytest.approx(
        {
            "efficiency.node_vs_gpu": 90.0,
            "efficiency.cluster_vs_gpu": 80.0,
            "efficiency.cluster_vs_node": 100 * 88 / 99,
        }
    )


def test_layers_override_only_for_the_shipped_model() -> None:
    assert throughput.layers_override(throughput.ThroughputOptions()) == (f"model.layers={throughput.LAYERS}",)
    assert throughput.layers_override(throughput.ThroughputOptions(layers=0)) == ()
    assert throughput.layers_override(throughput.ThroughputOptions(config="mine.yaml")) == ()
