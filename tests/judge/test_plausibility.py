"""Invalid thresholds and baseline values are rejected with the derivation; valid ones are accepted."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.config.layers import resolve
from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.hardware.bounds import MetricLookup, hardware_bound
from seatrial.hardware.links import COLLECTIVE, Links
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

REFERENCES = References(None, skus())
H100, A100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"
CHECKS = catalog()
LOOKUPS = metric_lookups(CHECKS)


def config(check: str, metric: str, threshold: str, nodes: int = 1, *, override: bool = False) -> Config:
    setting = CheckSettings(expect={metric: Threshold.parse(threshold)}, override=override)
    return Config(name="t", cluster=Cluster(nodes=nodes), checks={check: setting})


def shipped(trial: str) -> Config:
    schemas = CHECKS
    return resolve(trial, environ={}, schemas=schemas).config


def rejection(
    check: str, metric: str, threshold: str, gpus: tuple[str, ...], nodes: int = 1, *, override: bool = False
) -> str:
    try:
        validate_thresholds(config(check, metric, threshold, nodes, override=override), CHECKS, gpus, None)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("check", "metric", "threshold", "text"),
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
        ("transfer.host", "h2d_single", "> 0.05 GB/s", "1/1,090 of the 54.5 GB/s of SKU NVIDIA H100 SXM"),
        ("collectives.all_reduce", "busbw.8GiB", "> 0.46 GB/s", "of SKU NVIDIA H100 SXM"),
    ],
)
def test_impossible_threshold_is_rejected_with_the_derivation(
    check: str, metric: str, threshold: str, text: str
) -> None:
    message = rejection(check, metric, threshold, (H100,) * 8)
    assert text in message
    assert f"checks.{check}.expect.{metric}: {threshold.split()[0]}" in message


@pytest.mark.parametrize(
    ("check", "metric", "threshold", "gpus"),
    [
        ("collectives.all_reduce", "busbw.8GiB", "> 480 GB/s", (H100,) * 8),  # NVLS exceeds the links' own rate
        ("collectives.all_reduce", "busbw.8GiB", "> 800 GB/s", ("NVIDIA B200",) * 8),
        ("transfer.peers", "bidirectional", "> 700 GB/s", (H100,) * 8),
        ("collectives.all_reduce", "busbw.8GiB", "> 100 GB/s", (H100,) * 8),  # lax, but valid
        ("collectives.all_reduce", "busbw.8GiB", "> 9999 GB/s", ()),  # GPU model unknown
        ("collectives.all_reduce", "busbw.8GiB", "> 9999 GB/s", (H100, "NVIDIA Strange")),
        ("collectives.all_reduce", "latency.8GiB", "< 1 us", (H100,) * 8),
        ("train.ddp", "tokens_per_second_per_gpu", "> 500 tokens/s/GPU", (H100,) * 8),
        # reaches 17,777 as shipped, and more with other settings
        ("train.lora", "tokens_per_second_per_gpu.native", "> 30000 tokens/s/GPU", ("NVIDIA H200",)),
    ],
)
def test_possible_threshold_is_accepted(check: str, metric: str, threshold: str, gpus: tuple[str, ...]) -> None:
    assert not rejection(check, metric, threshold, gpus)


def test_threshold_far_above_the_reference_value_is_rejected() -> None:
    """For a training without recorded FLOP per token, such as one of an unknown model."""
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 1, "nodes": 1}
    message = threshold_error(
        Threshold.parse("> 100000000 tokens/s/GPU"), "tokens/s/GPU", LOOKUPS["train.lora.native"], facts, REFERENCES
    )
    assert "5,625 times the 17,777 tokens/s/GPU of SKU NVIDIA H200 SXM" in message


H200 = ("NVIDIA H200",)
_BF16 = "989.5 TFLOP/s of bf16"


@pytest.mark.parametrize(
    ("check", "run", "options", "rejected", "text"),
    [  # ``rejected`` tokens/s are rejected, 90 % of them are not
        ("train.lora", ".native", {}, 33_300, f"a token takes 29.77 GFLOP, and NVIDIA H200 SXM has {_BF16}"),
        ("train.lora", ".hf", {}, 33_300, _BF16),
        ("train.lora", ".native", {"overrides": ["use_lora=false"]}, 22_400, "a token takes 44.26 GFLOP"),
        ("train.lora", ".native", {"overrides": ["fp8=true"]}, 66_500, "1,979 TFLOP/s of fp8"),
        ("train.lora", ".native", {"overrides": ["bf16=false"]}, 16_700, "494.5 TFLOP/s of tf32"),
        ("train.fsdp", ".native", {"layers": 32}, 22_400, _BF16),
        ("train.fsdp", ".native", {}, 342_000, _BF16),  # at least one layer fits
        ("train.throughput", ".cluster", {}, 72_500, _BF16),  # eight layers, 4096 tokens
        ("train.throughput", ".gpu", {"config": "tiny/throughput"}, 6.1e8, "494.5 TFLOP/s of tf32"),
        ("train.sft_mistral", "", {}, 22_400, _BF16),
        ("train.function_calling", "", {}, 28_000, _BF16),
    ],
)
def test_training_threshold_above_the_peak_is_rejected(
    check: str, run: str, options: dict[str, JsonValue], rejected: float, text: str
) -> None:
    def message(value: float) -> str:
        expect = {f"tokens_per_second_per_gpu{run}": Threshold.parse(f"> {value:g} tokens/s/GPU")}
        trial = Config(name="t", checks={check: CheckSettings(expect=expect, options=options)})
        try:
            validate_thresholds(trial, CHECKS, H200, None)
        except UsageError as error:
            return str(error)
        return ""

    assert "a token takes " in message(rejected)
    assert text in message(rejected)
    assert "a token takes " not in message(0.9 * rejected)


def test_training_of_an_unknown_model_has_no_bound() -> None:
    overrides: list[JsonValue] = ["model.name=/models/of/another/machine"]
    expect = {"tokens_per_second_per_gpu.native": Threshold.parse("> 1e6 tokens/s/GPU")}
    checks = {"train.lora": CheckSettings(expect=expect, options={"overrides": overrides})}
    validate_thresholds(Config(name="t", checks=checks), CHECKS, H200, None)
    validate_thresholds(
        Config(name="t", checks={"train.lora": CheckSettings(expect=expect)}), CHECKS, ("NVIDIA Strange",), None
    )


@pytest.mark.parametrize(("threshold", "is_rejected"), [("> -3 GB/s", True), (">= 0 GB/s", True), ("> 0 GB/s", False)])
def test_threshold_that_every_rate_meets_is_rejected(threshold: str, is_rejected: bool) -> None:
    assert ("always true" in rejection("collectives.all_reduce", "busbw.8GiB", threshold, ())) is is_rejected


@pytest.mark.parametrize(
    ("gpu", "text"),
    [
        (A100, "NVIDIA A100 SXM4 80GB has 300 GB/s of nvlink"),  # its switches do not reduce
        (L40S, "NVIDIA L40S has no NVLink between all GPUs, and 31.5 GB/s of pcie"),
        ("NVIDIA H100 PCIe", "63 GB/s of pcie (PCI Express 5.0: 32 GT/s × 16 lanes × 128/130 ÷ 8) × 2"),
        ("NVIDIA H200 NVL", "= 252 GB/s"),
    ],
)
def test_threshold_for_h100_is_rejected_for_slower_links(gpu: str, text: str) -> None:
    message = rejection("collectives.all_reduce", "busbw.8GiB", "> 350 GB/s", (gpu,) * 8)
    assert "> 350 GB/s" in message
    assert text in message


@pytest.mark.parametrize(("gpus", "nodes"), [(2, 1), (8, 1), (8, 4)])
def test_reference_value_of_pairs_is_that_of_two_gpus(gpus: int, nodes: int) -> None:
    pair = ReferenceValue(gpus=2, nodes=1, value=360, unit="GB/s", source="a test")
    references = References(None, [Sku(name="H", nvml_names=(H100,), expected={"gpu_pairs.busbw.1GiB": (pair,)})])
    trial = config("collectives.gpu_pairs", "busbw.1GiB", "> 400 GB/s", nodes)
    (message,) = threshold_errors(trial, CHECKS, H100, gpus, references)
    assert "360 GB/s" in message


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("trial", ["acceptance", "burn-in", "quick", "training"])
def test_thresholds_of_shipped_trials_are_valid_for_every_sku(trial: str, gpus: int) -> None:
    config_ = shipped(trial)
    for sku in skus():
        validate_thresholds(config_, CHECKS, sku.nvml_names[:1] * gpus, None)


def test_gpus_that_a_bridge_may_connect_have_no_bound() -> None:
    """An NVLink bridge is faster than PCIe, and optional."""
    assert not rejection("collectives.all_reduce", "busbw.8GiB", "> 200 GB/s", ("NVIDIA H100 NVL",) * 2)
    assert not rejection("transfer.peers", "unidirectional", "> 200 GB/s", ("NVIDIA H100 NVL",) * 2)
    assert "31.5 GB/s of pcie" in rejection("transfer.peers", "unidirectional", "> 32 GB/s", (L40S,) * 2)


@pytest.mark.parametrize(
    ("check", "metric", "threshold", "text"),
    [
        ("collectives.broadcast", "busbw.1GiB", "> 451 GB/s", "450 GB/s of nvlink"),
        ("collectives.all_gather", "cuda_graph_busbw.1MiB", "> 800 GB/s", "= 700 GB/s"),
        ("collectives.scaling", "busbw.1", "> 800 GB/s", "= 700 GB/s"),
        ("device.memory", "triad", "> 3400 GB/s", "3,350 GB/s of hbm"),
        ("device.gemm", "tflops.fp8", "> 2000 TFLOP/s", "1,979 TFLOP/s of fp8"),
        ("transfer.host", "h2d_concurrent", "> 64 GB/s", "63 GB/s of pcie"),
        ("transfer.peers", "bidirectional", "> 901 GB/s", "= 900 GB/s"),
        ("train.ddp", "tokens_per_second_per_gpu", "< 500 tokens/s/GPU", "lower bound"),
        ("collectives.all_gather", "busbw.1GiB", "< 350 GB/s", "lower bound"),
        ("collectives.all_reduce", "latency.8GiB", "> 5 us", "upper bound"),
        ("train.cnn", "seconds", "< -1 s", "never true"),
        ("collectives.all_reduce", "wrong_elements", "<= -1", "never true"),
        ("collectives.all_reduce", "busbw.8GiB", "> 510 GB/s", "480 GB/s"),
    ],
)
def test_every_kind_of_invalid_threshold_is_rejected(check: str, metric: str, threshold: str, text: str) -> None:
    assert text in rejection(check, metric, threshold, (H100,) * 8)


@pytest.mark.parametrize(
    ("check", "metric", "threshold", "text"),
    [
        ("collectives.all_reduce", "wrong_elements", "<= 1000000", "requires == 0"),
        ("device.gemm", "relative_error.bf16", "<= 1000", "the check fails"),
        ("device.gemm", "relative_error.bf16", ">= 0", "the check fails"),
    ],
)
def test_threshold_that_passes_broken_hardware_does_not_override(
    check: str, metric: str, threshold: str, text: str
) -> None:
    assert text in rejection(check, metric, threshold, (H100,) * 8, override=True)
    assert not rejection(check, metric, threshold, (H100,) * 8), "the rule of the check is evaluated too"


@pytest.mark.parametrize(
    ("check", "metric", "threshold", "rule"),
    [
        ("collectives.all_reduce", "wrong_elements", "> 5", "== 0"),
        ("collectives.all_reduce", "wrong_elements", "== 1", "== 0"),
        ("train.cnn", "accuracy", "< 90 %", "> 95 %"),
        ("train.cnn", "accuracy", "<= 95 %", "> 95 %"),
    ],
)
def test_threshold_that_contradicts_the_rule_of_the_check_is_rejected(
    check: str, metric: str, threshold: str, rule: str
) -> None:
    message = rejection(check, metric, threshold, ())
    for text in (f"checks.{check}.expect.{metric}", threshold, rule, "override: true"):
        assert text in message


@pytest.mark.parametrize(
    ("check", "metric", "threshold"),
    [
        ("collectives.all_reduce", "wrong_elements", "<= 0"),
        ("device.burn", "drift", "<= 10 %"),
        ("device.burn", "throttled_share", "<= 5 %"),
        ("train.ddp", "loss_above_entropy_bound", "> -0.25 nats"),  # the difference may be negative
        ("device.memory", "tested_share", ">= 50 %"),
        ("train.function_calling", "tokens_per_second_per_gpu", "> 500 tokens/s/GPU"),
        ("collectives.all_reduce", "busbw.8GiB", "> 490 GB/s"),  # within the tolerance of the reference value
    ],
)
def test_override_may_weaken_a_rule_within_limits(check: str, metric: str, threshold: str) -> None:
    assert not rejection(check, metric, threshold, (H100,) * 8, override=True)


@pytest.mark.parametrize(
    ("operation", "threshold", "text"),
    [
        (
            "all_gather",
            "> 401 GB/s",
            "ib-8x400 carries 400 GB/s out of a node, and all_gather sends 1 × its busbw: 400",
        ),
        ("all_to_all", "> 94 GB/s", "4.27 × its busbw: 93.75 GB/s"),
    ],
)
def test_network_of_known_class_bounds_thresholds_between_nodes(operation: str, threshold: str, text: str) -> None:
    facts: dict[str, JsonValue] = {"gpu": H100, "world_size": 16, "nodes": 2}
    lookup = MetricLookup(f"{operation}.busbw.8GiB", "busbw.8GiB", COLLECTIVE, operation)
    parsed = Threshold.parse(threshold)
    assert text in threshold_error(
        parsed, "GB/s", lookup, facts, References(None, skus(), links=Links.of_fabric("ib-8x400"))
    )
    assert not threshold_error(parsed, "GB/s", lookup, facts, REFERENCES)
    rack: dict[str, JsonValue] = {"gpu": "NVIDIA GB200", "world_size": 8, "nodes": 2}  # NVLink connects these nodes
    assert not threshold_error(
        parsed, "GB/s", lookup, rack, References(None, skus(), links=Links.of_fabric("ib-4x400"))
    )


def test_network_bound_of_all_reduce_is_that_of_the_tree_algorithm() -> None:
    facts: dict[str, JsonValue] = {"gpu": H100, "world_size": 16, "nodes": 2}
    threshold, references = Threshold.parse("> 376 GB/s"), References(None, skus(), links=Links.of_fabric("ib-8x200"))
    assert "0.533 × its busbw: 375 GB/s" in threshold_error(
        threshold, "GB/s", LOOKUPS["all_reduce.busbw.8GiB"], facts, references
    )


@pytest.mark.parametrize(
    ("threshold", "check_threshold", "strictness"),
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
def test_relative_strictness(threshold: str, check_threshold: str | None, strictness: float) -> None:
    assert (
        relative_strictness(Threshold.parse(threshold), Threshold.parse(check_threshold) if check_threshold else None)
        == strictness
    )


def test_threshold_of_800_gbps_on_two_nodes_of_h100_is_rejected() -> None:
    """A threshold that another test suite ships; it exceeds the bandwidth of NVLink, even with NVLS."""
    message = rejection("collectives.all_reduce", "busbw.8GiB", "> 800 GB/s", (H100,) * 8, nodes=2)
    assert "= 750 GB/s" in message


def test_threshold_per_node_is_compared_with_one_node() -> None:
    assert "480 GB/s" in rejection("collectives.each_node", "busbw.8GiB", "> 510 GB/s", (H100,) * 8, 2)


def test_mixed_models_are_bounded_by_the_fastest() -> None:
    for threshold, text in (("> 1000 TFLOP/s", "692 TFLOP/s of SKU"), ("> 2300 TFLOP/s", "2,250 TFLOP/s of bf16")):
        assert text in rejection("device.gemm", "tflops.bf16", threshold, (H100, "NVIDIA B200"))


def test_mig_instance_has_no_bound() -> None:
    slice_: dict[str, JsonValue] = {"gpu": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "world_size": 1, "nodes": 1}
    assert hardware_bound(LOOKUPS["gemm.bf16"], slice_, REFERENCES) is None
    assert not threshold_error(Threshold.parse("> 400 TFLOP/s"), "TFLOP/s", LOOKUPS["gemm.bf16"], slice_, REFERENCES)


def test_baseline_value_above_the_hardware_limit_is_rejected() -> None:
    def site(value: float, required: float | None = None) -> Baseline:
        reference = ReferenceValue(
            gpus=1, nodes=1, value=value, required=required, unit="GB/s", source="a run", gpu=H100
        )
        return Baseline(name="lab", learned_from=(), expected={"memory.copy": (reference,)})

    assert not list(baseline_errors(site(3000), REFERENCES, LOOKUPS))
    with pytest.raises(
        UsageError, match=r"baseline lab: memory\.copy: 3,400 GB/s is above.*NVIDIA H100 SXM has 3,350 GB/s"
    ):
        validate_thresholds(config("train.ddp", "scaling_efficiency", "> 90 %"), CHECKS, (), site(3400))
    with pytest.raises(UsageError, match=r"baseline lab: memory\.copy: 9,999 GB/s is above"):
        validate_baseline(site(3000, required=9999), CHECKS)


def test_shipped_reference_values_are_possible_and_name_their_network() -> None:
    for sku in skus():
        for key, values in sku.expected.items():
            for reference in values:
                facts: dict[str, JsonValue] = {
                    "gpu": sku.nvml_names[0],
                    "world_size": reference.gpus,
                    "nodes": reference.nodes,
                }
                bound = hardware_bound(LOOKUPS.get(key, MetricLookup(key)), facts, REFERENCES)
                assert bound is None or (bound.unit == reference.unit and reference.value <= bound.value), (
                    sku.name,
                    key,
                )
                assert bool(reference.fabric) == (reference.nodes > 1), (sku.name, key)
                assert reference.required is None or reference.required < reference.value, (sku.name, key)
        assert all(spec.source for spec in sku.spec.values())


def unknown_references(gpu: str, gpus: int) -> set[str]:
    """The reference keys that the shipped acceptance trial needs for a node of these GPUs and that are unknown."""
    keys = {
        (rule.reference, gpus if ".busbw." in rule.reference else 1)
        for name, setting in shipped("acceptance").checks.items()
        for each in CHECKS[name].declared
        if not each.reference_optional and each.name not in setting.expect and not name.startswith("train.")
        for rule in each.rules
        if rule.reference and rule.when.min_nodes == 1
    }
    shape: dict[str, JsonValue] = {"gpu": gpu, "nodes": 1}
    return {
        key
        for key, ranks in keys
        if isinstance(REFERENCES.site_or_sku_reference(key, {**shape, "world_size": ranks}), str)
    }


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("gpu", [H100, "NVIDIA H200"])
def test_h100_and_h200_have_all_reference_values_of_the_acceptance_trial(gpu: str, gpus: int) -> None:
    assert not unknown_references(gpu, gpus)


def test_a100_lacks_some_reference_values() -> None:
    assert "all_reduce.busbw.8GiB" not in unknown_references(A100, 8)
    assert {"all_gather.busbw.1GiB", "gemm.tf32"} <= unknown_references(A100, 8)


def test_reference_key_of_another_size() -> None:
    rules = CHECKS["collectives.all_reduce"].rules
    assert reference_key("busbw.1GiB", rules) == "all_reduce.busbw.1GiB"
    assert reference_key("latency.8GiB", rules) == ""
    assert reference_key("tflops.fp32", CHECKS["device.gemm"].rules) == ""


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.3, "a 3.3x slowdown would pass"),
        (0.001, "a 1,000x slowdown would pass"),
        (0.0, "any slowdown would pass"),
    ],
)
def test_undetected_slowdown(ratio: float, text: str) -> None:
    assert undetected_slowdown(ratio) == text


def test_every_reference_key_is_bounded_or_of_a_training() -> None:
    assert all(lookup.bounded_by or key.startswith("train.") for key, lookup in LOOKUPS.items())
