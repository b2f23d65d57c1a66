from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.bench import compute, rank
from seatrial.bench.timing import DeviceTiming
from seatrial.checks.base import Context
from seatrial.checks.gpu.gemm import CHECK, MAX_RELATIVE_ERROR
from seatrial.config.expect import declared_unit
from seatrial.hardware.references import References, Sku
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, ReferenceValue
from seatrial.worker import measure

SPEEDS = {"bf16": 790.0, "fp16": 780.0, "tf32": 400.0, "fp8": 1300.0, "fp32": 50.0}  # TFLOP/s
OPERATIONS = 2 * 8192**3


def place(out: Path, device: str) -> Context:
    return Context(
        node="n", rank=0, world_size=1, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


def judged(measurement: Measurement, expected: dict[str, float]) -> dict[str, Outcome]:
    known = {
        f"gemm.{kind}": (ReferenceValue(gpus=1, nodes=1, value=value, unit="TFLOP/s", source="test"),)
        for kind, value in expected.items()
    }
    sku = Sku(name="GPU X", nvml_names=("GPU X",), expected=known)
    return {one.metric: one.outcome for one in judge_check(CHECK, [measurement], {}, "t", References(None, [sku]))}


def on_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], **errors: float
) -> Measurement:
    def time_product(kind: str, size: int, device: str, seconds: float, least_s: float) -> DeviceTiming:
        assert (size, device, seconds, least_s) == (8192, "cuda:0", 2.0, 0.0)
        fast = OPERATIONS / SPEEDS[kind] / 1e12
        return DeviceTiming((fast, fast, 2 * fast), 40, 0.5, 0.0)

    about = {"backend": "cuda", "gpu": "GPU X", "cpu": None, "world_size": 1, "nodes": 1}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(compute, "time_matmul", time_product)
    monkeypatch.setattr(compute, "relative_error", lambda kind, size, device: errors.get(kind, 1e-6))
    monkeypatch.setattr(rank, "describe_device", lambda device: about)
    return measure(CHECK, place(tmp_path, "cuda:0"), {})


def test_a_cpu_multiplies_float32_and_is_held_to_its_accuracy(tmp_path: Path) -> None:
    found = measure(CHECK, place(tmp_path, "cpu"), {"size": 128, "seconds": 0.1})
    assert found.error is None
    assert {metric.name for metric in found.metrics} == {"tflops.fp32", "relative_error.fp32"}
    outcomes = judged(found, {})
    assert [name for name, outcome in outcomes.items() if outcome is Outcome.PASS] == ["relative_error.fp32"]
    assert set(outcomes.values()) == {Outcome.PASS, Outcome.SKIP}
    reasons = {one.message for one in judge_check(CHECK, [found], {}, "t") if one.metric == "relative_error.bf16"}
    assert reasons == {"does not apply: measured on GPUs only: a CPU may emulate it"}


def test_an_old_gpu_is_said_to_be_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = on_gpu(monkeypatch, tmp_path, (8, 0))
    reasons = {one.message for one in judge_check(CHECK, [found], {}, "t") if one.metric == "relative_error.fp8"}
    assert reasons == {"does not apply: needs compute capability 8.9, this GPU has 8.0"}


def test_figures_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = on_gpu(monkeypatch, tmp_path, (9, 0))
    figures = {metric.name: metric for metric in found.metrics}
    for kind, speed in SPEEDS.items():
        assert figures[f"tflops.{kind}"].value == pytest.approx(speed)
        assert figures[f"tflops.{kind}"].samples == pytest.approx((speed, speed, speed / 2))
    assert all(declared_unit(metric.name, CHECK.metrics) == metric.unit for metric in found.metrics)


def test_each_type_is_held_to_what_the_model_reaches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = on_gpu(monkeypatch, tmp_path, (9, 0))
    outcomes = judged(found, {"bf16": 790, "fp16": 840, "tf32": 500})
    assert outcomes["tflops.bf16"] is Outcome.PASS
    assert outcomes["tflops.fp16"] is Outcome.WARN
    assert outcomes["tflops.tf32"] is Outcome.FAIL
    assert outcomes["tflops.fp8"] is Outcome.UNJUDGED


@pytest.mark.parametrize("kind", list(MAX_RELATIVE_ERROR))
def test_a_wrong_product_fails_in_its_type_alone(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes = judged(on_gpu(monkeypatch, tmp_path, (9, 0), **{kind: 1.1 * MAX_RELATIVE_ERROR[kind]}), dict(SPEEDS))
    assert [name for name, outcome in outcomes.items() if outcome is not Outcome.PASS] == [f"relative_error.{kind}"]
    assert outcomes[f"relative_error.{kind}"] is Outcome.FAIL


def test_what_a_gpu_has_no_hardware_for_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = on_gpu(monkeypatch, tmp_path, (8, 0))
    outcomes = judged(found, dict(SPEEDS))
    assert (outcomes["tflops.fp8"], outcomes["relative_error.fp8"]) == (Outcome.SKIP, Outcome.SKIP)
    assert found.facts["unsupported_types"] == {"fp8": "needs compute capability 8.9, this GPU has 8.0"}


@pytest.mark.parametrize("options", [{"size": 100}, {"size": 0}, {"seconds": 0}, {"seconds": float("inf")}, {"n": 1}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CHECK.options.model_validate(options)
