from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.bench import compute, rank
from seatrial.bench.timing import DeviceTiming
from seatrial.checks.check import Context
from seatrial.checks.gpu.gemm import CHECK, MAX_RELATIVE_ERROR
from seatrial.config.expect import declared_unit
from seatrial.hardware.references import References, Sku
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Reason, ReferenceValue
from seatrial.worker import measure

SPEEDS = {"bf16": 790.0, "fp16": 780.0, "tf32": 400.0, "fp8": 1300.0, "fp32": 50.0}  # TFLOP/s
OPERATIONS = 2 * 8192**3


def make_context(out: Path, device: str) -> Context:
    return Context(
        node="n", rank=0, world_size=1, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


def judged(measurement: Measurement, expected: dict[str, float]) -> dict[str, Outcome]:
    references = {
        f"gemm.{dtype}": (ReferenceValue(gpus=1, nodes=1, value=value, unit="TFLOP/s", source="test"),)
        for dtype, value in expected.items()
    }
    sku = Sku(name="GPU X", nvml_names=("GPU X",), expected=references)
    return {
        verdict.metric: verdict.outcome
        for verdict in judge_check(CHECK, [measurement], {}, "t", References(None, [sku]))
    }


def on_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], **errors: float
) -> Measurement:
    def time_product(dtype: str, size: int, device: str, seconds: float, min_seconds: float) -> DeviceTiming:
        assert (size, device, seconds, min_seconds) == (8192, "cuda:0", 2.0, 0.0)
        seconds_per_product = OPERATIONS / SPEEDS[dtype] / 1e12
        return DeviceTiming((seconds_per_product, seconds_per_product, 2 * seconds_per_product), 40, 0.5, 0.0)

    device_facts = {"backend": "cuda", "gpu": "GPU X", "cpu": None, "world_size": 1, "nodes": 1}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(compute, "time_matmul", time_product)
    monkeypatch.setattr(compute, "relative_error", lambda dtype, size, device: errors.get(dtype, 1e-6))
    monkeypatch.setattr(rank, "describe_device", lambda device: device_facts)
    return measure(CHECK, make_context(tmp_path, "cuda:0"), {})


def test_cpu_has_float32_accuracy_only(tmp_path: Path) -> None:
    measurement = measure(CHECK, make_context(tmp_path, "cpu"), {"size": 128, "seconds": 0.1})
    assert measurement.error is None
    assert {metric.name for metric in measurement.metrics} == {"tflops.fp32", "relative_error.fp32"}
    outcomes = judged(measurement, {})
    assert [name for name, outcome in outcomes.items() if outcome is Outcome.PASS] == ["relative_error.fp32"]
    assert set(outcomes.values()) == {Outcome.PASS, Outcome.SKIP}
    assert unsupported_types(measurement).keys() == {"bf16", "fp16", "tf32", "fp8"}


def unsupported_types(measurement: Measurement) -> dict[str, str]:
    """Return dtype → why it has no accuracy, and assert that its speed and both verdicts have the same reason."""
    reasons = {each.metric: each.reason for each in measurement.absent}
    verdicts = [each for each in judge_check(CHECK, [measurement], {}, "t") if each.metric in reasons]
    accuracies = {name.partition(".")[2]: reason for name, reason in reasons.items() if name.startswith("relative_")}
    for dtype, reason in accuracies.items():
        assert reasons[f"tflops.{dtype}"] == reason
        (verdict,) = (each for each in verdicts if each.metric == f"relative_error.{dtype}")
        assert (verdict.reasons, verdict.detail) == ((Reason.NOT_APPLICABLE,), reason)
    return accuracies


def test_reason_of_an_unsupported_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reasons = unsupported_types(on_gpu(monkeypatch, tmp_path, (8, 0)))
    assert reasons.keys() == {"fp8"}
    assert "8.9" in reasons["fp8"]
    assert "8.0" in reasons["fp8"]


def test_metrics_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measurement = on_gpu(monkeypatch, tmp_path, (9, 0))
    metrics = {metric.name: metric for metric in measurement.metrics}
    for dtype, speed in SPEEDS.items():
        assert metrics[f"tflops.{dtype}"].value == pytest.approx(speed)
        assert metrics[f"tflops.{dtype}"].samples == pytest.approx((speed, speed, speed / 2))
    assert all(declared_unit(metric.name, CHECK.units) == metric.unit for metric in measurement.metrics)


def test_each_dtype_has_a_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measurement = on_gpu(monkeypatch, tmp_path, (9, 0))
    outcomes = judged(measurement, {"bf16": 790, "fp16": 840, "tf32": 500})
    assert outcomes["tflops.bf16"] is Outcome.PASS
    assert outcomes["tflops.fp16"] is Outcome.WARN
    assert outcomes["tflops.tf32"] is Outcome.FAIL
    assert outcomes["tflops.fp8"] is Outcome.UNJUDGED


@pytest.mark.parametrize("dtype", list(MAX_RELATIVE_ERROR))
def test_wrong_product_fails_in_its_dtype_only(dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes = judged(on_gpu(monkeypatch, tmp_path, (9, 0), **{dtype: 1.1 * MAX_RELATIVE_ERROR[dtype]}), dict(SPEEDS))
    assert [name for name, outcome in outcomes.items() if outcome is not Outcome.PASS] == [f"relative_error.{dtype}"]
    assert outcomes[f"relative_error.{dtype}"] is Outcome.FAIL


def test_unsupported_dtype_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measurement = on_gpu(monkeypatch, tmp_path, (8, 0))
    outcomes = judged(measurement, dict(SPEEDS))
    assert (outcomes["tflops.fp8"], outcomes["relative_error.fp8"]) == (Outcome.SKIP, Outcome.SKIP)


@pytest.mark.parametrize("options", [{"size": 100}, {"size": 0}, {"seconds": 0}, {"seconds": float("inf")}, {"n": 1}])
def test_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CHECK.options.model_validate(options)
