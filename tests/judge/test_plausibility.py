"""Thresholds that cannot be meant so are refused with the arithmetic; honest ones are left alone."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.config.layers import CheckSchema, resolve
from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.hardware.bounds import COLLECTIVE, MetricLookup, hardware_bound
from seatrial.hardware.references import References, Sku, skus
from seatrial.judge.plausibility import (
    baseline_errors,
    metric_lookups,
    reference_key,
    relative_strictness,
    threshold_error,
    threshold_errors,
    undetected_slowdown,
    validate_baseline,
    validate_thresholds,
)
from seatrial.model import Baseline, ReferenceValue, Threshold, UsageError

KNOWN = References(None, skus())
H100, A100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"
ALL = catalog()
FIGURES = metric_lookups(ALL)


def config(check: str, metric: str, limit: str, nodes: int = 1) -> Config:
    setting = CheckSettings(expect={metric: Threshold.parse(limit)})
    return Config(name="t", cluster=Cluster(nodes=nodes), checks={check: setting})


def shipped(trial: str) -> Config:
    known = {name: CheckSchema(check.options, check.metrics) for name, check in ALL.items()}
    return resolve(trial, environ={}, known=known).config


def complaint(check: str, metric: str, limit: str, gpus: tuple[str, ...], nodes: int = 1) -> str:
    try:
        validate_thresholds(config(check, metric, limit, nodes), ALL, gpus, None)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("check", "metric", "limit", "words"),
    [
        ("collectives.all_reduce", "busbw.8GiB", "> 800 GB/s", "450 GB/s of nvlink"),
        ("collectives.all_gather", "busbw.1GiB", "> 451 GB/s", "450 GB/s of nvlink"),
        ("device.gemm", "tflops.bf16", ">= 1000 TFLOP/s", "989.5 TFLOP/s of bf16 (NVIDIA H100"),
        ("device.burn", "tflops.sustained", "> 1000 TFLOP/s", "989.5 TFLOP/s of bf16"),
        ("device.memory", "copy", "> 3400 GB/s", "3,350 GB/s of hbm"),
        ("transfer.host", "h2d_single", "> 64 GB/s", "63 GB/s of pcie"),
        ("transfer.peers", "unidirectional", "> 451 GB/s", "450 GB/s of nvlink"),
        ("transfer.peers", "bidirectional", "> 901 GB/s", "= 900 GB/s"),
        ("collectives.gpu_pairs", "busbw.1GiB", "> 451 GB/s", "450 GB/s of nvlink"),
        ("transfer.host", "h2d_single", "> 0.05 GB/s", "1/1,108 of the 55.4 GB/s of SKU NVIDIA H100 SXM"),
        ("collectives.all_reduce", "busbw.8GiB", "> 0.46 GB/s", "is it meant in another unit?"),
    ],
)
def test_what_cannot_be_meant_so_is_refused_with_the_arithmetic(
    check: str, metric: str, limit: str, words: str
) -> None:
    said = complaint(check, metric, limit, (H100,) * 8)
    assert words in said
    assert f"checks.{check}.expect.{metric}: {limit.split()[0]}" in said


@pytest.mark.parametrize(
    ("check", "metric", "limit", "gpus"),
    [
        ("collectives.all_reduce", "busbw.8GiB", "> 480 GB/s", (H100,) * 8),  # NVLS exceeds the links' own rate
        ("collectives.all_reduce", "busbw.8GiB", "> 800 GB/s", ("NVIDIA B200",) * 8),
        ("transfer.peers", "bidirectional", "> 700 GB/s", (H100,) * 8),
        ("collectives.all_reduce", "busbw.8GiB", "> 100 GB/s", (H100,) * 8),  # weak, and meant so
        ("collectives.all_reduce", "busbw.8GiB", "> 9999 GB/s", ()),  # nobody knows the GPU yet
        ("collectives.all_reduce", "busbw.8GiB", "> 9999 GB/s", (H100, "NVIDIA Strange")),
        ("collectives.all_reduce", "latency.8GiB", "< 1 us", (H100,) * 8),
        ("train.ddp", "tokens_per_second_per_gpu", "> 500 tokens/s/GPU", (H100,) * 8),
        # known to reach 17,777 as it ships, and more with other settings
        ("train.lora", "tokens_per_second_per_gpu.native", "> 30000 tokens/s/GPU", ("NVIDIA H200",)),
    ],
)
def test_what_can_be_meant_so_is_left_alone(check: str, metric: str, limit: str, gpus: tuple[str, ...]) -> None:
    assert not complaint(check, metric, limit, gpus)


def test_another_unit_is_told_upwards_too() -> None:
    """Of a training whose arithmetic nobody told, such as one of a model that is not here."""
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 1, "nodes": 1}
    said = threshold_error(
        Threshold.parse("> 100000000 tokens/s/GPU"), "tokens/s/GPU", FIGURES["train.lora.native"], facts, KNOWN
    )
    assert "is 5,625 times the 17,777 tokens/s/GPU of SKU NVIDIA H200 SXM: is it meant in another unit?" in said


H200 = ("NVIDIA H200",)
_BF16 = "989.5 TFLOP/s of bf16"


@pytest.mark.parametrize(
    ("check", "run", "options", "least", "words"),
    [  # ``least`` tokens a second are refused, and nine tenths of them are not
        ("train.lora", ".native", {}, 33_300, f"a token takes 29.77 GFLOP, and NVIDIA H200 SXM has {_BF16}"),
        ("train.lora", ".hf", {}, 33_300, _BF16),
        ("train.lora", ".native", {"overrides": ["use_lora=false"]}, 22_400, "a token takes 44.26 GFLOP"),
        ("train.lora", ".native", {"overrides": ["fp8=true"]}, 66_500, "1,979 TFLOP/s of fp8"),
        ("train.lora", ".native", {"overrides": ["bf16=false"]}, 16_700, "494.5 TFLOP/s of tf32"),
        ("train.fsdp", ".native", {"layers": 32}, 22_400, _BF16),
        ("train.fsdp", ".native", {}, 342_000, _BF16),  # one layer may be all that fits
        ("train.throughput", ".cluster", {}, 72_500, _BF16),  # eight layers, 4096 tokens
        ("train.throughput", ".gpu", {"config": "tiny/throughput"}, 6.1e8, "494.5 TFLOP/s of tf32"),
        ("train.sft_mistral", "", {}, 22_400, _BF16),
        ("train.function_calling", "", {}, 28_000, _BF16),
    ],
)
def test_no_gpu_trains_faster_than_it_multiplies(
    check: str, run: str, options: dict[str, JsonValue], least: float, words: str
) -> None:
    def said(value: float) -> str:
        expect = {f"tokens_per_second_per_gpu{run}": Threshold.parse(f"> {value:g} tokens/s/GPU")}
        asked = Config(name="t", checks={check: CheckSettings(expect=expect, options=options)})
        try:
            validate_thresholds(asked, ALL, H200, None)
        except UsageError as error:
            return str(error)
        return ""

    assert "is above what the hardware can do: a token takes " in said(least)
    assert words in said(least)
    assert "above what the hardware can do" not in said(0.9 * least)


def test_of_a_model_that_is_not_known_here_nothing_is_foretold() -> None:
    overrides: list[JsonValue] = ["model.name=/models/of/another/machine"]
    expect = {"tokens_per_second_per_gpu.native": Threshold.parse("> 1e6 tokens/s/GPU")}
    asked = {"train.lora": CheckSettings(expect=expect, options={"overrides": overrides})}
    validate_thresholds(Config(name="t", checks=asked), ALL, H200, None)
    validate_thresholds(
        Config(name="t", checks={"train.lora": CheckSettings(expect=expect)}), ALL, ("NVIDIA Strange",), None
    )


@pytest.mark.parametrize(("limit", "refused"), [("> -3 GB/s", True), (">= 0 GB/s", True), ("> 0 GB/s", False)])
def test_a_gate_that_every_rate_passes_is_refused_whatever_the_hardware(limit: str, refused: bool) -> None:
    assert ("holds whatever is measured" in complaint("collectives.all_reduce", "busbw.8GiB", limit, ())) is refused


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (A100, "NVIDIA A100 SXM4 80GB has 300 GB/s of nvlink"),  # whose switches do not sum
        (L40S, "NVIDIA L40S has no NVLink between all GPUs, and 31.5 GB/s of pcie"),
        ("NVIDIA H100 PCIe", "63 GB/s of pcie (PCI Express 5.0: 32 GT/s × 16 lanes × 128/130 ÷ 8) × 2"),
        ("NVIDIA H200 NVL", "= 252 GB/s"),
    ],
)
def test_what_an_h100_reaches_is_not_asked_of_what_cannot(gpu: str, words: str) -> None:
    said = complaint("collectives.all_reduce", "busbw.8GiB", "> 350 GB/s", (gpu,) * 8)
    assert "> 350 GB/s is above what the hardware can do: " in said
    assert words in said


@pytest.mark.parametrize(("gpus", "nodes"), [(2, 1), (8, 1), (8, 4)])
def test_a_pair_of_gpus_is_a_pair_however_many_there_are(gpus: int, nodes: int) -> None:
    pair = ReferenceValue(gpus=2, nodes=1, value=360, unit="GB/s", source="a test")
    known = References(None, [Sku(name="H", nvml_names=(H100,), expected={"gpu_pairs.busbw.1GiB": (pair,)})])
    asked = config("collectives.gpu_pairs", "busbw.1GiB", "> 400 GB/s", nodes)
    (said,) = threshold_errors(asked, ALL, H100, gpus, known)
    assert "would reject good hardware, which reaches 360 GB/s in this shape" in said


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("trial", ["acceptance", "burn-in", "quick", "training"])
def test_no_shipped_trial_asks_what_good_hardware_fails(trial: str, gpus: int) -> None:
    config_ = shipped(trial)
    for sku in skus():
        validate_thresholds(config_, ALL, sku.nvml_names[:1] * gpus, None)


def test_between_two_that_a_bridge_may_join_nobody_knows_the_limit() -> None:
    """An NVLink bridge carries more than PCIe, and it may be missing."""
    assert not complaint("collectives.all_reduce", "busbw.8GiB", "> 200 GB/s", ("NVIDIA H100 NVL",) * 2)
    assert not complaint("transfer.peers", "unidirectional", "> 200 GB/s", ("NVIDIA H100 NVL",) * 2)
    assert "31.5 GB/s of pcie" in complaint("transfer.peers", "unidirectional", "> 32 GB/s", (L40S,) * 2)


@pytest.mark.parametrize(
    ("check", "metric", "limit", "words"),
    [
        ("collectives.broadcast", "busbw.1GiB", "> 451 GB/s", "450 GB/s of nvlink"),
        (
            "collectives.all_reduce",
            "algbw.8GiB",
            "> 515 GB/s",
            "= 514.3 GB/s",
        ),
        ("collectives.all_gather", "cuda_graph_busbw.1MiB", "> 800 GB/s", "= 700 GB/s"),
        ("collectives.scaling", "busbw.1", "> 800 GB/s", "= 700 GB/s"),
        ("device.memory", "triad", "> 3400 GB/s", "3,350 GB/s of hbm"),
        ("device.gemm", "tflops.fp8", "> 2000 TFLOP/s", "1,979 TFLOP/s of fp8"),
        ("transfer.host", "h2d_concurrent", "> 64 GB/s", "63 GB/s of pcie"),
        ("transfer.peers", "bidirectional", "> 901 GB/s", "= 900 GB/s"),
        ("train.ddp", "tokens_per_second_per_gpu", "< 500 tokens/s/GPU", "a rate is to be high"),
        ("collectives.all_gather", "busbw.1GiB", "< 350 GB/s", "a rate is to be high"),
        ("collectives.all_reduce", "latency.8GiB", "> 5 us", "a time is to be short"),
        ("train.cnn", "seconds", "< -1 s", "holds for nothing: this is never below 0"),
        ("collectives.all_reduce", "wrong_elements", "<= 1000000", "the check itself fails, which asks for == 0"),
        ("collectives.all_reduce", "wrong_elements", "<= -1", "holds for nothing"),
        ("device.gemm", "relative_error.bf16", "<= 1000", "the check itself fails"),
        ("device.gemm", "relative_error.bf16", ">= 0", "the check itself fails"),
        ("collectives.all_reduce", "busbw.8GiB", "> 510 GB/s", "would reject good hardware, which reaches 480 GB/s"),
    ],
)
def test_no_way_round_the_limits(check: str, metric: str, limit: str, words: str) -> None:
    assert words in complaint(check, metric, limit, (H100,) * 8)


@pytest.mark.parametrize(
    ("check", "metric", "limit"),
    [
        ("collectives.all_reduce", "wrong_elements", "<= 0"),
        ("device.burn", "drift", "<= 10 %"),  # weaker than the check's own, and only a warning there
        ("device.burn", "throttled_share", "<= 5 %"),
        ("device.burn", "drift", "> -3 %"),  # a drift has a sign
        ("device.memory", "tested_share", ">= 50 %"),
        ("train.function_calling", "tokens_per_second_per_gpu", "> 500 tokens/s/GPU"),
        ("collectives.all_reduce", "busbw.8GiB", "> 490 GB/s"),  # two good ones differ by so much
    ],
)
def test_what_a_trial_may_change_is_left_to_it(check: str, metric: str, limit: str) -> None:
    assert not complaint(check, metric, limit, (H100,) * 8)


@pytest.mark.parametrize(
    ("operation", "limit", "words"),
    [
        (
            "all_gather",
            "> 401 GB/s",
            "ib-8x400 carries 400 GB/s out of a node, and all_gather sends 1 × its busbw: 400",
        ),
        ("all_to_all", "> 94 GB/s", "4.27 × its busbw: 93.75 GB/s"),
    ],
)
def test_between_nodes_the_network_is_the_limit_where_its_class_is_known(
    operation: str, limit: str, words: str
) -> None:
    facts: dict[str, JsonValue] = {"gpu": H100, "world_size": 16, "nodes": 2}
    figure, asked = MetricLookup(f"{operation}.busbw.8GiB", "busbw.8GiB", COLLECTIVE, operation), Threshold.parse(limit)
    assert words in threshold_error(asked, "GB/s", figure, facts, References(None, skus(), fabric="ib-8x400"))
    assert not threshold_error(asked, "GB/s", figure, facts, KNOWN)
    rack: dict[str, JsonValue] = {"gpu": "NVIDIA GB200", "world_size": 8, "nodes": 2}  # NVLink joins these nodes
    assert not threshold_error(asked, "GB/s", figure, rack, References(None, skus(), fabric="ib-4x400"))


def test_between_nodes_an_all_reduce_asks_least_of_the_network_by_tree() -> None:
    facts: dict[str, JsonValue] = {"gpu": H100, "world_size": 16, "nodes": 2}
    asked, known = Threshold.parse("> 376 GB/s"), References(None, skus(), fabric="ib-8x200")
    assert "0.533 × its busbw: 375 GB/s" in threshold_error(
        asked, "GB/s", FIGURES["all_reduce.busbw.8GiB"], facts, known
    )


@pytest.mark.parametrize(
    ("limit", "own", "share"),
    [
        ("<= 1", "== 0", 0),
        ("== 0", "== 0", 1),
        (">= 1 bool", "== 1 bool", 1),
        (">= 0 bool", "== 1 bool", 0),
        ("> 500 tokens/s", ">= 2000 tokens/s", 0.25),
        ("> 3000 tokens/s", ">= 2000 tokens/s", 1),
        ("<= 10 %", "<= 5 %", 0.5),
        ("<= 1 %", "<= 5 %", 1),
        ("<= 5 %", "<= 0 %", 0),
        (">= 0", "<= 5", 0),
        ("> 1", None, 1),
    ],
)
def test_how_much_of_what_a_check_asks_a_trial_leaves(limit: str, own: str | None, share: float) -> None:
    assert relative_strictness(Threshold.parse(limit), Threshold.parse(own) if own else None) == share


def test_two_nodes_of_h100_cannot_reach_what_one_suite_asks_of_them() -> None:
    """800 GB/s, a shipped gate (research on peers): more than their NVLinks carry, however they sum."""
    said = complaint("collectives.all_reduce", "busbw.8GiB", "> 800 GB/s", (H100,) * 8, nodes=2)
    assert "= 750 GB/s" in said


def test_of_each_node_no_more_is_asked_than_one_can() -> None:
    asked = ("collectives.each_node", "busbw.8GiB", "> 510 GB/s", (H100,) * 8, 2)
    assert "would reject good hardware, which reaches 480 GB/s in this shape" in complaint(*asked)


def test_of_mixed_models_the_best_bounds() -> None:
    assert not complaint("device.gemm", "tflops.bf16", "> 1000 TFLOP/s", (H100, "NVIDIA B200"))
    assert complaint("device.gemm", "tflops.bf16", "> 2300 TFLOP/s", (H100, "NVIDIA B200"))


def test_a_slice_has_no_bound() -> None:
    slice_: dict[str, JsonValue] = {"gpu": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "world_size": 1, "nodes": 1}
    assert hardware_bound(FIGURES["gemm.bf16"], slice_, KNOWN) is None
    assert not threshold_error(Threshold.parse("> 400 TFLOP/s"), "TFLOP/s", FIGURES["gemm.bf16"], slice_, KNOWN)


def test_a_site_baseline_above_the_hardware_is_refused() -> None:
    def site(value: float, floor: float | None = None) -> Baseline:
        own = ReferenceValue(gpus=1, nodes=1, value=value, required=floor, unit="GB/s", source="a run", gpu=H100)
        return Baseline(name="lab", learned_from=(), expected={"memory.copy": (own,)})

    assert not list(baseline_errors(site(3000), KNOWN, FIGURES))
    with pytest.raises(UsageError, match=r"baseline lab: memory\.copy is 3,400 GB/s: NVIDIA H100 SXM has 3,350 GB/s"):
        validate_thresholds(config("train.ddp", "scaling_efficiency", "> 90 %"), ALL, (), site(3400))
    with pytest.raises(UsageError, match=r"baseline lab: memory\.copy is 9,999 GB/s: "):
        validate_baseline(site(3000, floor=9999), ALL)


def test_what_ships_is_possible_and_every_network_is_named() -> None:
    for sku in skus():
        for key, values in sku.expected.items():
            for one in values:
                facts: dict[str, JsonValue] = {"gpu": sku.nvml_names[0], "world_size": one.gpus, "nodes": one.nodes}
                most = hardware_bound(FIGURES.get(key, MetricLookup(key)), facts, KNOWN)
                assert most is None or (most.unit == one.unit and one.value <= most.value), (sku.name, key)
                assert bool(one.fabric) == (one.nodes > 1), (sku.name, key)
                assert one.required is None or one.required < 0.95 * one.value, (sku.name, key)
        assert all(spec.source for spec in sku.spec.values())


def unknown(gpu: str, gpus: int) -> set[str]:
    """What the shipped acceptance asks of a node of such GPUs, and nobody knows."""
    asked = {
        (rule.reference, gpus if ".busbw." in rule.reference else 1)
        for name, setting in shipped("acceptance").checks.items()
        for rule in ALL[name].rules
        if rule.reference
        and rule.metric not in setting.expect
        and not rule.reference_optional
        and not name.startswith("train.")
    }
    shape: dict[str, JsonValue] = {"gpu": gpu, "nodes": 1}
    return {
        key for key, ranks in asked if isinstance(KNOWN.site_or_sku_reference(key, {**shape, "world_size": ranks}), str)
    }


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("gpu", [H100, "NVIDIA H200"])
def test_good_nodes_of_h100_and_h200_can_be_accepted_without_a_baseline(gpu: str, gpus: int) -> None:
    assert not unknown(gpu, gpus)


def test_of_others_it_is_known_what_is_missing() -> None:
    assert "all_reduce.busbw.8GiB" not in unknown(A100, 8)
    assert {"all_gather.busbw.1GiB", "gemm.fp16"} <= unknown(A100, 8)


def test_another_size_has_the_key_of_its_family() -> None:
    rules = ALL["collectives.all_reduce"].rules
    assert reference_key("busbw.1GiB", rules) == "all_reduce.busbw.1GiB"
    assert reference_key("latency.8GiB", rules) == ""
    assert reference_key("tflops.fp32", ALL["device.gemm"].rules) == ""


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.3, "a 3.3x slowdown would pass"),
        (0.001, "a 1,000x slowdown would pass"),
        (0.0, "any slowdown would pass"),
    ],
)
def test_the_slowdown_that_a_threshold_does_not_see_is_computed(share: float, words: str) -> None:
    assert undetected_slowdown(share) == words


def test_every_key_of_the_sku_data_that_is_compared_is_bounded_or_of_a_training() -> None:
    assert all(figure.bounded_by or key.startswith("train.") for key, figure in FIGURES.items())
