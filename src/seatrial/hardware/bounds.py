"""The most that a figure can show on a GPU model: what the vendor's spec, its links and the network leave of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from seatrial.hardware.links import network_to_busbw_ratio, nvlink_to_busbw_ratio
from seatrial.hardware.references import MODEL_SEPARATOR, References, Sku
from seatrial.hardware.training_flops import TrainingWork, training_work
from seatrial.model import format_value

# What bounds a metric where no line of a SKU's spec (bf16, hbm, pcie, nvlink) does as it is: what both directions of a
# GPU's links carry together, and what its links, its switches and the network leave of a collective's bandwidth
BIDIRECTIONAL, COLLECTIVE = "bidirectional", "collective"
_FABRIC = re.compile(r"(?:ib|roce)-(\d+)x([\d.]+)")  # links.Links.fabric


@dataclass(frozen=True)
class Bound:
    """What cannot be exceeded, and the arithmetic that says so."""

    value: float
    unit: str
    derivation: str


@dataclass(frozen=True)
class MetricLookup:
    """What a metric of a check is compared with: the ``key`` of what is known of it, and what bounds it.

    ``bound``: a line of a SKU's spec, BIDIRECTIONAL or COLLECTIVE; empty where none does. ``operation``: the collective
    that a ``key`` of the SKU data is of, by nccl-tests' name.
    """

    reference_key: str
    metric: str = ""
    bounded_by: str = ""
    operation: str = ""


def hardware_bound(figure: MetricLookup, facts: Mapping[str, JsonValue], known: References) -> Bound | None:
    """The most that any GPU of ``facts`` can show for a figure. None where the vendor's figure is not known."""
    bounds = [
        _of_sku(sku, figure, facts, known)
        for name in str(facts.get("gpu") or "").split(MODEL_SEPARATOR)
        if (sku := known.sku(name))
    ]
    known_bounds = [one for one in bounds if one]
    return max(known_bounds, key=lambda one: one.value) if known_bounds and len(known_bounds) == len(bounds) else None


def _of_sku(sku: Sku | str, figure: MetricLookup, facts: Mapping[str, JsonValue], known: References) -> Bound | None:
    if isinstance(sku, str):
        return None
    if figure.bounded_by == COLLECTIVE:
        return _of_collective(sku, figure, facts, known)
    if figure.bounded_by in ("nvlink", BIDIRECTIONAL):
        unidirectional = _inside(sku, *_ranks(facts))
        return (
            _times_of(unidirectional, 2, " ways")
            if unidirectional and figure.bounded_by == BIDIRECTIONAL
            else unidirectional
        )
    if not figure.bounded_by:
        return _of_training(sku, trained) if (trained := training_work(figure.metric, facts)) else None
    spec = sku.spec.get(figure.bounded_by)
    return Bound(spec.value, spec.unit, f"{sku.name} has {_spec(sku, figure.bounded_by)}") if spec else None


def _of_training(sku: Sku, trained: TrainingWork) -> Bound | None:
    """Every product at the peak of its type, and nothing else done meanwhile: an MFU of 100 %, as a share of bf16's."""
    spec, bf16 = sku.spec.get(trained.spec_line), sku.spec.get("bf16")
    if trained.is_mfu and spec and bf16:
        most = 100 * spec.value / bf16.value
        arithmetic = (
            f"{sku.name} has {_spec(sku, trained.spec_line)}, and MFU is a share of the {bf16.value:g} of its bf16"
        )
        return Bound(most, "%", f"{arithmetic}: {format_value(most, '%')}")
    if trained.is_mfu or not spec or not trained.flops_per_token:
        return None
    most = spec.value * 1e12 / trained.flops_per_token
    arithmetic = (
        f"a token takes {trained.flops_per_token / 1e9:.4g} GFLOP, and {sku.name} has {_spec(sku, trained.spec_line)}"
    )
    return Bound(most, "tokens/s/GPU", f"{arithmetic}: {format_value(round(most), 'tokens/s/GPU')}")


def _spec(sku: Sku, line: str) -> str:
    spec = sku.spec[line]
    return f"{format_value(spec.value, spec.unit)} of {line} ({spec.source})"


def _ranks(facts: Mapping[str, JsonValue]) -> tuple[int, int]:
    """Ranks and nodes; 1 where a record has something else in their place."""
    ranks, nodes = (
        value if isinstance(value, int) and value > 0 else 1 for value in map(facts.get, ("world_size", "nodes"))
    )
    return ranks, nodes


def _of_collective(sku: Sku, figure: MetricLookup, facts: Mapping[str, JsonValue], known: References) -> Bound | None:
    """What the links of a GPU carry, as the figure counts it, or between nodes the network if that is less."""
    ranks, nodes = _ranks(facts)
    here = _inside(sku, ranks, nodes)
    if not here:
        return None
    operation, by_algorithm = figure.operation, figure.metric.startswith("algbw")
    if sku.nvls and ranks > 1 and operation in ("", "all_reduce") and not by_algorithm:
        switches = 1 if sku.across_nodes else nodes
        gain = max(1.0, 1 / nvlink_to_busbw_ratio("all_reduce", "NVLS", ranks, switches))
        here = _times_of(here, gain, f", if {ranks // switches} GPUs sum in a switch (NVLS),")
    if by_algorithm and ranks > 1:
        here = _times_of(here, ranks / (ranks - 1), f", since of {ranks} parts each GPU has one already,")
    between = _between(operation, ranks, nodes, known.fabric) if operation and not sku.across_nodes else None
    return between if between and between.value < here.value else here


def _inside(sku: Sku, ranks: int, nodes: int) -> Bound | None:
    """One way out of a GPU: by NVLink, else by PCIe, which those that a bridge joins have together."""
    if "nvlink" in sku.spec:
        spec = sku.spec["nvlink"]
        return Bound(spec.value, spec.unit, f"{sku.name} has {_spec(sku, 'nvlink')}")
    if "pcie" not in sku.spec or 1 < sku.bridged >= ranks // nodes:  # by a bridge, of which nothing is known
        return None
    spec = sku.spec["pcie"]
    out = Bound(spec.value, spec.unit, f"{sku.name} has no NVLink between all GPUs, and {_spec(sku, 'pcie')}")
    return _times_of(out, sku.bridged, f", of {sku.bridged} that a bridge may join,") if sku.bridged > 1 else out


def _between(operation: str, ranks: int, nodes: int, fabric: str) -> Bound | None:
    """What the network lets through, by the algorithm that asks least of it; None where its class is not known."""
    ports = _FABRIC.fullmatch(fabric)
    if not 1 < nodes <= ranks or not ports:
        return None
    shares = [network_to_busbw_ratio(operation, algorithm, ranks, nodes) or 1.0 for algorithm in ("Ring", "Tree")]
    rate, share = int(ports[1]) * float(ports[2]) / 8, min(shares)
    out, most = (format_value(value, "GB/s") for value in (rate, rate / share))
    arithmetic = f"{fabric} carries {out} out of a node, where {operation} needs {share:.3g} of its busbw: {most}"
    return Bound(rate / share, "GB/s", arithmetic)


def _times_of(base: Bound, gain: float, why: str) -> Bound:
    most = base.value * gain
    return Bound(most, base.unit, f"{base.derivation}; × {gain:.3g}{why} is {format_value(most, base.unit)}")
