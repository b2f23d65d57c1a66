"""How much of the vendor's peak was reached: one line a model and figure, and unknown is unknown."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from seatrial.judge.baselines import Known, Sku, Spec, skus
from seatrial.judge.peaks import achieved
from seatrial.model import Insight, Measurement, Metric
from seatrial.report import render
from seatrial.rundir import load_trial
from seatrial.trial import rejudge

SHIPPED = Path(__file__).parents[2] / "docs" / "results"
# Of an earlier instrument: its fact `how` does not say that the streams wait for each other only at a window's ends
EARLIER = "2026-11-21-4xh200/acceptance.trial.json"
NAMED = (
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


def gemm(value: float, place: str, gpu: str | None = "NVIDIA H200", kind: str = "bf16") -> Measurement:
    metrics = (
        Metric(name=f"tflops.{kind}", value=value, unit="TFLOP/s", subject=place),
        Metric(name=f"relative_error.{kind}", value=0.001, unit="ratio", subject=place),
    )
    return Measurement(check="device.gemm", subject=place, metrics=metrics, facts={"gpu": gpu})


def told(*measurements: Measurement, sliced: frozenset[str] = frozenset()) -> list[Insight]:
    return list(achieved(measurements, Known(None, skus(), sliced=sliced)))


def test_one_gpu_is_told_with_the_peak_its_share_and_the_source() -> None:
    (one,) = told(gemm(673.0, "n/gpu0"))
    assert one.text.startswith("bf16 on NVIDIA H200: 673.0 of 989.5 TFLOP/s peak = 68.0% (pytorch/torchtitan")
    assert (one.check, one.values["peak"]) == ("device.gemm", 989.5)


def test_a_thousand_are_one_line_that_names_the_lowest() -> None:
    (one,) = told(*(gemm(660.0 + n % 10, f"n{n}/gpu0") for n in range(1000)), gemm(500.0, "n7/gpu3"))
    assert "bf16 on NVIDIA H200: 500.0–664.0–669.0 of 989.5 TFLOP/s peak = 50.5–67.1–67.6% " in one.text
    assert "(min–median–max of 1,001, lowest n7/gpu3; " in one.text
    assert one.values["lowest"] == "n7/gpu3"


def test_each_model_and_each_type_has_its_own_line() -> None:
    found = told(gemm(600, "a/gpu0"), gemm(700, "b/gpu0", "NVIDIA L40S"), gemm(1200, "a/gpu0", kind="fp8"))
    assert [one.text.partition(":")[0] for one in found] == [
        "bf16 on NVIDIA H200",
        "bf16 on NVIDIA L40S",
        "fp8 on NVIDIA H200",
    ]


def test_of_memory_all_that_is_moved_counts() -> None:
    metrics = tuple(Metric(name=name, value=4320, unit="GB/s", subject="n/gpu0") for name in ("copy", "triad"))
    one = Measurement(check="device.memory", subject="n/gpu0", metrics=metrics, facts={"gpu": "NVIDIA H200"})
    assert [" of 4800 GB/s peak = 90.0%" in found.text for found in told(one)] == [True, True]


@pytest.mark.parametrize(
    ("gpu", "kind", "sliced", "words"),
    [
        ("NVIDIA Strange", "bf16", (), "no SKU data for NVIDIA Strange"),
        ("NVIDIA H200", "fp4", (), ""),
        ("NVIDIA A100-SXM4-80GB", "fp8", (), "the SKU data of NVIDIA A100 SXM4 80GB has none of fp8 in TFLOP/s"),
        ("NVIDIA H200", "bf16", ("NVIDIA H200",), "what is known of the whole GPU does not apply to a part of it"),
    ],
)
def test_no_peak_is_ever_guessed(gpu: str, kind: str, sliced: tuple[str, ...], words: str) -> None:
    found = told(gemm(600, "n/gpu0", gpu, kind), sliced=frozenset(sliced))
    assert ["peak not known" in one.text and words in one.text for one in found] == [True] * bool(words)
    assert all("peak" not in one.values and "%" not in one.text for one in found)


def test_a_peak_in_another_unit_is_not_compared() -> None:
    strange = Sku(name="X", nvml_names=("X",), spec={"bf16": Spec(value=1, unit="PFLOP/s", source="a paper")})
    (one,) = achieved([gemm(600, "n/gpu0", "X")], Known(None, [strange]))
    assert "peak not known: the SKU data of X has none of bf16 in TFLOP/s" in one.text


def test_of_a_cpu_nothing_is_said() -> None:
    assert told(gemm(1.2, "n/rank0", None)) == []


def test_a_real_run_says_it_in_the_report() -> None:
    trial = rejudge(load_trial(SHIPPED / EARLIER))
    for words in ("663.6–670.2–676.8 of 989.5 TFLOP/s peak = 67.1–67.7–68.4%", "of 4800 GB/s peak = 91.0–"):
        for format in ("html", "markdown", "json"):
            assert words in render(trial, format), (words, format)


@pytest.mark.parametrize("name", NAMED)
def test_every_model_that_is_supported_has_its_peaks(name: str) -> None:
    sku = Known(None, skus()).sku(name)
    assert not isinstance(sku, str)
    due = {"bf16", "fp16", "tf32", "fp32", "hbm"} | ({"fp8"} if "A100" not in name else set())
    assert due - set(sku.spec) == ({"hbm"} if name == "NVIDIA H100 PCIe" else set())  # "greater than 2,000 GB/s"


def test_peaks_are_without_sparsity() -> None:
    """Of one architecture, each step down in bits doubles the products; none is of two such steps."""
    for sku in skus():
        spec = {name: one.value for name, one in sku.spec.items()}
        assert spec["fp16"] == spec["bf16"], sku.name
        assert spec["bf16"] / spec["tf32"] == pytest.approx(2, rel=0.02), sku.name
        assert spec.get("fp8", 2 * spec["bf16"]) / spec["bf16"] == pytest.approx(2, rel=0.02), sku.name
        assert spec["bf16"] / spec["fp32"] < 40, sku.name


@pytest.mark.parametrize(
    ("key", "metric", "without"),
    [
        ("gemm.bf16", "tflops.bf16", ()),
        ("gemm.fp16", "tflops.fp16", ()),
        ("gemm.tf32", "tflops.tf32", ()),
        ("gemm.fp8", "tflops.fp8", ()),
        ("memory.copy", "copy", ()),
        ("transfer.peer_one_way", "one_way", ()),
        ("transfer.peer_both_ways", "both_ways", (EARLIER,)),
    ],
)
def test_what_an_h200_reached_is_what_the_shipped_runs_say(key: str, metric: str, without: tuple[str, ...]) -> None:
    runs = [run for run in sorted(SHIPPED.glob("2026-11-21-*/*.trial.json")) if not str(run).endswith(without or "-")]
    found = [
        one.value
        for run in runs
        for measurement in load_trial(run).measurements
        for one in measurement.metrics
        if one.name == metric and measurement.check in ("device.gemm", "device.memory", "transfer.peers")
    ]
    (known,) = next(sku for sku in skus() if sku.name == "NVIDIA H200 SXM").expected[key]
    assert f"median of {len(found)} from {min(found):.1f} to {max(found):.1f}" in known.source
    assert known.value == round(median(found))
