"""Thresholds that cannot be meant so: beyond the hardware, of another order than their unit's, or turned round.

And what of a threshold that can be meant so gets past it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.config.expect import declared_unit
from seatrial.config.schema import Config
from seatrial.hardware.bounds import COLLECTIVE, Figure, bound
from seatrial.hardware.references import MIXED, Known, Reference, skus
from seatrial.model import HARDLY, Baseline, Expected, Limit, Outcome, Rule, UsageError, format_value

WEAK = 0.4  # of the expected value: a threshold under that hardly tests anything
# Under this share a threshold was written in another unit: MB/s for GB/s is a thousandth, as in a diagnostic suite that
# shipped 2333 MB/s for the memory of an H200. An honest gate of a hundredth is nobody's.
OTHER_UNIT = 0.01
# Two published figures of one shape differ by so much: 345 to 349 GB/s of two H200, 473 to 482 of eight. What asks for
# more than that beyond a known figure fails good hardware.
STRETCH = 1.05
TIMES = ("s", "ms", "us")
_SIGNED = ("%", "nats", "°C")  # a drift, what a loss lost


def figure_of(check: Check, metric: str, key: str) -> Figure:
    """``key``: that of the SKU data; empty where no rule compares the metric with it."""
    bound = next((bound for family, bound in check.bounds.items() if fnmatchcase(metric, family)), "")
    return Figure(key or metric, metric, bound, check.operation if key else "")


def figures_of(checks: Mapping[str, Check]) -> dict[str, Figure]:
    """What each key of a baseline is of."""
    rules = ((check, rule) for check in checks.values() for rule in check.rules)
    return {rule.baseline: figure_of(check, rule.metric, rule.baseline) for check, rule in rules if rule.baseline}


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


def flaw(limit: Limit, unit: str, figure: Figure, facts: Mapping[str, JsonValue], known: Known) -> str:
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
    most = bound(figure, facts, known)
    if most and most.unit == unit and limit.value > most.value:
        return f"{said} is above what the hardware can do: {most.arithmetic}"
    expected = known.published(figure.key, facts)
    if not isinstance(expected, Reference) or expected.unit != unit:
        return ""
    share, of = limit.value / expected.value, f"the {format_value(expected.value, unit)} of {expected.of}"
    if OTHER_UNIT <= share <= 1 / OTHER_UNIT:
        return ""
    much = f"1/{1 / max(share, 1e-9):,.0f} of" if share < 1 else f"{share:,.0f} times"
    return f"{said} is {much} {of}: is it meant in another unit?"


def beyond(limit: Limit, unit: str, figure: Figure, facts: Mapping[str, JsonValue], known: Known) -> str:
    """Why good hardware fails a threshold that its limits do not speak against; empty where none is known to.

    Of trainings nothing is said: their figures depend on settings that a trial may change.
    """
    best = known.published(figure.key, facts) if figure.bound else ""
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
            figure = figure_of(check, metric, key_of(metric, check.rules))
            unit = declared_unit(metric, check.metrics) or limit.unit
            ranks, width = _shape(check, figure, gpus, nodes)
            facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": ranks, "nodes": width}
            facts |= check.foretold(check.options.model_validate(setting.options))
            wrong = flaw(limit, unit, figure, facts, known) or beyond(limit, unit, figure, facts, known)
            if wrong := wrong or gives_up(limit, unit, metric, check.rules):
                yield f"checks.{name}.expect.{metric}: {wrong}"


def _shape(check: Check, figure: Figure, gpus: int, nodes: int) -> tuple[int, int]:
    """Of how many ranks on how many nodes a figure is, as the checks record it."""
    if figure.bound != COLLECTIVE:
        return 1, 1  # of a device
    if check.by_node:
        return (2 if "pair" in check.per.values() else gpus), 1
    return gpus * nodes, nodes


def refuse(config: Config, checks: Mapping[str, Check], gpus: Sequence[str], site: Baseline | None) -> None:
    """Raises UsageError that shows every threshold, and every value of a site's baseline, that cannot be meant so.

    ``gpus`` are NVML's names of the GPUs of a node, none where they are not known: what their SKU speaks against is
    then found when the trial is judged.
    """
    known = Known(site, skus())
    wrong = [*complaints(config, checks, MIXED.join(sorted(set(gpus))), len(gpus), known)]
    wrong += impossible(site, known, figures_of(checks)) if site else []
    if wrong:
        raise UsageError("; ".join(wrong))


def refuse_site(site: Baseline, checks: Mapping[str, Check]) -> None:
    """Raises UsageError that shows every value of a baseline that the hardware cannot reach."""
    if wrong := list(impossible(site, Known(None, skus()), figures_of(checks))):
        raise UsageError("; ".join(wrong))


def impossible(baseline: Baseline, known: Known, figures: Mapping[str, Figure]) -> Iterator[str]:
    """Every value of a site's baseline, and every floor, that is above what the hardware can do."""
    for key, values in baseline.expected.items():
        figure = figures.get(key, Figure(key))
        for one in values:
            facts: dict[str, JsonValue] = {"gpu": one.gpu, "world_size": one.gpus, "nodes": one.nodes}
            most = bound(figure, facts, known)
            asked = max(one.value, one.floor or 0)
            if most and most.unit == one.unit and asked > most.value:
                yield f"baseline {baseline.name}: {key} is {format_value(asked, one.unit)}: {most.arithmetic}"
            yield from (f"baseline {baseline.name}: {key}: {fault}" for fault in _too_lax(one, figure, facts, known))


def _too_lax(one: Expected, figure: Figure, facts: Mapping[str, JsonValue], known: Known) -> Iterator[str]:
    """Why a value of a site cannot be meant so, or would let anything pass."""
    value = format_value(one.value, one.unit)
    if one.floor is not None and one.floor < WEAK * one.value:
        floor = format_value(one.floor, one.unit)
        yield f"the floor {floor} is {one.floor / one.value:.2g} of its {value}: under {WEAK:g} it tests nothing"
    if one.nodes > 1 and not one.fabric:
        yield f"{value} is of {one.nodes} nodes and says no fabric: over which network?"
    best = _yardstick(figure, one.unit, facts, replace(known, fabric=one.fabric, _said={}))
    if best and one.value < OTHER_UNIT * best[0]:
        yield f"{value} is 1/{best[0] / one.value:,.0f} of {best[1]}: is it meant in another unit?"


def weakness(found: Reference, figure: Figure, facts: Mapping[str, JsonValue], known: Known) -> str:
    """The mark on a verdict by a site's value that is far under what its hardware is known to reach: it tests little.

    A floor under the value is what fails, and is weighed in its place.
    """
    if not known.site or found.of != known.site.title:
        return ""
    best = _yardstick(figure, found.unit, facts, known.hardware)
    share = (found.floor or found.value) / best[0] if best else 1.0
    if not best or share >= WEAK:
        return ""
    return f"; {HARDLY}: {100 * share:.2g}% of {best[1]}: {passes(share)}"


def _yardstick(figure: Figure, unit: str, facts: Mapping[str, JsonValue], known: Known) -> tuple[float, str] | None:
    """What the hardware is known to reach, or on one node its limit, and whose figure that is. None: nobody knows."""
    published = known.published(figure.key, facts)
    if isinstance(published, Reference):
        reached = published.value, f"the {format_value(published.value, published.unit)} of {published.of}"
        return reached if published.unit == unit else None
    most = bound(figure, facts, known) if facts.get("nodes") == 1 and figure.bound else None  # no training is near its
    return (most.value, f"what the hardware can do: {most.arithmetic}") if most and most.unit == unit else None


def passes(share: float) -> str:
    """The slowdown that gets past a threshold at ``share`` of what good hardware reaches."""
    if share <= 0:
        return "any slowdown would pass"
    return f"a {1 / share:,.0f}x slowdown would pass" if share < 0.1 else f"a {1 / share:.2g}x slowdown would pass"
