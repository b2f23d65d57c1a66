"""How much of what the vendor says a GPU can do was reached, by type of number and of its memory; what is beyond it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.hardware.bounds import BIDIRECTIONAL, COLLECTIVE, MetricLookup, hardware_bound
from seatrial.hardware.references import References, Spec
from seatrial.hardware.training_flops import BOUNDED_METRICS
from seatrial.judge.thresholds import above_physical_limit
from seatrial.model import Insight, Measurement, Metric, Verdict

_LINKS = ("nvlink", "pcie", BIDIRECTIONAL, COLLECTIVE)  # of which insights on links speak


def achieved_over_peak(
    measurements: Sequence[Measurement], checks: Mapping[str, Check], known: References
) -> Iterator[Insight]:
    """One line for each model of GPU and each figure that has a peak; of a CPU none is known."""
    bounds = {name: {k: v for k, v in check.bounds.items() if v not in _LINKS} for name, check in checks.items()}
    found: dict[tuple[str, str, str], list[Metric]] = {}
    for one in (one for one in measurements if bounds.get(one.check)):
        gpu = one.facts.get("gpu")
        for metric in one.metrics if isinstance(gpu, str) and gpu else ():
            if metric.name in bounds[one.check]:
                found.setdefault((one.check, str(gpu), metric.name), []).append(metric)
    for (check, gpu, name), metrics in found.items():
        yield _insight(check, gpu, metrics, _peak(known, gpu, bounds[check][name], metrics[0].unit))


def _peak(known: References, gpu: str, line: str, unit: str) -> Spec | str:
    """What the vendor gives, or why that is not known."""
    sku = known.sku(gpu)
    if isinstance(sku, str):
        return sku
    spec = sku.spec.get(line)
    return spec if spec and spec.unit == unit else f"the SKU data of {sku.name} has none of {line} in {unit}"


def _insight(check: str, gpu: str, metrics: Sequence[Metric], peak: Spec | str) -> Insight:
    name, unit = metrics[0].name.removeprefix("tflops."), metrics[0].unit
    lowest = min(metrics, key=lambda metric: metric.value)
    reached = [lowest.value, median(metric.value for metric in metrics), max(metric.value for metric in metrics)]
    several = f"min–median–max of {len(metrics):,}, lowest {lowest.subject}; " if len(metrics) > 1 else ""
    shown = reached if several else reached[:1]
    figures = "–".join(f"{value:.1f}" for value in shown)
    values: dict[str, JsonValue] = {
        "gpu": gpu,
        "figure": name,
        "unit": unit,
        "reached": [*reached],
        "lowest": lowest.subject,
    }
    if isinstance(peak, str):
        text = f"{name} on {gpu}: {figures} {unit} ({several}peak not known: {peak})"
    else:
        values["peak"] = peak.value
        values["shares"] = [value / peak.value for value in reached]
        shares = "–".join(f"{100 * value / peak.value:.1f}" for value in shown)
        text = f"{name} on {gpu}: {figures} of {peak.value:g} {unit} peak = {shares}% ({several}{peak.source})"
    return Insight(check=check, title="achieved over peak", text=text, values=values)


def values_above_peak(check: Check, measured: Sequence[Measurement], known: References) -> Iterator[Verdict]:
    """An ERROR for each figure of a training that its GPU's arithmetic has no room for: it was measured wrongly.

    Other figures are held to their bound where a rule judges them. Of these most have no rule.
    """
    families = {name for name in check.metrics if name.partition(".")[0] in BOUNDED_METRICS}
    for one in measured if families else ():
        for metric in one.metrics:
            most = (
                hardware_bound(MetricLookup(metric.name, metric.name), one.facts, known)
                if metric.name in families
                else None
            )
            if most and most.unit == metric.unit and metric.value > most.value:
                yield above_physical_limit(check.name, metric, most)
