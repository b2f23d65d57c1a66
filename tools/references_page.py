"""The page references.md of the site: the reference values of GPU models with their sources."""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.checks import catalog
from seatrial.hardware.references import Sku, skus
from seatrial.report.inventory import NO_VALUE, shape, shapes, value_text
from seatrial.report.reference_metrics import ReferenceMetric, reference_metrics, values_by_metric

HEAD = """# Reference values of GPU models

Look up which metrics have a reference value on your GPUs. `seatrial show skus MODEL` prints the values of one model.

A metric without a reference value is UNJUDGED, or SKIP where the value is optional (\\*). To judge it, set a threshold
([trials](trials.md)) or learn a baseline ([step 10](10-acceptance.md)). `seatrial run` names these metrics before it
starts.

| notation | meaning |
| --- | --- |
| `2×8 GPUs (ib-8x400)` | two nodes with 8 GPUs each; each node has 8 InfiniBand ports of 400 Gb/s |
| `at least 600 GB/s` | a published acceptance threshold: a lower value is a FAIL |
| "docs/results" in a source | measured by seatrial ([results](results/README.md)) |

[data/skus](../src/seatrial/data/skus/README.md) has the rules for values.
"""


def pages() -> dict[str, str]:
    """Return the page by its path in the site."""
    return {"references.md": page(skus(), reference_metrics(catalog()))}


def page(models: Sequence[Sku], metrics: Sequence[ReferenceMetric]) -> str:
    """Return the page: metrics by GPU model, then the values of each model with their sources."""
    with_values = [sku for sku in models if any(values_by_metric(sku, metrics).values())]
    without_values = [sku.name for sku in models if sku not in with_values]
    short_names = [sku.name.removeprefix("NVIDIA ") for sku in with_values]
    lines = [HEAD, "## Judged metrics", "", _row("metric", *short_names)]
    lines.append(_row(*["---"] * (1 + len(with_values))))
    for metric in metrics:
        cells = (shapes(values_by_metric(sku, [metric])[metric]) or NO_VALUE for sku in with_values)
        optional = r" \*" if metric.is_optional else ""
        lines.append(_row(f"`{metric.check}` `{metric.name}`{optional}", *cells))
    if without_values:
        lines += ["", f"No metric is judged by a reference value on: {', '.join(without_values)}."]
    lines.append("")
    for sku in with_values:
        lines += [f"## {sku.name}", "", f"NVML name: {', '.join(f'`{name}`' for name in sku.nvml_names)}", ""]
        lines += [_row("metric", "on", "value", "source"), _row("---", "---", "---", "---")]
        for metric, values in values_by_metric(sku, metrics).items():
            name = f"`{metric.check}` `{metric.name}`"
            lines += [_row(name, shape(value), value_text(value), value.source) for value in values]
        if keys_without_rule := _keys_without_rule(sku, metrics):
            keys = ", ".join(f"`{key}`" for key in keys_without_rule)
            lines += ["", f"Values without a rule, which only detect too high thresholds in `expect`: {keys}."]
        lines.append("")
    return "\n".join(lines)


def _keys_without_rule(sku: Sku, metrics: Sequence[ReferenceMetric]) -> list[str]:
    """The keys of values at sizes on which no check has a rule."""
    keys = {metric.key for metric in metrics}
    return [key for key in sku.expected if key not in keys]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
