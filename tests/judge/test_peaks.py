"""How much of the vendor's peak was reached: one line a model and figure, and unknown is unknown."""

from __future__ import annotations

from statistics import median

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware.references import References, Sku, Spec, skus
from seatrial.judge import judge
from seatrial.judge.peaks import achieved_over_peak
from seatrial.model import Insight, Measurement, Metric, Outcome, Threshold, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import render
from tests.paths import RESULTS

SHIPPED = RESULTS
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
    return list(achieved_over_peak(measurements, catalog(), References(None, skus(), mig_models=sliced)))


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
        ("NVIDIA H200", "bf16", ("NVIDIA H200",), "MIG enabled on NVIDIA H200"),
    ],
)
def test_no_peak_is_ever_guessed(gpu: str, kind: str, sliced: tuple[str, ...], words: str) -> None:
    found = told(gemm(600, "n/gpu0", gpu, kind), sliced=frozenset(sliced))
    assert ["peak not known" in one.text and words in one.text for one in found] == [True] * bool(words)
    assert all("peak" not in one.values and "%" not in one.text for one in found)


def test_a_peak_in_another_unit_is_not_compared() -> None:
    strange = Sku(name="X", nvml_names=("X",), spec={"bf16": Spec(value=1, unit="PFLOP/s", source="a paper")})
    (one,) = achieved_over_peak([gemm(600, "n/gpu0", "X")], catalog(), References(None, [strange]))
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
    sku = References(None, skus()).sku(name)
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
        ("transfer.peer_unidirectional", "unidirectional", ()),
        ("transfer.peer_bidirectional", "bidirectional", (EARLIER,)),
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


BF16, FP8 = "bf16 compute, fp32 trained weights", "fp8 products in blocks (MFU is of bf16's peak), else bf16 compute"
MISTRAL = 29.77e9  # FLOP a token, LoRA


def trained(
    speed: float, mfu: float, precision: str = BF16, gpu: str | None = "NVIDIA H200", **run: float
) -> Measurement:
    figures = (("tokens_per_second_per_gpu.native", speed, "tokens/s/GPU"), ("mfu.native", mfu, "%"))
    metrics = tuple(Metric(name=name, value=value, unit=unit, subject="cluster") for name, value, unit in figures)
    facts = {"gpu": gpu, "world_size": 1, "nodes": 1, "run.native": {"precision": precision, **run}}
    return Measurement(check="train.lora", subject="n0/gpu0", rank=0, metrics=metrics, facts=facts)


def impossible(one: Measurement, repeats: tuple[Measurement, ...] = ()) -> dict[str, Verdict]:
    """What is said to have been measured wrongly, though the trial's threshold holds."""
    expect = {"tokens_per_second_per_gpu.native": Threshold.parse("> 500 tokens/s/GPU")}
    config = Config(name="t", checks={"train.lora": CheckSettings(expect=expect)})
    said = judge(config, [], [one], catalog(), {}, retries=repeats)
    return {one.metric: one for one in said if "measured wrongly" in one.message and one.outcome is Outcome.ERROR}


def test_a_training_faster_than_its_gpu_multiplies_was_measured_wrongly() -> None:
    speed = "tokens_per_second_per_gpu.native"
    assert not impossible(trained(33_000, 99.3, flops_per_token=MISTRAL))
    wrong = impossible(trained(40_000, 120.3, flops_per_token=MISTRAL))
    assert set(wrong) == {speed, "mfu.native"}
    assert wrong[speed].message.startswith(
        f"{speed} is 40,000 tokens/s/GPU, which nothing here can reach: it was measured wrongly: "
        "a token takes 29.77 GFLOP, and NVIDIA H200 SXM has 989.5 TFLOP/s of bf16 ("
    )
    assert wrong[speed].message.endswith("): 33,238 tokens/s/GPU")


def test_a_record_that_tells_no_arithmetic_tells_its_mfu() -> None:
    assert set(impossible(trained(40_000, 120.3))) == {"mfu.native"}
    assert not impossible(trained(40_000, 120.3, gpu="NVIDIA Strange", flops_per_token=MISTRAL))
    assert not impossible(trained(40_000, 120.3, gpu=None, flops_per_token=MISTRAL))


def test_eight_bits_have_a_peak_of_their_own() -> None:
    """MFU stays a share of bf16's, so that it may be beyond 100 %."""
    assert not impossible(trained(40_000, 120.3, FP8, flops_per_token=MISTRAL))
    assert set(impossible(trained(67_000, 201, FP8, flops_per_token=MISTRAL))) == {
        "tokens_per_second_per_gpu.native",
        "mfu.native",
    }


def test_a_threshold_beyond_it_says_nothing_where_the_gpu_was_not_known_on_load() -> None:
    expect = {"tokens_per_second_per_gpu.native": Threshold.parse("> 40000 tokens/s/GPU")}
    config = Config(name="t", checks={"train.lora": CheckSettings(expect=expect)})
    said = judge(config, [], [trained(17_000, 51, flops_per_token=MISTRAL)], catalog(), {})
    (asked,) = [one for one in said if one.metric in expect]
    assert asked.outcome is Outcome.ERROR
    assert (
        "the threshold says nothing: > 40,000 tokens/s/GPU is above what the hardware can do: a token " in asked.message
    )


def test_a_second_measurement_is_held_to_it_too() -> None:
    again = trained(40_000, 120.3).model_copy(update={"retry": True})
    assert set(impossible(trained(17_000, 51), (again,))) == {"mfu.native"}


def test_the_small_transformer_of_ddp_is_bounded_too() -> None:
    load = {"precision": "bf16 autocast over fp32 weights", "flops_per_token": 5.7e8}
    metric = Metric(name="tokens_per_second_per_gpu", value=2e6, unit="tokens/s/GPU", subject="cluster")
    facts = {"gpu": "NVIDIA H200", "world_size": 2, "nodes": 1, "training": load}
    one = Measurement(check="train.ddp", subject="n0/gpu0", rank=0, metrics=(metric,), facts=facts)
    config = Config(name="t", checks={"train.ddp": CheckSettings()})
    wrong = [one for one in judge(config, [], [one], catalog(), {}) if "measured wrongly" in one.message]
    assert [(one.metric, one.outcome) for one in wrong] == [("tokens_per_second_per_gpu", Outcome.ERROR)]
