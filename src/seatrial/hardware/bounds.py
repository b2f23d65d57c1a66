"""Upper bounds of metrics: from the vendor's spec and the class of the network, or from facts of the GPU itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import JsonValue

from seatrial.hardware.links import (
    BIDIRECTIONAL,
    COLLECTIVE,
    Links,
    active_nvlinks,
    all_known,
    network_to_busbw_ratio,
    nvlink_to_busbw_ratio,
)
from seatrial.hardware.references import MODEL_SEPARATOR, References, Sku
from seatrial.hardware.training_flops import TrainingWork, training_work
from seatrial.model import Frozen, format_value
from seatrial.model.benchmark import Bound
from seatrial.util import data_files

# PCI Express by generation: GB/s of a lane in one direction, after the encoding (8b/10b, 128b/130b, 242 of 256 bytes)
_PCIE_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 8 / 8.125, 4: 16 / 8.125, 5: 32 / 8.125, 6: 64 / 8 * 242 / 256}
_TENSOR_RATES = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5, "fp8": 2.0}  # relative to bf16


@dataclass(frozen=True)
class MetricLookup:
    """Where to find the reference value and the hardware bound of the metric ``metric``.

    ``reference_key`` is a key of the SKU data. ``bounded_by`` is a key of a SKU's spec, BIDIRECTIONAL or COLLECTIVE;
    it is empty for a training metric, whose bound follows from ``metric``, and for a metric without a bound.
    ``operation`` is the collective that ``reference_key`` belongs to, by its name in nccl-tests.
    """

    reference_key: str
    metric: str = ""
    bounded_by: str = ""
    operation: str = ""


def hardware_bound(lookup: MetricLookup, facts: Mapping[str, JsonValue], references: References) -> Bound | None:
    """The highest bound of the metric over all GPU models in ``facts``; None if a model has no known bound."""
    bounds = all_known(_sku_bound(sku, lookup, facts, references) for sku in references.skus_of(facts))
    return max(bounds, key=lambda bound: bound.value, default=None)


def _sku_bound(
    sku: Sku | str, lookup: MetricLookup, facts: Mapping[str, JsonValue], references: References
) -> Bound | None:
    if isinstance(sku, str):
        return None
    if lookup.bounded_by == COLLECTIVE:
        return _collective_bound(sku, lookup, facts, references)
    if lookup.bounded_by in ("nvlink", BIDIRECTIONAL):
        bound = _intra_node_bound(sku, *_ranks_and_nodes(facts))
        return _scaled(bound, 2, " directions") if bound and lookup.bounded_by == BIDIRECTIONAL else bound
    if not lookup.bounded_by:
        work = training_work(lookup.metric, facts)
        return _training_bound(sku, work) if work else None
    return _spec_bound(sku, lookup.bounded_by)


def _training_bound(sku: Sku, work: TrainingWork) -> Bound | None:
    """Tokens/s per GPU, or MFU, if every matrix product runs at the peak of its data type.

    MFU (model FLOPs utilization) is relative to the bf16 peak.
    """
    spec, bf16 = sku.spec.get(work.spec_key), sku.spec.get("bf16")
    if work.is_mfu and spec and bf16:
        limit = 100 * spec.value / bf16.value
        text = f"{sku.name} has {_spec_text(sku, work.spec_key)}, and MFU is relative to {bf16.value:g} of bf16"
        return Bound(limit, "%", f"{text}: {format_value(limit, '%')}")
    if work.is_mfu or not spec or not work.flops_per_token:
        return None
    limit = spec.value * 1e12 / work.flops_per_token
    gflop = work.flops_per_token / 1e9
    text = f"a token takes {gflop:.4g} GFLOP, and {sku.name} has {_spec_text(sku, work.spec_key)}"
    return Bound(limit, "tokens/s/GPU", f"{text}: {format_value(round(limit), 'tokens/s/GPU')}")


def _spec_bound(sku: Sku, key: str) -> Bound | None:
    spec = sku.spec.get(key)
    return Bound(spec.value, spec.unit, f"{sku.name} has {_spec_text(sku, key)}") if spec else None


def _spec_text(sku: Sku, key: str) -> str:
    spec = sku.spec[key]
    return f"{format_value(spec.value, spec.unit)} of {key} ({spec.source})"


def _ranks_and_nodes(facts: Mapping[str, JsonValue]) -> tuple[int, int]:
    """The number of ranks and of nodes; 1 if the record has no positive integer."""
    ranks, nodes = (
        count if isinstance(count, int) and count > 0 else 1 for count in map(facts.get, ("world_size", "nodes"))
    )
    return ranks, nodes


def _collective_bound(
    sku: Sku, lookup: MetricLookup, facts: Mapping[str, JsonValue], references: References
) -> Bound | None:
    """The busbw that the GPU's links and the network allow: the lower one of their bounds."""
    ranks, nodes = _ranks_and_nodes(facts)
    intra_node = _intra_node_bound(sku, ranks, nodes)
    if not intra_node:
        return None
    operation = lookup.operation
    if sku.nvls and ranks > 1 and operation in ("", "all_reduce"):
        nvlink_domains = 1 if sku.across_nodes else nodes
        gain = max(1.0, 1 / nvlink_to_busbw_ratio("all_reduce", "NVLS", ranks, nvlink_domains))
        intra_node = _scaled(intra_node, gain, f" ({ranks // nvlink_domains} GPUs reduce in the switch, NVLS)")
    if not operation or sku.across_nodes:
        return intra_node
    inter_node = _inter_node_bound(operation, ranks, nodes, references.links)
    return inter_node if inter_node and inter_node.value < intra_node.value else intra_node


def _intra_node_bound(sku: Sku, ranks: int, nodes: int) -> Bound | None:
    """Unidirectional bandwidth of a GPU in GB/s over NVLink; without NVLink between all GPUs, over PCIe.

    The PCIe bandwidth is multiplied by the number of GPUs that one NVLink bridge connects. None if the PCIe rate is
    unknown, or if a bridge can connect all GPUs of the node, since the rate of the bridge is not in the SKU data.
    """
    if nvlink := _spec_bound(sku, "nvlink"):
        return nvlink
    bridged = sku.gpus_per_bridge
    bridge_connects_all = bridged > 1 and bridged >= ranks // nodes
    if "pcie" not in sku.spec or bridge_connects_all:
        return None
    spec = sku.spec["pcie"]
    bound = Bound(spec.value, spec.unit, f"{sku.name} has no NVLink between all GPUs, and {_spec_text(sku, 'pcie')}")
    return _scaled(bound, bridged, f" (up to {bridged} GPUs per NVLink bridge)") if bridged > 1 else bound


def _inter_node_bound(operation: str, ranks: int, nodes: int, links: Links) -> Bound | None:
    """The busbw that the network allows with the algorithm that sends the least data.

    None on one node, or if the network is not RDMA with ports of a known rate.
    """
    if not 1 < nodes <= ranks or links.network != "rdma" or not links.ports:
        return None
    ratio = min(network_to_busbw_ratio(operation, algorithm, ranks, nodes) or 1.0 for algorithm in ("Ring", "NVLS"))
    rate = links.ports.count * links.ports.gbps / 8
    node_rate, limit = (format_value(value, "GB/s") for value in (rate, rate / ratio))
    text = f"{links.fabric} carries {node_rate} out of a node, and {operation} sends {ratio:.3g} × its busbw: {limit}"
    return Bound(rate / ratio, "GB/s", text)


def _scaled(bound: Bound, factor: float, explanation: str) -> Bound:
    value = bound.value * factor
    text = f"{bound.derivation} × {factor:.3g}{explanation} = {format_value(value, bound.unit)}"
    return Bound(value, bound.unit, text)


class _TensorCores(Frozen):
    capability: str
    cores: int
    tensor: int
    fp8: bool
    source: str


@cache
def _tensor_cores() -> Mapping[str, _TensorCores]:
    rows = map(_TensorCores.model_validate, data_files.read("tensor_cores.yaml"))
    return {row.capability: row for row in rows}


def physical_base(lookup: MetricLookup, facts: Mapping[str, JsonValue], references: References) -> Bound | None:
    """What the hardware could carry at most, as base of a lower limit; None if it is unknown.

    From NVML's facts, else from the vendor's spec; of several GPU models the lowest. A collective is compared with the
    NVLinks of a GPU, on one node only.
    """
    ranks, nodes = _ranks_and_nodes(facts)
    if not lookup.bounded_by:
        return hardware_bound(lookup, facts, references)
    is_collective = lookup.bounded_by == COLLECTIVE
    if is_collective and (nodes > 1 or ranks < 2):
        return None
    key = "nvlink" if lookup.bounded_by in (COLLECTIVE, BIDIRECTIONAL) else lookup.bounded_by
    bounds = []
    for model in str(facts.get("gpu") or "").split(MODEL_SEPARATOR):
        sku = references.sku(model)
        spec = sku.spec.get(key) if isinstance(sku, Sku) else None
        of_spec = Bound(spec.value, spec.unit, f"{model} has {spec.value:g} {spec.unit} of {key}") if spec else None
        bounds.append(references.gpu_bounds.get(model, {}).get(key) or of_spec)
    lowest = min(all_known(bounds), key=lambda bound: bound.value, default=None)
    return _scaled(lowest, 2, " directions") if lowest and lookup.bounded_by == BIDIRECTIONAL else lowest


def bounds_by_model(gpus: Iterable[Mapping[str, JsonValue]]) -> dict[str, dict[str, Bound]]:
    """GPU model → key of a SKU's spec → the highest bound of its GPUs: a GPU with a fault does not lower the limit."""
    highest: dict[str, dict[str, Bound]] = {}
    for gpu in gpus:
        of_model = highest.setdefault(str(gpu.get("name") or ""), {})
        for key, bound in measured_bounds(gpu).items():
            if key not in of_model or bound.value > of_model[key].value:
                of_model[key] = bound
    return highest


def measured_bounds(gpu: Mapping[str, JsonValue]) -> dict[str, Bound]:
    """The known bounds of one GPU by the keys of a SKU's spec, from what NVML reports of it.

    ``hbm``, ``nvlink`` and ``pcie`` in GB/s, the latter two in one direction, and bf16, fp16, tf32 and fp8 in TFLOP/s.
    A bound is unknown without its facts, and if a present value is above its maximum: NVML contradicts itself.
    """
    tensor = {dtype: _tensor_bound(gpu, dtype) for dtype in _TENSOR_RATES}
    bounds = {"hbm": _memory_bound(gpu), "nvlink": _nvlink_bound(gpu), "pcie": _pcie_bound(gpu), **tensor}
    return {key: bound for key, bound in bounds.items() if bound}


def _memory_bound(gpu: Mapping[str, JsonValue]) -> Bound | None:
    """Clock × bus width × 2 transfers. The maximum clock counts: a lowered one is a fault that lowers the value."""
    clock, width = _positive(gpu, "memory_clock_max_mhz"), _positive(gpu, "memory_bus_width_bits")
    if not clock or not width or _positive(gpu, "memory_clock_mhz") > clock:
        return None
    return Bound(clock * width * 2 / 8e3, "GB/s", f"NVML: memory clock {clock:g} MHz × {width:g} bit × 2")


def _nvlink_bound(gpu: Mapping[str, JsonValue]) -> Bound | None:
    """The rate of the NVLinks; unknown if they do not all lead to a switch, since two GPUs then share some of them."""
    links = active_nvlinks(gpu)
    if links is None or not links.all_to_switches:
        return None
    return Bound(links.gb_s, "GB/s", f"NVML: {links.active} active NVLinks, {format_value(links.gb_s, 'GB/s')} in all")


def _pcie_bound(gpu: Mapping[str, JsonValue]) -> Bound | None:
    """Lanes × rate. An idle GPU lowers the generation, so that the maximum of GPU and slot counts."""
    generation, width = _positive(gpu, "pcie_gen_max"), _positive(gpu, "pcie_width")
    lane = _PCIE_LANE_GB_S.get(int(generation))
    contradicts = _positive(gpu, "pcie_gen") > generation or width > (_positive(gpu, "pcie_width_max") or width)
    if gpu.get("c2c") or not lane or not width or contradicts:  # NVML does not report the rate of NVLink-C2C
        return None
    return Bound(lane * width, "GB/s", f"NVML: PCIe {generation:g} ×{width:g}")


def _tensor_bound(gpu: Mapping[str, JsonValue], dtype: str) -> Bound | None:
    """SMs × operations in a clock × maximum clock, by the compute capability."""
    cores, clock = _positive(gpu, "cores"), _positive(gpu, "sm_clock_max_mhz")
    row = _tensor_cores().get(str(gpu.get("compute_capability")))
    if not cores or not clock or row is None or (dtype == "fp8" and not row.fp8):
        return None
    if _positive(gpu, "sm_clock_mhz") > clock:
        return None
    sms, operations = cores / row.cores, row.tensor * _TENSOR_RATES[dtype]
    text = f"NVML: {sms:g} SMs at up to {clock:g} MHz; {operations:g} operations of an SM in a clock ({row.source})"
    return Bound(sms * operations * clock / 1e6, "TFLOP/s", text)


def _positive(gpu: Mapping[str, JsonValue], name: str) -> float:
    """The fact; 0 if it is no positive number."""
    value = gpu.get(name)
    return value if isinstance(value, int | float) and type(value) is not bool and value > 0 else 0
