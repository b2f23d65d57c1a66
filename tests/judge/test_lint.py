"""Thresholds that cannot be meant so are refused with the arithmetic; honest ones are left alone."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.judge.baselines import Known, Sku, skus
from seatrial.judge.lint import bound, flaw, impossible, key_of, passes, refuse, refuse_site
from seatrial.model import Baseline, Expected, Limit, UsageError
from seatrial.settings import CheckSettings, Cluster, Config

KNOWN = Known(None, skus())
H100 = "NVIDIA H100 80GB HBM3"
ALL = catalog()


def config(check: str, metric: str, limit: str, nodes: int = 1) -> Config:
    setting = CheckSettings(expect={metric: Limit.parse(limit)})
    return Config(name="t", cluster=Cluster(nodes=nodes), checks={check: setting})


def complaint(check: str, metric: str, limit: str, gpus: tuple[str, ...], nodes: int = 1) -> str:
    try:
        refuse(config(check, metric, limit, nodes), ALL, gpus, None)
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
        ("transfer.host", "h2d_alone", "> 64 GB/s", "63 GB/s of pcie"),
        ("transfer.peers", "one_way", "> 451 GB/s", "450 GB/s of nvlink"),
        ("transfer.peers", "both_ways", "> 901 GB/s", "; × 2 ways is 900 GB/s"),
        ("transfer.host", "h2d_alone", "> 0.05 GB/s", "1/1,108 of the 55.4 GB/s of SKU NVIDIA H100 SXM"),
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
        ("transfer.peers", "both_ways", "> 700 GB/s", (H100,) * 8),
        ("collectives.all_reduce", "busbw.8GiB", "> 100 GB/s", (H100,) * 8),  # weak, and meant so
        ("collectives.all_reduce", "busbw.8GiB", "> 9999 GB/s", ()),  # nobody knows the GPU yet
        ("collectives.all_reduce", "busbw.8GiB", "> 9999 GB/s", (H100, "NVIDIA Strange")),
        ("collectives.all_reduce", "latency.8GiB", "< 1 us", (H100,) * 8),
        ("train.ddp", "tokens_per_second_per_gpu", "> 500 tokens/s/GPU", (H100,) * 8),
    ],
)
def test_what_can_be_meant_so_is_left_alone(check: str, metric: str, limit: str, gpus: tuple[str, ...]) -> None:
    assert not complaint(check, metric, limit, gpus)


@pytest.mark.parametrize(("limit", "refused"), [("> -3 GB/s", True), (">= 0 GB/s", True), ("> 0 GB/s", False)])
def test_a_gate_that_every_rate_passes_is_refused_whatever_the_hardware(limit: str, refused: bool) -> None:
    assert ("holds whatever is measured" in complaint("collectives.all_reduce", "busbw.8GiB", limit, ())) is refused


def test_two_nodes_of_h100_cannot_reach_what_one_suite_asks_of_them() -> None:
    """800 GB/s, a shipped gate (research on peers): 16 GPUs in one switch would reach 794."""
    said = complaint("collectives.all_reduce", "busbw.8GiB", "> 800 GB/s", (H100,) * 8, nodes=2)
    assert "× 1.76, if all 16 GPUs sum in the switch (NVLS), is 794.1 GB/s" in said


def test_of_mixed_models_the_best_bounds() -> None:
    assert not complaint("device.gemm", "tflops.bf16", "> 1000 TFLOP/s", (H100, "NVIDIA B200"))
    assert complaint("device.gemm", "tflops.bf16", "> 2300 TFLOP/s", (H100, "NVIDIA B200"))


def test_a_slice_has_no_bound() -> None:
    slice_: dict[str, JsonValue] = {"gpu": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "world_size": 1, "nodes": 1}
    assert bound("gemm.bf16", slice_, KNOWN) is None
    assert not flaw(Limit.parse("> 400 TFLOP/s"), "TFLOP/s", "gemm.bf16", slice_, KNOWN)


def test_a_site_baseline_above_the_hardware_is_refused() -> None:
    def site(value: float, floor: float | None = None) -> Baseline:
        own = Expected(gpus=1, nodes=1, value=value, floor=floor, unit="GB/s", source="a run", gpu=H100)
        return Baseline(name="lab", learned_from=(), expected={"memory.copy": (own,)})

    assert not list(impossible(site(3000), KNOWN))
    with pytest.raises(UsageError, match=r"baseline lab: memory\.copy is 3,400 GB/s: NVIDIA H100 SXM has 3,350 GB/s"):
        refuse(config("train.ddp", "scaling_efficiency", "> 90 %"), ALL, (), site(3400))
    with pytest.raises(UsageError, match=r"baseline lab: memory\.copy is 9,999 GB/s: "):
        refuse_site(site(3000, floor=9999))


def test_what_ships_is_possible_and_every_network_is_named() -> None:
    for sku in skus():
        for key, values in sku.expected.items():
            for one in values:
                facts: dict[str, JsonValue] = {"gpu": sku.nvml_names[0], "world_size": one.gpus, "nodes": one.nodes}
                most = bound(key, facts, KNOWN)
                assert most is None or (most.unit == one.unit and one.value <= most.value), (sku.name, key)
                assert bool(one.fabric) == (one.nodes > 1), (sku.name, key)
                assert one.floor is None or one.floor < 0.95 * one.value, (sku.name, key)
        assert all(spec.source for spec in sku.spec.values())


def test_another_size_has_the_key_of_its_family() -> None:
    rules = ALL["collectives.all_reduce"].rules
    assert key_of("busbw.1GiB", rules) == "all_reduce.busbw.1GiB"
    assert key_of("latency.8GiB", rules) == ""
    assert key_of("tflops.fp32", ALL["device.gemm"].rules) == ""


@pytest.mark.parametrize(
    ("share", "key", "words"),
    [
        (0.3, "all_reduce.busbw.8GiB", "a GPU with 12 of its 18 NVLinks down passes"),
        (1 / 3, "transfer.peer_one_way", "a GPU with 12 of its 18 NVLinks down passes"),
        (0.3, "transfer.h2d_alone", "a GPU on 8 of 16 PCIe lanes passes"),
        (0.2, "transfer.h2d_alone", "a GPU on 4 of 16 PCIe lanes passes"),
        (0.3, "gemm.bf16", "what lost 70% of it passes"),
        (0.001, "", "what is 1,000 times slower passes"),
        (0.0, "", "what is any number of times slower passes"),
    ],
)
def test_the_fault_that_gets_past_is_computed(share: float, key: str, words: str) -> None:
    assert passes(share, key, H100, KNOWN) == words


def test_without_a_count_of_links_none_is_made_up() -> None:
    sku = Sku(name="X", nvml_names=("X",))
    assert passes(0.3, "all_reduce.busbw.8GiB", "X", Known(None, [sku])) == "what lost 70% of it passes"
