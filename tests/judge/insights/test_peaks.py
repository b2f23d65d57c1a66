"""Achieved over peak: one insight per GPU model and metric; and values above the peak."""

from __future__ import annotations

import re
from statistics import median

import pytest
from pydantic import JsonValue
from tools.records import record_path, record_paths

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware.links import Links
from seatrial.hardware.references import References, Sku, Spec, skus
from seatrial.judge import judge
from seatrial.judge.insights.peaks import achieved_over_peak
from seatrial.model import Insight, Measurement, Metric, Outcome, Reason, Threshold, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import render

# An earlier version of the check, in which the streams of transfer.peers were not synchronized within a window
EARLIER = "2026-11-21-4xh200/acceptance"
SUPPORTED_GPUS = (
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL",
    "NVIDIA H200",
    "NVIDIA H200 NVL",
    "NVIDIA B200",
    "NVIDIA GB200",
    "NVIDIA L40S",
)


def gemm(value: float, subject: str, gpu: str | None = "NVIDIA H200", dtype: str = "bf16") -> Measurement:
    metrics = (
        Metric(name=f"tflops.{dtype}", value=value, unit="TFLOP/s", subject=subject),
        Metric(name=f"relative_error.{dtype}", value=0.001, unit="ratio", subject=subject),
    )
    return Measurement(check="device.gemm", subject=subject, metrics=metrics, facts={"gpu": gpu})


def insights(*measurements: Measurement, mig_models: frozenset[str] = frozenset()) -> list[Insight]:
    references = References(None, skus(), links=Links(mig_models=mig_models))
    return list(achieved_over_peak(measurements, catalog(), references))


def test_insight_of_one_gpu_names_peak_ratio_and_source() -> None:
    (insight,) = insights(gemm(673.0, "n/gpu0"))
    for text in ("bf16 on NVIDIA H200", "n/gpu0 673.0 TFLOP/s (68.0 %)", "989.5 TFLOP/s", "pytorch/torchtitan"):
        assert text in insight.text
    assert (insight.check, insight.values["peak"]) == ("device.gemm", 989.5)


def test_insight_of_many_gpus_names_the_lowest() -> None:
    (insight,) = insights(*(gemm(660.0 + n % 10, f"n{n}/gpu0") for n in range(1000)), gemm(500.0, "n7/gpu3"))
    assert insight.values["measured"] == [500.0, 664.0, 669.0]
    assert insight.values["lowest"] == "n7/gpu3"
    for text in ("500.0 TFLOP/s (50.5 %) on n7/gpu3", "664.0 TFLOP/s (67.1 %)", "669.0 TFLOP/s (67.6 %)", "1,001"):
        assert text in insight.text


def test_insight_of_two_gpus_names_both() -> None:
    (insight,) = insights(gemm(668.9, "vm/gpu0"), gemm(315.4, "vm/gpu1"))
    assert "vm/gpu1 315.4 TFLOP/s (31.9 %), vm/gpu0 668.9 TFLOP/s (67.6 %)" in insight.text
    assert insight.values["lowest"] == "vm/gpu1"


def test_each_model_and_data_type_has_an_insight() -> None:
    measurements = gemm(600, "a/gpu0"), gemm(700, "b/gpu0", "NVIDIA L40S"), gemm(1200, "a/gpu0", dtype="fp8")
    assert [(insight.values["metric"], insight.values["gpu"]) for insight in insights(*measurements)] == [
        ("bf16", "NVIDIA H200"),
        ("bf16", "NVIDIA L40S"),
        ("fp8", "NVIDIA H200"),
    ]


def test_memory_bandwidth_counts_reads_and_writes() -> None:
    metrics = tuple(Metric(name=name, value=4320, unit="GB/s", subject="n/gpu0") for name in ("copy", "triad"))
    measurement = Measurement(check="device.memory", subject="n/gpu0", metrics=metrics, facts={"gpu": "NVIDIA H200"})
    assert [insight.values["ratios"] for insight in insights(measurement)] == [[0.9] * 3] * 2


@pytest.mark.parametrize(
    ("gpu", "dtype", "mig_models", "texts"),
    [
        ("NVIDIA Unknown", "bf16", (), ("NVIDIA Unknown",)),
        ("NVIDIA H200", "fp4", (), ()),
        ("NVIDIA A100-SXM4-80GB", "fp8", (), ("NVIDIA A100 SXM4 80GB", "fp8 in TFLOP/s")),
        ("NVIDIA H200", "bf16", ("NVIDIA H200",), ("MIG",)),
    ],
)
def test_unknown_peak_is_named(gpu: str, dtype: str, mig_models: tuple[str, ...], texts: tuple[str, ...]) -> None:
    results = insights(gemm(600, "n/gpu0", gpu, dtype), mig_models=frozenset(mig_models))
    assert len(results) == bool(texts)
    for insight in results:
        assert all(text in insight.text for text in texts)
        assert "peak" not in insight.values
        assert "%" not in insight.text


def test_peak_in_another_unit_is_not_compared() -> None:
    sku = Sku(name="X", nvml_names=("X",), spec={"bf16": Spec(value=1, unit="PFLOP/s", source="a paper")})
    (insight,) = achieved_over_peak([gemm(600, "n/gpu0", "X")], catalog(), References(None, [sku]))
    assert "peak" not in insight.values


def test_cpu_has_no_insight() -> None:
    assert insights(gemm(1.2, "n/rank0", None)) == []


def test_insights_of_a_recorded_trial_are_in_each_report() -> None:
    trial = rejudge(load_trial(record_path(EARLIER)))
    for text in ("663.6 TFLOP/s (67.1 %)", "670.2 TFLOP/s (67.7 %)", "676.8 TFLOP/s (68.4 %)", "peak 4800 GB/s"):
        for format in ("html", "junit", "json"):
            assert text in render(trial, format), (text, format)


@pytest.mark.parametrize("name", SUPPORTED_GPUS)
def test_every_supported_model_has_peaks(name: str) -> None:
    sku = References(None, skus()).sku(name)
    assert not isinstance(sku, str)
    required = {"bf16", "fp16", "tf32", "fp32", "hbm"} | ({"fp8"} if "A100" not in name else set())
    # NVIDIA publishes "greater than 2,000 GB/s" for the H100 PCIe
    assert required - set(sku.spec) == ({"hbm"} if name == "NVIDIA H100 PCIe" else set())


def test_peaks_are_without_sparsity() -> None:
    """On one architecture, halving the bits doubles the peak; with sparsity the factor would be 4."""
    for sku in skus():
        spec = {name: line.value for name, line in sku.spec.items()}
        assert spec["fp16"] == spec["bf16"], sku.name
        assert spec["bf16"] / spec["tf32"] == pytest.approx(2, rel=0.02), sku.name
        assert spec.get("fp8", 2 * spec["bf16"]) / spec["bf16"] == pytest.approx(2, rel=0.02), sku.name
        assert spec["bf16"] < 40 * spec.get("fp32", spec["bf16"]), sku.name


@pytest.mark.parametrize(
    ("key", "metric", "excluded"),
    [
        ("gemm.bf16", "tflops.bf16", ()),
        ("gemm.fp16", "tflops.fp16", ()),
        ("gemm.tf32", "tflops.tf32", ()),
        ("gemm.fp8", "tflops.fp8", ()),
        ("memory.copy", "copy", ()),
        ("transfer.peer_unidirectional", "unidirectional", ()),
        ("transfer.peer_bidirectional", "bidirectional", (EARLIER,)),
    ],
)
def test_reference_values_of_the_h200_match_the_recorded_trials(
    key: str, metric: str, excluded: tuple[str, ...]
) -> None:
    runs = [run for name, run in record_paths().items() if re.match(r"2026-11-21-\dx", name) and name not in excluded]
    values = [
        measured.value
        for run in runs
        for measurement in load_trial(run).measurements
        for measured in measurement.metrics
        if measured.name == metric and measurement.check in ("device.gemm", "device.memory", "transfer.peers")
    ]
    (reference,) = next(sku for sku in skus() if sku.name == "NVIDIA H200 SXM").expected[key]
    assert f"median of {len(values)} from {min(values):.1f} to {max(values):.1f}" in reference.source
    assert reference.value == round(median(values))


BF16, FP8 = "bf16 compute, fp32 trained weights", "fp8 products in blocks (MFU is of bf16's peak), else bf16 compute"
MISTRAL = 29.77e9  # FLOP per token, LoRA
SPEED = "tokens_per_second_per_gpu.native"


def trained(
    speed: float, mfu: float, precision: str = BF16, gpu: str | None = "NVIDIA H200", **run: float
) -> Measurement:
    values = ((SPEED, speed, "tokens/s/GPU"), ("mfu.native", mfu, "%"))
    metrics = tuple(Metric(name=name, value=value, unit=unit, subject="cluster") for name, value, unit in values)
    facts: dict[str, JsonValue] = {
        "device": "cuda",
        "trained": "yes",
        "settings": "shipped",
        "gpu": gpu,
        "world_size": 1,
        "nodes": 1,
    }
    facts |= {"run.native": {"precision": precision, **run}}
    return Measurement(check="train.lora", subject="n0/gpu0", rank=0, metrics=metrics, facts=facts)


def above_peak(measurement: Measurement, retries: tuple[Measurement, ...] = ()) -> dict[str, Verdict]:
    """Metric → the ERROR for a value above the peak, although the threshold of the trial is met."""
    expect = {SPEED: Threshold.parse("> 500 tokens/s/GPU")}
    config = Config(name="t", checks={"train.lora": CheckSettings(expect=expect)})
    verdicts = judge(config, [], [measurement], catalog(), {}, retries=retries)
    errors = [verdict for verdict in verdicts if Reason.MEASUREMENT_ERROR in verdict.reasons]
    assert all(verdict.outcome is Outcome.ERROR for verdict in errors)
    return {verdict.metric: verdict for verdict in errors}


def test_training_faster_than_the_peak_is_a_measurement_error() -> None:
    assert not above_peak(trained(33_000, 99.3, flops_per_token=MISTRAL))
    errors = above_peak(trained(40_000, 120.3, flops_per_token=MISTRAL))
    assert set(errors) == {SPEED, "mfu.native"}
    assert errors[SPEED].value == 40_000
    for text in ("29.77 GFLOP", "989.5 TFLOP/s of bf16", "33,238 tokens/s/GPU"):
        assert text in errors[SPEED].detail


def test_without_flops_per_token_only_the_mfu_is_bounded() -> None:
    assert set(above_peak(trained(40_000, 120.3))) == {"mfu.native"}
    assert not above_peak(trained(40_000, 120.3, gpu="NVIDIA Unknown", flops_per_token=MISTRAL))
    assert not above_peak(trained(40_000, 120.3, gpu=None, flops_per_token=MISTRAL))


def test_fp8_has_its_own_peak() -> None:
    """MFU is relative to the peak of bf16 and may exceed 100 %."""
    assert not above_peak(trained(40_000, 120.3, FP8, flops_per_token=MISTRAL))
    assert set(above_peak(trained(67_000, 201, FP8, flops_per_token=MISTRAL))) == {SPEED, "mfu.native"}


def test_threshold_above_the_peak_is_an_error_if_the_gpu_was_unknown_on_load() -> None:
    expect = {SPEED: Threshold.parse("> 40000 tokens/s/GPU")}
    config = Config(name="t", checks={"train.lora": CheckSettings(expect=expect)})
    verdicts = judge(config, [], [trained(17_000, 51, flops_per_token=MISTRAL)], catalog(), {})
    verdict = [verdict for verdict in verdicts if verdict.metric == SPEED][-1]
    assert (verdict.outcome, verdict.reasons) == (Outcome.ERROR, (Reason.IMPOSSIBLE_THRESHOLD,))
    assert "> 40,000 tokens/s/GPU" in verdict.detail


def test_retry_is_bounded_too() -> None:
    retry = trained(40_000, 120.3).model_copy(update={"retry": True})
    assert set(above_peak(trained(17_000, 51), (retry,))) == {"mfu.native"}


def test_transformer_of_ddp_is_bounded() -> None:
    load = {"precision": "bf16 autocast over fp32 weights", "flops_per_token": 5.7e8}
    metric = Metric(name="tokens_per_second_per_gpu", value=2e6, unit="tokens/s/GPU", subject="cluster")
    facts = {"gpu": "NVIDIA H200", "world_size": 2, "nodes": 1, "training": load}
    measurement = Measurement(check="train.ddp", subject="n0/gpu0", rank=0, metrics=(metric,), facts=facts)
    config = Config(name="t", checks={"train.ddp": CheckSettings()})
    verdicts = judge(config, [], [measurement], catalog(), {})
    errors = [verdict for verdict in verdicts if Reason.MEASUREMENT_ERROR in verdict.reasons]
    assert [(verdict.metric, verdict.outcome) for verdict in errors] == [("tokens_per_second_per_gpu", Outcome.ERROR)]
