"""Measured TFLOP/s and memory bandwidth relative to the GPU's peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from pydantic import JsonValue

from seatrial.checks.check import Checks
from seatrial.hardware.links import BIDIRECTIONAL, COLLECTIVE
from seatrial.hardware.references import References, Spec
from seatrial.model import Insight, Measurement, Metric
from seatrial.util.grouping import grouped

_LINK_BOUNDS = ("nvlink", "pcie", BIDIRECTIONAL, COLLECTIVE)  # the insights on these bounds are made in judge/insights/


def achieved_over_peak(
    measurements: Sequence[Measurement], checks: Checks, references: References
) -> Iterator[Insight]:
    """One insight per check, GPU model and metric that is bounded by a value of the SKU's spec."""
    spec_keys = {  # check → metric → key of a SKU's spec
        name: {each.name: each.bound for each in check.declared if each.bound and each.bound not in _LINK_BOUNDS}
        for name, check in checks.items()
    }
    by_model = grouped(
        ((measurement.check, gpu, metric.name), metric)
        for measurement in measurements
        if spec_keys.get(measurement.check) and isinstance(gpu := measurement.facts.get("gpu"), str) and gpu
        for metric in measurement.metrics
        if metric.name in spec_keys[measurement.check]
    )
    for (check, gpu, name), metrics in by_model.items():  # the metrics of all subjects
        yield _insight(check, gpu, metrics, _peak(references, gpu, spec_keys[check][name], metrics[0].unit))


def _peak(references: References, gpu: str, spec_key: str, unit: str) -> Spec | str:
    """The peak value of the GPU model in ``unit``, or why it is unknown."""
    sku = references.sku(gpu)
    if isinstance(sku, str):
        return sku
    spec = sku.spec.get(spec_key)
    return spec if spec and spec.unit == unit else f"the SKU data of {sku.name} have no {spec_key} in {unit}"


def _insight(check: str, gpu: str, metrics: Sequence[Metric], peak: Spec | str) -> Insight:
    name, unit = metrics[0].name.removeprefix("tflops."), metrics[0].unit
    lowest = min(metrics, key=lambda metric: metric.value)
    measured = [lowest.value, median(metric.value for metric in metrics), max(metric.value for metric in metrics)]
    values: dict[str, JsonValue] = {
        "gpu": gpu,
        "metric": name,
        "unit": unit,
        "measured": [*measured],
        "lowest": lowest.subject,
    }
    if isinstance(peak, str):
        text = f"{name} on {gpu}: {_measured_text(metrics)}; peak unknown: {peak}"
    else:
        values["peak"] = peak.value
        values["ratios"] = [value / peak.value for value in measured]
        text = f"{name} on {gpu}: {_measured_text(metrics, peak.value)}; peak {peak.value:g} {unit} ({peak.source})"
    return Insight(check=check, title="achieved over peak", text=text, values=values)


def _measured_text(metrics: Sequence[Metric], peak: float | None = None) -> str:
    """The values of up to two subjects; for more subjects, the minimum, the median and the maximum.

    With ``peak``, each value has its share of the peak: ``vm/gpu1 315.4 TFLOP/s (31.9 %), vm/gpu0 668.9 TFLOP/s
    (67.6 %)``.
    """

    def text(value: float) -> str:
        return f"{value:.1f} {metrics[0].unit}" + (f" ({100 * value / peak:.1f} %)" if peak else "")

    ordered = sorted(metrics, key=lambda metric: metric.value)
    lowest, highest = ordered[0], ordered[-1]
    if len(ordered) <= 2:
        return ", ".join(f"{metric.subject} {text(metric.value)}" for metric in ordered)
    middle = median(metric.value for metric in ordered)
    return (
        f"minimum of {len(ordered):,} values {text(lowest.value)} on {lowest.subject}, median {text(middle)}, "
        f"maximum {text(highest.value)} on {highest.subject}"
    )
