"""Thresholds that cannot be meant so: beyond the hardware, of another order than their unit's, or turned round.

And what of a threshold that can be meant so gets past it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.config.layers import declared_unit
from seatrial.config.schema import Config
from seatrial.hardware.links import node_share, nvlink_share
from seatrial.hardware.references import MIXED, Known, Reference, Sku, skus
from seatrial.hardware.training_flops import Work, work
from seatrial.model import Baseline, BasisKind, Expected, Limit, Outcome, Rule, UsageError, format_value

WEAK = 0.4  # of the expected value: a threshold under that hardly tests anything
# Under this share a threshold was written in another unit: MB/s for GB/s is a thousandth, as in a diagnostic suite that
# shipped 2333 MB/s for the memory of an H200. An honest gate of a hundredth is nobody's.
OTHER_UNIT = 0.01
# Two published figures of one shape differ by so much: 345 to 349 GB/s of two H200, 473 to 482 of eight. What asks for
# more than that beyond a known figure fails good hardware.
STRETCH = 1.05
# Which line of a SKU's spec a figure cannot exceed, by the key of its baseline, or its own name where it has none; the
# bandwidths of collectives by that part of theirs
_LINKS = "nvlink"
_SPEC = {
    **{f"{family}.{kind}": kind for family in ("gemm", "tflops") for kind in ("bf16", "fp16", "tf32", "fp8", "fp32")},
    **dict.fromkeys(("memory.copy", "copy", "memory.triad", "triad"), "hbm"),
    **{
        f"{of}{way}_{when}": "pcie"
        for of in ("transfer.", "")
        for way in ("h2d", "d2h")
        for when in ("alone", "together")
    },
    **{f"{of}{ways}": _LINKS for of in ("transfer.peer_", "") for ways in ("one_way", "both_ways")},
}
_BANDWIDTHS = re.compile(r"(?:(?P<operation>\w+)\.busbw|(?P<alone>\w*busbw\w*|algbw\w*))(?:\.|$)")
_PAIRS = "gpu_pairs."  # figures of two GPUs of a node, however many there are
_FABRIC = re.compile(r"(?:ib|roce)-(\d+)x([\d.]+)")  # links.Links.fabric
TIMES = ("s", "ms", "us")
_SIGNED = ("%", "nats", "°C")  # a drift, what a loss lost
_LANES = (1, 2, 4, 8)  # what a PCIe ×16 link falls back to


@dataclass(frozen=True)
class Bound:
    """What cannot be exceeded, and the arithmetic that says so."""

    value: float
    unit: str
    arithmetic: str


def key_of(metric: str, rules: tuple[Rule, ...]) -> str:
    """The baseline key of a metric: its rule's, or for another size that of the same family. Empty: there is none."""
    family = metric.partition(".")[0]
    for rule in rules:
        if rule.baseline and rule.metric == metric:
            return rule.baseline
    for rule in rules:
        if rule.baseline and rule.baseline.endswith(f".{rule.metric}") and rule.metric.startswith(f"{family}."):
            return rule.baseline.removesuffix(rule.metric) + metric
    return ""


def spec_of(key: str) -> str:
    """The line of a SKU's spec that bounds the figures of a baseline key, or of a metric; empty where none does."""
    return _LINKS if _BANDWIDTHS.match(key) else _SPEC.get(key, "")


def bound(key: str, facts: Mapping[str, JsonValue], known: Known) -> Bound | None:
    """The most that any GPU of ``facts`` can show for ``key``. None where the vendor's figure is not known."""
    found = [
        _of_sku(sku, key, facts, known) for name in str(facts.get("gpu") or "").split(MIXED) if (sku := known.sku(name))
    ]
    sure = [one for one in found if one]
    return max(sure, key=lambda one: one.value) if sure and len(sure) == len(found) else None


def flaw(limit: Limit, unit: str, key: str, facts: Mapping[str, JsonValue], known: Known) -> str:
    """Why a threshold of a trial cannot be meant so, with the arithmetic; empty where nothing speaks against it."""
    said = f"{limit.op} {format_value(limit.value, unit)}"
    asks_for_more = limit.op in (">", ">=")
    if limit.value < 0 and unit not in _SIGNED:
        return f"{said} holds {'whatever is measured' if asks_for_more else 'for nothing'}: this is never below 0"
    if "/s" in unit and not asks_for_more:
        return f"{said} passes what is slow and fails what is fast: a rate is to be high"
    if unit in TIMES and asks_for_more:
        return f"{said} passes what is slow and fails what is fast: a time is to be short"
    if "/s" in unit and limit.value == 0 and limit.op == ">=":
        return f"{said} holds whatever is measured: no rate is below 0"
    if not asks_for_more:
        return ""
    most = bound(key, facts, known)
    if most and most.unit == unit and limit.value > most.value:
        return f"{said} is above what the hardware can do: {most.arithmetic}"
    expected = known.published(key, facts) if key else ""
    if not isinstance(expected, Reference) or expected.unit != unit:
        return ""
    share, of = limit.value / expected.value, f"the {format_value(expected.value, unit)} of {expected.of}"
    if OTHER_UNIT <= share <= 1 / OTHER_UNIT:
        return ""
    much = f"1/{1 / max(share, 1e-9):,.0f} of" if share < 1 else f"{share:,.0f} times"
    return f"{said} is {much} {of}: is it meant in another unit?"


def beyond(limit: Limit, unit: str, key: str, facts: Mapping[str, JsonValue], known: Known) -> str:
    """Why good hardware fails a threshold that its limits do not speak against; empty where none is known to.

    Of trainings nothing is said: their figures depend on settings that a trial may change.
    """
    best = known.published(key, facts) if spec_of(key) else ""
    if limit.op not in (">", ">=") or not isinstance(best, Reference) or best.unit != unit:
        return ""
    if limit.value <= STRETCH * best.value:
        return ""
    asked, good = (format_value(value, unit) for value in (limit.value, best.value))
    return (
        f"{limit.op} {asked} would reject good hardware, which reaches {good} in this shape "
        f"({best.of}: {best.source}); where yours reaches more, learn its baseline (seatrial baseline learn)"
    )


def laxness(limit: Limit, own: Limit | None) -> float:
    """What a threshold of a trial asks for, as a share of what the check itself asks of the metric: 1 is all of it.

    0: it passes what the check calls broken, whatever the figure, or asks for the opposite.
    """
    if own is None or (own.unit and limit.unit and own.unit != limit.unit):
        return 1.0
    if own.op == "==":
        others = (0.0, 1.0) if own.unit == "bool" else (own.value + 1, own.value - 1)
        return 0.0 if any(limit.holds(one) for one in others if one != own.value and one >= 0) else 1.0
    if _opposite(limit, own):
        return 0.0
    weaker, stronger = (own.value, limit.value) if own.op in ("<", "<=") else (limit.value, own.value)
    if weaker >= stronger:
        return 1.0
    return max(0.0, weaker / stronger) if stronger > 0 else 0.0


def _opposite(limit: Limit, own: Limit) -> bool:
    return "==" not in (limit.op, own.op) and limit.op[0] != own.op[0]


def gives_up(limit: Limit, unit: str, metric: str, rules: Sequence[Rule]) -> str:
    """Why a threshold may not take the place of what the check itself asks: it passes what is broken."""
    rule = next((rule for rule in rules if rule.metric == metric and rule.expect), None)
    if not rule or not rule.expect or rule.breach is not Outcome.FAIL:
        return ""
    own, share = rule.expect, laxness(limit, rule.expect)
    # of what may not be at all, a heat that slows the clocks, say, a trial may allow some: that is marked, not refused
    broken = share == 0 if own.op == "==" else _opposite(limit, own) or 0 < share < OTHER_UNIT
    said = f"{limit.op} {format_value(limit.value, unit)}"
    return f"{said} passes what the check itself fails, which asks for {own}: {rule.why}" if broken else ""


def complaints(config: Config, checks: Mapping[str, Check], gpu: str, gpus: int, known: Known) -> Iterator[str]:
    """Every threshold of a trial that cannot be meant so, on ``gpus`` GPUs of a model a node; "" is unknown to us."""
    nodes = config.cluster.nodes
    for name, setting in config.checks.items():
        check = checks.get(name)
        for metric, limit in setting.expect.items() if check else ():
            assert check
            key, unit = key_of(metric, check.rules) or metric, declared_unit(metric, check.metrics) or limit.unit
            ranks, width = _shape(key, gpus, 1 if check.by_node else nodes)
            facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": ranks, "nodes": width}
            facts |= check.foretold(check.options.model_validate(setting.options))
            wrong = flaw(limit, unit, key, facts, known) or beyond(limit, unit, key, facts, known)
            if wrong := wrong or gives_up(limit, unit, metric, check.rules):
                yield f"checks.{name}.expect.{metric}: {wrong}"


def _shape(key: str, gpus: int, nodes: int) -> tuple[int, int]:
    """Of how many ranks on how many nodes a figure is, by its baseline key, as the checks record it."""
    if key.startswith(_PAIRS):
        return 2, 1
    return (gpus * nodes, nodes) if _BANDWIDTHS.match(key) else (1, 1)  # all others are of a device


def refuse(config: Config, checks: Mapping[str, Check], gpus: Sequence[str], site: Baseline | None) -> None:
    """Raises UsageError that shows every threshold, and every value of a site's baseline, that cannot be meant so.

    ``gpus`` are NVML's names of the GPUs of a node, none where they are not known: what their SKU speaks against is
    then found when the trial is judged.
    """
    known = Known(site, skus())
    wrong = [*complaints(config, checks, MIXED.join(sorted(set(gpus))), len(gpus), known)]
    wrong += impossible(site, known) if site else []
    if wrong:
        raise UsageError("; ".join(wrong))


def refuse_site(site: Baseline) -> None:
    """Raises UsageError that shows every value of a baseline that the hardware cannot reach."""
    if wrong := list(impossible(site, Known(None, skus()))):
        raise UsageError("; ".join(wrong))


def impossible(baseline: Baseline, known: Known) -> Iterator[str]:
    """Every value of a site's baseline, and every floor, that is above what the hardware can do."""
    for key, values in baseline.expected.items():
        for one in values:
            facts: dict[str, JsonValue] = {"gpu": one.gpu, "world_size": one.gpus, "nodes": one.nodes}
            most = bound(key, facts, known)
            asked = max(one.value, one.floor or 0)
            if most and most.unit == one.unit and asked > most.value:
                yield f"baseline {baseline.name}: {key} is {format_value(asked, one.unit)}: {most.arithmetic}"
            yield from (f"baseline {baseline.name}: {key}: {fault}" for fault in _too_lax(one, key, facts, known))


def _too_lax(one: Expected, key: str, facts: Mapping[str, JsonValue], known: Known) -> Iterator[str]:
    """Why a value of a site cannot be meant so, or would let anything pass."""
    value = format_value(one.value, one.unit)
    if one.floor is not None and one.floor < WEAK * one.value:
        floor = format_value(one.floor, one.unit)
        yield f"the floor {floor} is {one.floor / one.value:.2g} of its {value}: under {WEAK:g} it tests nothing"
    if one.nodes > 1 and not one.fabric:
        yield f"{value} is of {one.nodes} nodes and says no fabric: over which network?"
    best = _yardstick(key, one.unit, facts, replace(known, fabric=one.fabric, _said={}))
    if best and one.value < OTHER_UNIT * best[0]:
        yield f"{value} is 1/{best[0] / one.value:,.0f} of {best[1]}: is it meant in another unit?"


def weakness(found: Reference, key: str, facts: Mapping[str, JsonValue], known: Known) -> str:
    """Why a site's value tests little: it is far under what its hardware is known to reach. Empty where it is not.

    A floor under the value is what fails, and is weighed in its place.
    """
    if found.kind is not BasisKind.SITE:
        return ""
    best = _yardstick(key, found.unit, facts, known.hardware)
    share = (found.floor or found.value) / best[0] if best else 1.0
    if not best or share >= WEAK:
        return ""
    return f"{100 * share:.2g}% of {best[1]}: {passes(share, key, str(facts.get('gpu') or ''), known)}"


def _yardstick(key: str, unit: str, facts: Mapping[str, JsonValue], known: Known) -> tuple[float, str] | None:
    """What the hardware is known to reach, or on one node its limit, and whose figure that is. None: nobody knows."""
    published = known.published(key, facts)
    if isinstance(published, Reference):
        reached = published.value, f"the {format_value(published.value, published.unit)} of {published.of}"
        return reached if published.unit == unit else None
    most = bound(key, facts, known) if facts.get("nodes") == 1 and spec_of(key) else None  # no training is near its
    return (most.value, f"what the hardware can do: {most.arithmetic}") if most and most.unit == unit else None


def passes(share: float, key: str, gpu: str, known: Known) -> str:
    """The fault that gets past a gate at ``share`` of what good hardware reaches, in parts of the link that binds.

    It takes the figure to fall with the links that are left, as that of a ring does.
    """
    spec, sku = spec_of(key), known.sku(gpu)
    if spec == "nvlink" and isinstance(sku, Sku) and sku.nvlinks:
        down = int(sku.nvlinks * (1 - share) + 1e-9)
        return f"a GPU with {down} of its {sku.nvlinks} NVLinks down passes"
    lanes = [lane for lane in _LANES if lane / 16 >= share]
    if spec == "pcie" and lanes:
        return f"a GPU on {lanes[0]} of 16 PCIe lanes passes"
    return f"what lost {1 - share:.0%} of it passes" if share > 0.1 else f"what is {_times(share)} slower passes"


def _times(share: float) -> str:
    return f"{1 / share:,.0f} times" if share > 0 else "any number of times"


def _of_sku(sku: Sku | str, key: str, facts: Mapping[str, JsonValue], known: Known) -> Bound | None:
    line = spec_of(key)
    if isinstance(sku, str):
        return None
    if not line:
        return _of_training(sku, trained) if (trained := work(key, facts)) else None
    if line == _LINKS:
        return _of_links(sku, key, facts, known)
    spec = sku.spec.get(line)
    return Bound(spec.value, spec.unit, f"{sku.name} has {_told(sku, line)}") if spec else None


def _of_training(sku: Sku, trained: Work) -> Bound | None:
    """Every product at the peak of its type, and nothing else done meanwhile: an MFU of 100 %, as a share of bf16's."""
    spec, bf16 = sku.spec.get(trained.line), sku.spec.get("bf16")
    if trained.share and spec and bf16:
        most = 100 * spec.value / bf16.value
        said = f"{sku.name} has {_told(sku, trained.line)}, and MFU is a share of the {bf16.value:g} of its bf16"
        return Bound(most, "%", f"{said}: {format_value(most, '%')}")
    if trained.share or not spec or not trained.flops:
        return None
    most = spec.value * 1e12 / trained.flops
    said = f"a token takes {trained.flops / 1e9:.4g} GFLOP, and {sku.name} has {_told(sku, trained.line)}"
    return Bound(most, "tokens/s/GPU", f"{said}: {format_value(round(most), 'tokens/s/GPU')}")


def _told(sku: Sku, line: str) -> str:
    spec = sku.spec[line]
    return f"{format_value(spec.value, spec.unit)} of {line} ({spec.source})"


def _of_links(sku: Sku, key: str, facts: Mapping[str, JsonValue], known: Known) -> Bound | None:
    """What the links of a GPU carry, as the figure counts it, or between nodes the network if that is less."""
    told = facts.get("world_size"), facts.get("nodes")
    ranks, nodes = (value if isinstance(value, int) and value > 0 else 1 for value in told)
    here = _inside(sku, ranks, nodes)
    if not here:
        return None
    kind = _BANDWIDTHS.match(key)
    if not kind:
        return _times_of(here, 2, " ways") if key.endswith("both_ways") else here
    operation = kind["operation"] or ""
    if sku.nvls and ranks > 1 and operation in ("", "all_reduce") and not key.startswith("algbw"):
        switches = 1 if sku.across_nodes else nodes
        gain = max(1.0, 1 / nvlink_share("all_reduce", "NVLS", ranks, switches))
        here = _times_of(here, gain, f", if {ranks // switches} GPUs sum in a switch (NVLS),")
    if key.startswith("algbw") and ranks > 1:
        here = _times_of(here, ranks / (ranks - 1), f", since of {ranks} parts each GPU has one already,")
    between = _between(operation, ranks, nodes, known.fabric) if operation and not sku.across_nodes else None
    return between if between and between.value < here.value else here


def _inside(sku: Sku, ranks: int, nodes: int) -> Bound | None:
    """One way out of a GPU: by NVLink, else by PCIe, which those that a bridge joins have together."""
    if "nvlink" in sku.spec:
        spec = sku.spec["nvlink"]
        return Bound(spec.value, spec.unit, f"{sku.name} has {_told(sku, 'nvlink')}")
    if "pcie" not in sku.spec or 1 < sku.bridged >= ranks // nodes:  # by a bridge, of which nothing is known
        return None
    spec = sku.spec["pcie"]
    out = Bound(spec.value, spec.unit, f"{sku.name} has no NVLink between all GPUs, and {_told(sku, 'pcie')}")
    return _times_of(out, sku.bridged, f", of {sku.bridged} that a bridge may join,") if sku.bridged > 1 else out


def _between(operation: str, ranks: int, nodes: int, fabric: str) -> Bound | None:
    """What the network lets through, by the algorithm that asks least of it; None where its class is not known."""
    ports = _FABRIC.fullmatch(fabric)
    if not 1 < nodes <= ranks or not ports:
        return None
    shares = [node_share(operation, algorithm, ranks, nodes) or 1.0 for algorithm in ("Ring", "Tree")]
    rate, share = int(ports[1]) * float(ports[2]) / 8, min(shares)
    out, most = (format_value(value, "GB/s") for value in (rate, rate / share))
    said = f"{fabric} carries {out} out of a node, where {operation} needs {share:.3g} of its busbw: {most}"
    return Bound(rate / share, "GB/s", said)


def _times_of(one: Bound, gain: float, why: str) -> Bound:
    most = one.value * gain
    return Bound(most, one.unit, f"{one.arithmetic}; × {gain:.3g}{why} is {format_value(most, one.unit)}")
