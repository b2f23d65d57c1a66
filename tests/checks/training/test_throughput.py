"""train.throughput: stages, efficiency, layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.training import throughput
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import Measurement, Outcome
from tests.checks.fabric.verdicts import outcomes
from tests.checks.training import check_helpers
from tests.checks.training.check_helpers import measured


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


def scaling(runs: dict[str, list[TrainingResult]]) -> Measurement:
    return measured(throughput.CHECK, throughput._scaling_observations(runs))


def test_efficiency_relative_to_each_baseline() -> None:
    def result(speed: float, ranks: int) -> TrainingResult:
        return TrainingResult({"tokens_per_second_per_gpu": speed}, Path(), "", ranks=tuple(range(ranks)))

    runs = {
        "gpu": [result(100, 1), result(120, 1), result(110, 1)],
        "node": [result(99, 2), result(99, 2)],
        "cluster": [result(88, 4)],
    }
    measurement = scaling(runs)
    assert [(series.x, series.y) for series in measurement.series] == [((1, 2, 4), (110, 99, 88))]
    values = {metric.name: metric.value for metric in measurement.metrics}
    assert values == pytest.approx(
        {
            "efficiency.node_vs_gpu": 90.0,
            "efficiency.cluster_vs_gpu": 80.0,
            "efficiency.cluster_vs_node": 100 * 88 / 99,
        }
    )


GOOD = {"exit_code": 0, "steps_missing": 0, "nonfinite_losses": 0, "loss_drop": 1, "memory_excess": 0.5}
GOOD |= {"tokens_per_second_per_gpu.gpu": 30_000}
EFFICIENCIES = ("efficiency.node_vs_gpu", "efficiency.cluster_vs_node", "efficiency.cluster_vs_gpu")


def judged(values: dict[str, float], device: str = "cuda") -> dict[str, Outcome]:
    """Metric → outcome of the rule on each efficiency."""
    facts = {"device": device, "trained": "yes", "parallelism": "fsdp2", "cpu_offload": "no"}
    by_metric = outcomes(throughput.CHECK, GOOD | values, **facts)
    return {metric: by_metric[metric] for metric in EFFICIENCIES}


def test_every_efficiency_must_exceed_90_percent() -> None:
    node, cluster_of_node, cluster_of_gpu = EFFICIENCIES
    healthy = {node: 99.7, cluster_of_node: 97.3, cluster_of_gpu: 97.0}
    assert judged(healthy) == dict.fromkeys(EFFICIENCIES, Outcome.PASS)
    assert judged({**healthy, node: 10.0})[node] is Outcome.FAIL
    assert judged({**healthy, cluster_of_node: 90.0, cluster_of_gpu: 89.0}) == {
        node: Outcome.PASS,
        cluster_of_node: Outcome.FAIL,
        cluster_of_gpu: Outcome.FAIL,
    }


@pytest.mark.parametrize(
    ("ranks_by_node", "existing"),
    [
        ({"a": (0,)}, set()),
        ({"a": (0, 1)}, {"efficiency.node_vs_gpu"}),
        ({"a": (0,), "b": (1,)}, {"efficiency.cluster_vs_gpu"}),  # one GPU per node
        ({"a": (0, 1), "b": (2, 3)}, set(EFFICIENCIES)),
    ],
)
def test_efficiency_of_a_stage_that_does_not_exist_is_skipped(
    ranks_by_node: dict[str, tuple[int, ...]], existing: set[str]
) -> None:
    runs = {
        stage: [
            TrainingResult({"tokens_per_second_per_gpu": 100.0}, Path(), "", ranks=tuple(ranks)) for ranks in groups
        ]
        for stage, groups in throughput.groups_by_stage(ranks_by_node).items()
    }
    for device in ("cuda", "cpu"):
        answers = throughput._scaling_observations(runs)
        verdicts = check_helpers.outcomes(
            throughput.CHECK, [measured(throughput.CHECK, answers, device=device, trained="yes")]
        )
        passed = existing if device == "cuda" else set()
        expected = {name: Outcome.PASS if name in passed else Outcome.SKIP for name in EFFICIENCIES}
        assert {name: verdicts[name] for name in EFFICIENCIES} == expected


def test_missing_efficiency_of_an_existing_stage_is_an_error() -> None:
    assert (
        judged({"efficiency.cluster_vs_gpu": 95.0, "efficiency.cluster_vs_node": 95.0})[EFFICIENCIES[0]]
        is Outcome.ERROR
    )


def test_samples_of_an_efficiency_are_ratios_of_windows() -> None:
    def trained(seconds: list[float], ranks: int = 1) -> TrainingResult:
        steps = tuple({"step": step, "tokens": 100 * ranks, "seconds": value} for step, value in enumerate(seconds, 1))
        speed = 100 * len(seconds) / sum(seconds)
        metrics = {"tokens_per_second_per_gpu": speed, "steps_measured": len(steps), "world_size": ranks}
        return TrainingResult(metrics, Path(), "", steps=steps, ranks=tuple(range(ranks)))

    runs = {"gpu": [trained([1.0, 1.0]), trained([1.0, 1.0])], "node": [trained([1.25, 1.0], 2)]}
    (metric,) = scaling(runs).metrics
    assert metric.value == pytest.approx(100 * 2 / 2.25)
    assert metric.samples == pytest.approx((80.0, 100.0))


def test_layers_override_only_for_the_shipped_model() -> None:
    assert throughput.layers_override(throughput.ThroughputOptions()) == (f"model.layers={throughput.LAYERS}",)
    assert throughput.layers_override(throughput.ThroughputOptions(layers=0)) == ()
    assert throughput.layers_override(throughput.ThroughputOptions(config="mine.yaml")) == ()
