from __future__ import annotations

from typing import Any

import pytest
from pydantic import JsonValue
from tools.records import record_path

from seatrial.hardware.bounds import MetricLookup, hardware_bound, measured_bounds
from seatrial.hardware.links import BIDIRECTIONAL, COLLECTIVE, Links
from seatrial.hardware.references import References, skus
from seatrial.pipeline.run_directory import load_trial

REFERENCES = References(None, skus())
INFINIBAND = References(None, skus(), links=Links.of_fabric("ib-8x200"))
H100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA B200"
BUSBW = MetricLookup("all_reduce.busbw.8GiB", "busbw.8GiB", COLLECTIVE, "all_reduce")


def bound_value(
    lookup: MetricLookup, gpu: str, ranks: int = 1, nodes: int = 1, references: References = REFERENCES
) -> float | None:
    facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": ranks, "nodes": nodes}
    bound = hardware_bound(lookup, facts, references)
    return bound.value if bound else None


@pytest.mark.parametrize(
    ("lookup", "ranks", "value"),
    [
        (MetricLookup("gemm.bf16", "tflops.bf16", "bf16"), 1, 989.5),
        (MetricLookup("memory.copy", "copy", "hbm"), 1, 3350),
        (MetricLookup("transfer.peer_unidirectional", "unidirectional", "nvlink"), 1, 450),
        (MetricLookup("transfer.peer_bidirectional", "bidirectional", BIDIRECTIONAL), 1, 900),
        (MetricLookup("all_gather.busbw.1GiB", "busbw.1GiB", COLLECTIVE, "all_gather"), 8, 450),
        (BUSBW, 8, 700),  # NVLS: the switches reduce
        (MetricLookup("loss", "loss"), 1, None),
    ],
)
def test_the_bound_of_each_kind_of_metric(lookup: MetricLookup, ranks: int, value: float | None) -> None:
    assert bound_value(lookup, H100, ranks) == (value and pytest.approx(value))


def test_mixed_models_have_the_highest_bound_and_none_with_an_unknown_model() -> None:
    bf16 = MetricLookup("gemm.bf16", "tflops.bf16", "bf16")
    assert bound_value(bf16, f"{H100} + {B200}") == bound_value(bf16, B200)
    assert bound_value(bf16, f"{H100} + NVIDIA Unlisted") is None


def test_a_known_network_bounds_collectives_between_nodes() -> None:
    assert bound_value(BUSBW, H100, 16, 2, INFINIBAND) == pytest.approx(375)
    assert bound_value(BUSBW, H100, 16, 2) == pytest.approx(450 / (9 / 8 * 16 / (2 * 15)))


# What NVML reported of an H200 (driver 580.159, 2026-11-28); 18 links of 26.562 GB/s
NVLINKS = [{"link": number, "active": True, "speed_gb_s": 26.562, "remote": "switch"} for number in range(18)]
H200: dict[str, Any] = {
    "compute_capability": "9.0",
    "memory_clock_mhz": 3201,
    "memory_clock_max_mhz": 3201,
    "memory_bus_width_bits": 6016,
    "pcie_gen": 5,
    "pcie_gen_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "sm_clock_mhz": 345,
    "sm_clock_max_mhz": 1980,
    "cores": 16896,
    "c2c": False,
    "nvlinks": NVLINKS,
}


def test_bounds_from_the_facts_of_a_gpu() -> None:
    found = {key: bound.value for key, bound in measured_bounds(H200).items()}
    assert found == {
        "hbm": pytest.approx(4814.3, abs=0.1),
        "nvlink": pytest.approx(478.1, abs=0.1),
        "pcie": pytest.approx(63.0, abs=0.1),
        "bf16": pytest.approx(1070.5, abs=0.1),
        "fp16": pytest.approx(1070.5, abs=0.1),
        "tf32": pytest.approx(535.3, abs=0.1),
        "fp8": pytest.approx(2141.1, abs=0.1),
    }


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"memory_bus_width_bits": 0}, "hbm"),
        ({"memory_clock_max_mhz": None, "unreadable": {"memory_clock_max_mhz": "Not Supported"}}, "hbm"),
        ({"memory_clock_mhz": 3300}, "hbm"),
        ({"nvlinks": [{**link, "speed_gb_s": 0.0} for link in NVLINKS]}, "nvlink"),
        ({"nvlinks": [*NVLINKS[:17], {"link": 17, "active": True}]}, "nvlink"),
        ({"nvlinks": []}, "nvlink"),
        ({"nvlinks": [{**NVLINKS[0], "remote": "gpu"}, *NVLINKS[1:]]}, "nvlink"),
        ({"nvlinks": "none"}, "nvlink"),
        ({"pcie_width": 0}, "pcie"),
        ({"pcie_gen_max": None, "pcie_width": None}, "pcie"),
        ({"pcie_width_max": 8}, "pcie"),
        ({"pcie_gen": 6}, "pcie"),
        ({"pcie_gen": 9, "pcie_gen_max": 9}, "pcie"),
        ({"c2c": True}, "pcie"),
        ({"sm_clock_max_mhz": True}, "bf16 fp16 tf32 fp8"),
        ({"cores": "many"}, "bf16 fp16 tf32 fp8"),
        ({"sm_clock_mhz": 2000}, "bf16 fp16 tf32 fp8"),
        ({"compute_capability": "99.0"}, "bf16 fp16 tf32 fp8"),
        ({"compute_capability": "8.0"}, "fp8"),
    ],
)
def test_a_bound_without_usable_facts_is_left_out(change: dict[str, Any], lost: str) -> None:
    assert measured_bounds(H200).keys() - measured_bounds({**H200, **change}).keys() == set(lost.split())


def test_no_fact_gives_no_bound() -> None:
    assert measured_bounds({}) == {}


# Published NVML readings: capability, cores of an SM, SMs, maximum SM and memory clock, bus width
# (NVML names in data/skus; H100, H200 and A100 as in the datasheets and our records)
PUBLISHED = [
    ("NVIDIA B200", "10.0", 128, 148, 1965, 3996, 7680),
    ("NVIDIA B300 SXM6 AC", "10.3", 128, 148, 2032, 3996, 7680),
    ("NVIDIA GB200", "10.0", 128, 152, 2062, 3996, 7936),
    ("NVIDIA GB300", "10.3", 128, 152, 2070, 3996, 7936),
    ("NVIDIA H20", "9.0", 128, 78, 1980, 2619, 6144),
    ("NVIDIA H20-3e", "9.0", 128, 78, 1980, 3201, 6144),
    ("NVIDIA H100 80GB HBM3", "9.0", 128, 132, 1980, 2619, 5120),
    ("NVIDIA H200", "9.0", 128, 132, 1980, 3201, 6144),
    ("NVIDIA GH200 480GB", "9.0", 128, 132, 1980, 2619, 6144),
    ("NVIDIA L40S", "8.9", 128, 142, 2520, 9001, 384),
    ("NVIDIA L4", "8.9", 128, 58, 2040, 6251, 192),
    ("NVIDIA A100-SXM4-80GB", "8.0", 64, 108, 1410, 1593, 5120),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", 128, 188, 2430, 12481, 512),
]


@pytest.mark.parametrize(("name", "capability", "cores", "sms", "clock", "memory_clock", "width"), PUBLISHED)
def test_published_values_are_below_the_bounds_from_nvml(
    name: str, capability: str, cores: int, sms: int, clock: int, memory_clock: int, width: int
) -> None:
    gpu: dict[str, Any] = {
        "compute_capability": capability,
        "cores": sms * cores,
        "sm_clock_max_mhz": clock,
        "memory_clock_max_mhz": memory_clock,
        "memory_bus_width_bits": width,
    }
    bounds = measured_bounds(gpu)
    sku = REFERENCES.sku(name)
    assert not isinstance(sku, str)
    compared = 0
    for key, dtype in (
        ("memory.copy", "hbm"),
        *((f"gemm.{dtype}", dtype) for dtype in ("bf16", "fp16", "tf32", "fp8")),
    ):
        bound = bounds.get(dtype)
        for reference in sku.expected.get(key, ()):
            assert bound, key
            assert 0.4 * bound.value < reference.value < bound.value or name.startswith(("NVIDIA H20", "NVIDIA GH"))
            assert reference.value < bound.value
            compared += 1
        if bound and dtype in sku.spec:
            assert sku.spec[dtype].value < 1.05 * bound.value, dtype
    assert compared


RECORDED = {  # check → metric → bound of one GPU
    "device.gemm": {"tflops.bf16": "bf16", "tflops.fp16": "fp16", "tflops.tf32": "tf32", "tflops.fp8": "fp8"},
    "device.memory": {"copy": "hbm", "triad": "hbm"},
    "transfer.host": {"h2d_single": "pcie", "d2h_single": "pcie"},
    "transfer.peers": {"unidirectional": "nvlink"},
}
RECORDS = ("2026-11-28-4xh100/acceptance", "2026-11-22-4xh200/acceptance", "2026-11-28-1xh100/acceptance")


@pytest.mark.parametrize("record", RECORDS)
def test_no_value_of_our_records_is_above_its_bound(record: str) -> None:
    """Bus width and cores were not recorded yet: 5,120 bit on H100, at least 6,016 on H200, and 132 SMs."""
    trial = load_trial(record_path(record))
    inventories = [each for each in trial.measurements if each.check == "gpu.inventory"]
    gpus: list[Any] = [gpu for each in inventories for gpu in each.facts["gpus"]]  # type: ignore[union-attr]
    width = 5120 if "H100" in gpus[0]["name"] else 6016
    added = {"memory_clock_max_mhz": gpus[0]["memory_clock_mhz"], "memory_bus_width_bits": width, "cores": 16896}
    bounds = measured_bounds({**gpus[0], **added})
    shares: dict[str, list[float]] = {}
    for measurement in trial.measurements:
        for metric in measurement.metrics:
            if key := RECORDED.get(measurement.check, {}).get(metric.name):
                shares.setdefault(key, []).append(metric.value / bounds[key].value)
    assert {"hbm", "bf16", "pcie"} <= set(shares)
    assert all(0.3 < share < 1 for values in shares.values() for share in values), shares
