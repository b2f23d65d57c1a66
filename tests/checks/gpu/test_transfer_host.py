from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from pydantic import JsonValue
from tools.records import record_path

from seatrial.checks.gpu.transfer_host import BUFFERS_PER_COPY, CHECK
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome
from seatrial.pipeline.run_directory import load_trial
from tests.bench.cluster import TWO, Scenario, run
from tests.checks.gpu import driver


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="module")
def measured(out: Path) -> list[Measurement]:
    scenario = Scenario(CHECK.name, nodes=TWO, options={"seconds": 0.1}, faults=("pinned", "nominal_time"))
    return run(out, driver.__name__, {"two": scenario})["two"]


def test_every_rank_has_all_metrics(measured: list[Measurement]) -> None:
    for measurement, subject in zip(measured, ("node0/rank0", "node0/rank1", "node1/rank2"), strict=True):
        assert measurement.error is None
        metrics = {metric.name: metric for metric in measurement.metrics}
        assert {name: metric.unit for name, metric in metrics.items()} == dict(CHECK.units)
        assert {metric.subject for metric in metrics.values()} == {subject}


def test_bandwidth_counts_both_directions(measured: list[Measurement]) -> None:
    """1 MB in 1 ms is 1 GB/s; d2h copies 1 MB, bidirectional 2 MB in 2 ms."""
    values = {metric.name: metric.value for metric in measured[0].metrics}
    for mode in ("single", "concurrent"):
        assert [values[f"{name}_{mode}"] for name in ("h2d", "d2h", "bidirectional")] == pytest.approx([1, 0.5, 1])


def test_facts_of_overlap_and_host_memory(measured: list[Measurement]) -> None:
    for measurement in measured:
        overlap = measurement.facts["concurrent"]
        assert isinstance(overlap, dict)
        assert {name: type(value) for name, value in overlap.items()} == dict.fromkeys(
            ("h2d", "d2h", "bidirectional"), bool
        )
        assert measurement.facts["host_memory"] == "test placement"


def test_single_copies_do_not_overlap(measured: list[Measurement], out: Path) -> None:
    """Compare the times of the single copies of the two ranks of a node."""
    spans = [single_span(out / f"copies{rank}") for rank in range(2)]
    assert all(first[1] <= second[0] for first, second in combinations(sorted(spans), 2))


def test_concurrent_bandwidth_is_not_compared_with_reference_values() -> None:
    def outcomes(*values: float) -> list[Outcome]:
        facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 1, "nodes": 1}
        metrics = [
            tuple(Metric(name=name, value=value, unit="GB/s", subject=f"n/gpu{gpu}") for name in CHECK.units)
            for gpu, value in enumerate(values)
        ]
        measurements = [
            Measurement(check=CHECK.name, subject=f"n/gpu{gpu}", metrics=gpu_metrics, facts=facts)
            for gpu, gpu_metrics in enumerate(metrics)
        ]
        verdicts = judge_check(CHECK, measurements, {}, "t", References(None, skus()))
        return [verdict.outcome for verdict in verdicts if verdict.metric == "h2d_concurrent"]

    assert outcomes(36.6, 38.3, 36.3, 36.3) == [Outcome.PASS] * 4  # host memory shared with other GPUs
    assert outcomes(55.4, 55.3, 55.4, 27.7) == [*[Outcome.PASS] * 3, Outcome.WARN]
    assert outcomes(55.4, 27.7) == [Outcome.PASS] * 2


def shipped(record: str) -> list[Measurement]:
    trial = load_trial(record_path(record))
    return [measurement for measurement in trial.measurements if measurement.check == CHECK.name]


def scaled(measurement: Measurement, factor: float, *names: str) -> Measurement:
    metrics = tuple(
        Metric(
            name=metric.name,
            value=factor * metric.value,
            unit=metric.unit,
            subject=metric.subject,
            samples=tuple(factor * sample for sample in metric.samples),
        )
        if metric.name in names
        else metric
        for metric in measurement.metrics
    )
    return measurement.model_copy(update={"metrics": metrics})


@pytest.mark.parametrize("name", [f"{direction}_concurrent" for direction in BUFFERS_PER_COPY])
@pytest.mark.parametrize("record", ["2026-11-22-4xh200/acceptance", "2026-11-22-2xh200/transfer-host-1"])
@pytest.mark.parametrize(("share", "factor"), [("one", 0.01), ("one", 0.0), ("all", 0.01), ("all", 0.0)])
def test_slow_concurrent_copies_fail(name: str, record: str, share: str, factor: float) -> None:
    good, *others = shipped(record)
    changed = [scaled(good, factor, name), *(scaled(other, factor if share == "all" else 1, name) for other in others)]
    failed = {
        verdict.subject
        for verdict in judge_check(CHECK, changed, {}, "t", References(None, skus()))
        if verdict.outcome is Outcome.FAIL and verdict.metric == name
    }
    assert failed == {measurement.subject for measurement in (changed if share == "all" else changed[:1])}


@pytest.mark.parametrize(("factor", "outcome"), [(0.3, Outcome.FAIL), (0.5, Outcome.WARN), (0.9, Outcome.PASS)])
def test_one_gpu_below_its_peers_in_a_concurrent_copy(factor: float, outcome: Outcome) -> None:
    good, *others = shipped("2026-11-22-4xh200/acceptance")
    verdicts = judge_check(CHECK, [scaled(good, factor, "h2d_concurrent"), *others], {}, "t", References(None, skus()))
    of_metric = {verdict.subject: verdict for verdict in verdicts if verdict.metric == "h2d_concurrent"}
    assert of_metric.pop(good.subject).outcome is outcome
    assert {verdict.outcome for verdict in of_metric.values()} == {Outcome.PASS}


def test_gpus_that_all_share_one_link_do_not_fail() -> None:
    """The designs with the lowest rates: one PCIe link of 55 GB/s for all GPUs."""
    measurements = [
        scaled(measurement, 55 / 4 / 41, "h2d_concurrent") for measurement in shipped("2026-11-22-4xh200/acceptance")
    ]
    verdicts = judge_check(CHECK, measurements, {}, "t", References(None, skus()))
    assert {v.outcome for v in verdicts if v.metric == "h2d_concurrent"} == {Outcome.PASS}


def single_span(path: Path) -> tuple[float, float]:
    """Return start and end time of the single copies, which end before the second h2d series."""
    entries = [line.split() for line in path.read_text().splitlines()]
    names = [name for name, _, _ in entries]
    end = next(i for i in range(names.index("bidirectional"), len(names)) if names[i] != "bidirectional")
    return float(entries[0][1]), float(entries[end - 1][2])
