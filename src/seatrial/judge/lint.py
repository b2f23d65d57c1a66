"""Thresholds that cannot be meant so: above what the hardware can do, or of another order than their unit's.

And what of a threshold that can be meant so gets past it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.config import declared_unit
from seatrial.judge.baselines import MIXED, Known, Reference, Sku, skus
from seatrial.model import HARDLY, Baseline, Expected, Limit, Rule, UsageError, format_value
from seatrial.settings import Config

WEAK = 0.4  # of the expected value: a threshold under that hardly tests anything
# Under this share a threshold was written in another unit: MB/s for GB/s is a thousandth, as in a diagnostic suite that
# shipped 2333 MB/s for the memory of an H200. An honest gate of a hundredth is nobody's.
OTHER_UNIT = 0.01
# Which line of a SKU's spec a figure cannot exceed, by the key of its baseline; a busbw by its middle part.
_SPEC = {
    **{f"gemm.{kind}": kind for kind in ("bf16", "fp16", "tf32", "fp8")},
    "memory.copy": "hbm",
    "transfer.h2d_alone": "pcie",
    "transfer.d2h_alone": "pcie",
    "transfer.peer_one_way": "nvlink",
}
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
    """The line of a SKU's spec that bounds the figures of a baseline key; empty where none does."""
    return "nvlink" if ".busbw." in key else _SPEC.get(key, "")


def bound(key: str, facts: Mapping[str, JsonValue], known: Known) -> Bound | None:
    """The most that any GPU of ``facts`` can show for ``key``. None where the vendor's figure is not known."""
    found = [_of_sku(sku, key, facts) for name in str(facts.get("gpu") or "").split(MIXED) if (sku := known.sku(name))]
    sure = [one for one in found if one]
    return max(sure, key=lambda one: one.value) if sure and len(sure) == len(found) else None


def flaw(limit: Limit, unit: str, key: str, facts: Mapping[str, JsonValue], known: Known) -> str:
    """Why a threshold of a trial cannot be meant so, with the arithmetic; empty where nothing speaks against it.

    Only for those that ask for more: ``>`` and ``>=``.
    """
    if limit.op not in (">", ">="):
        return ""
    said = f"{limit.op} {format_value(limit.value, unit)}"
    if "/s" in unit and (limit.value < 0 or (limit.value == 0 and limit.op == ">=")):
        return f"{said} holds whatever is measured: no rate is below 0"
    most = bound(key, facts, known)
    if most and most.unit == unit and limit.value > most.value:
        return f"{said} is above what the hardware can do: {most.arithmetic}"
    expected = known.published(key, facts) if key else ""
    if isinstance(expected, Reference) and expected.unit == unit and limit.value < OTHER_UNIT * expected.value:
        of = f"the {format_value(expected.value, unit)} of {expected.of}"
        return f"{said} is 1/{expected.value / max(limit.value, 1e-9):,.0f} of {of}: is it meant in another unit?"
    return ""


def complaints(config: Config, checks: Mapping[str, Check], gpu: str, gpus: int, known: Known) -> Iterator[str]:
    """Every threshold of a trial that cannot be meant so, on ``gpus`` GPUs of a model a node; "" is unknown to us."""
    nodes = config.cluster.nodes
    for name, setting in config.checks.items():
        check = checks.get(name)
        for metric, limit in setting.expect.items() if check else ():
            assert check
            key, unit = key_of(metric, check.rules), declared_unit(metric, check.metrics) or limit.unit
            ranks, width = (gpus * nodes, nodes) if ".busbw." in key else (1, 1)  # all others are of a device
            facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": ranks, "nodes": width}
            if wrong := flaw(limit, unit, key, facts, known):
                yield f"checks.{name}.expect.{metric}: {wrong}"


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
    """The mark on a verdict by a site's value that is far under what its hardware is known to reach: it tests little.

    A floor under the value is what fails, and is weighed in its place.
    """
    if not known.site or found.of != known.site.title:
        return ""
    best = _yardstick(key, found.unit, facts, known.hardware)
    share = (found.floor or found.value) / best[0] if best else 1.0
    if not best or share >= WEAK:
        return ""
    return f"; {HARDLY}: {100 * share:.2g}% of {best[1]}: {passes(share, key, str(facts.get('gpu') or ''), known)}"


def _yardstick(key: str, unit: str, facts: Mapping[str, JsonValue], known: Known) -> tuple[float, str] | None:
    """What the hardware is known to reach, or on one node its limit, and whose figure that is. None: nobody knows."""
    published = known.published(key, facts)
    if isinstance(published, Reference):
        reached = published.value, f"the {format_value(published.value, published.unit)} of {published.of}"
        return reached if published.unit == unit else None
    most = bound(key, facts, known) if facts.get("nodes") == 1 else None
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


def _of_sku(sku: Sku | str, key: str, facts: Mapping[str, JsonValue]) -> Bound | None:
    if isinstance(sku, str) or not (spec := sku.spec.get(spec_of(key))):
        return None
    told = f"{format_value(spec.value, spec.unit)} of {spec_of(key)} ({spec.source})"
    ranks = facts.get("world_size")
    if not key.startswith("all_reduce.busbw.") or not isinstance(ranks, int) or ranks < 2:
        return Bound(spec.value, spec.unit, f"{sku.name} has {told}")
    gain = max(1.0, 2 * (ranks - 1) / (ranks + 1))  # links.nvlink_share: what a sum in the switch spares the links
    most = spec.value * gain
    sums = f"× {gain:.3g}, if all {ranks} GPUs sum in the switch (NVLS), is {format_value(most, spec.unit)}"
    return Bound(most, spec.unit, f"{sku.name} has {told}; {sums}")
