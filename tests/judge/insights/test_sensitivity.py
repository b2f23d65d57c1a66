"""Detectable faults of thresholds on each node; of other thresholds: test_insights.py."""

from __future__ import annotations

from typing import Any

from benchmarks import judging
from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.judge.insights import trial_insights
from seatrial.model import Insight, Measurement, Metric, Threshold
from seatrial.pipeline.run_directory import load_trial
from tests.hardware.test_links import gpus
from tests.judge.insights.test_texts import collective
from tests.judge.insights.test_texts import insights as all_reduce_insights

LINK_GBPS = 370.8 / 18  # NCCL's planned bandwidth of each NVLink of an H200
EACH, PAIRS = "collectives.each_node", "collectives.gpu_pairs"


def node(check: str, number: int, ranks: int, size: str, value: float, gpu: str = "NVIDIA H200") -> Measurement:
    metric = Metric(name=f"busbw.{size}", value=value, unit="GB/s", subject=f"n{number}")
    facts: dict[str, Any] = {"backend": "nccl", "gpu": gpu, "world_size": ranks, "nodes": 1}
    return Measurement(check=check, subject=f"n{number}/gpu0", metrics=(metric,), facts=facts)


def thresholds(*measurements: Measurement, **expect: str) -> list[Insight]:
    """Threshold insights on the check of the first measurement; ``expect``: metric (``__`` for ``.``) → threshold."""
    check = measurements[0].check
    limits = {metric.replace("__", "."): Threshold.parse(text) for metric, text in expect.items()}
    config = Config(name="mine", checks={check: CheckSettings(expect=limits)})
    return [
        insight
        for insight in trial_insights(config, measurements, catalog())
        if insight.title == "threshold" and insight.check == check
    ]


def busbw_of(links: int, per_busbw: float) -> float:
    """Bus bandwidth in GB/s that ``links`` NVLinks can carry."""
    return links * LINK_GBPS / per_busbw


def test_each_node_has_one_insight_in_nvlinks() -> None:
    (insight,) = thresholds(*(node(EACH, number, 4, "8GiB", 360) for number in range(64)), gpus(18, 18, 18, 18))
    assert insight.text == (
        "busbw.8GiB >= 327 GB/s: 90% of the 363.3 GB/s of SKU NVIDIA H200 SXM; "
        "smallest detectable fault: 3 of a GPU's 18 NVLinks down"
    )
    assert busbw_of(18 - 2, 1) > 0.9 * 363.3 > busbw_of(18 - 3, 1)  # Ring: a GPU's links carry busbw


def test_fewer_links_carry_the_threshold_with_nvls() -> None:
    """A GPU sends S + S/8, and busbw is 2 · 7/8 · S / t: the links carry 9/14 of it."""
    (insight,) = thresholds(node(EACH, 0, 8, "8GiB", 470), node(EACH, 1, 8, "8GiB", 470), gpus(*[18] * 8))
    assert insight.text == (
        "busbw.8GiB >= 425.7 GB/s: 90% of the 473 GB/s of SKU NVIDIA H200 SXM; "
        "smallest detectable fault: 5 of a GPU's 18 NVLinks down (with NVLS)"
    )
    assert busbw_of(18 - 4, 9 / 14) > 425.7 > busbw_of(18 - 5, 9 / 14)
    assert busbw_of(18, 1) < 473  # Ring cannot reach it
    single_node = all_reduce_insights(collective("all_reduce", 473, 8, 1), gpus(*[18] * 8))["threshold"]
    assert single_node.text == insight.text


def test_gpu_pairs_have_one_insight_per_model() -> None:
    h200 = [node(PAIRS, number, 2, "1GiB", 360) for number in range(3)]
    t4 = [node(PAIRS, number, 2, "1GiB", 20, gpu="Tesla T4") for number in range(3, 6)]
    (insight,) = thresholds(*h200, *t4, gpus(18, 18))  # no reference for the T4
    assert insight.text == (
        "busbw.1GiB >= 323.9 GB/s: 90% of the 359.9 GB/s of SKU NVIDIA H200 SXM; "
        "smallest detectable fault: 3 of a GPU's 18 NVLinks down"
    )
    assert busbw_of(18 - 2, 1) > 0.9 * 359.9 > busbw_of(18 - 3, 1)
    from_rule, from_trial = thresholds(*h200, *t4, gpus(18, 12), busbw__1GiB=">= 15 GB/s")
    assert "of a GPU's 18 NVLinks down" in from_rule.text  # of this model; the other GPU has 12
    assert from_trial.text.startswith("busbw.1GiB >= 15 GB/s: 75% of the 20 GB/s measured in this trial; ")


def test_unknown_nvlinks_give_a_share() -> None:
    (insight,) = thresholds(node(PAIRS, 0, 2, "1GiB", 360))
    assert insight.text.endswith("; smallest detectable fault: a slowdown of 10%")


def test_metrics_that_were_not_measured_have_no_insight() -> None:
    assert thresholds(node(PAIRS, 0, 2, "64MiB", 250), gpus(18, 18)) == []
    measured = node(PAIRS, 0, 2, "1GiB", 360)
    assert thresholds(measured.model_copy(update={"facts": {**measured.facts, "backend": "gloo"}})) == []
    assert thresholds(measured.model_copy(update={"facts": {}})) == []


def test_many_nodes_have_one_insight_per_rule() -> None:
    config, _, measurements = judging.scale_trial(load_trial(judging.RECORD), 64, 8)
    pairs = [measurement for measurement in measurements if measurement.check == PAIRS and measurement.metrics]
    assert len(pairs) >= 64
    each_node = [node(EACH, number, 8, "8GiB", 470) for number in range(64)]
    insights = trial_insights(config, [*measurements, *each_node], catalog())
    rules = [
        (insight.check, insight.text.partition(" ")[0])
        for insight in insights
        if insight.title == "threshold" and insight.check in (EACH, PAIRS)
    ]
    assert sorted(rules) == sorted(
        [(EACH, "busbw.8GiB"), (PAIRS, "busbw.1GiB"), (PAIRS, "gpu_share"), (PAIRS, "path_share")]
    )
