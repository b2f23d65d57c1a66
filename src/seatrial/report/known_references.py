"""Text of the reference values of GPU models: `seatrial show skus`, and the note before a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seatrial.hardware.references import Sku
from seatrial.model import ReferenceValue, format_value
from seatrial.report.reference_metrics import ReferenceMetric, UnjudgedMetric, values_by_metric
from seatrial.util.text import plural

NO_VALUE = "–"


def print_models(models: Sequence[Sku], metrics: Sequence[ReferenceMetric], console: Console) -> None:
    """Print a line for each GPU model: the number of metrics with a value, and the numbers of GPUs that have values."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("GPU model", "metrics with a value", "on", "without a value"):
        table.add_column(column, overflow="fold")
    for sku in models:
        by_metric = values_by_metric(sku, metrics)
        all_values = [value for values in by_metric.values() for value in values]
        judged_count = sum(map(bool, by_metric.values()))
        table.add_row(
            escape(sku.name),
            f"{judged_count} of {len(metrics)}",
            shapes(all_values) or NO_VALUE,
            str(len(metrics) - judged_count),
        )
    console.print(table, highlight=False)
    console.print("The values of one model: seatrial show skus MODEL", highlight=False)


def print_model(sku: Sku, metrics: Sequence[ReferenceMetric], console: Console) -> None:
    """Print the reference values of a GPU model with their sources, and the metrics without one."""
    console.print(f"[bold]{escape(sku.name)}[/]  NVML name: {escape(', '.join(sku.nvml_names))}", highlight=False)
    for metric, values in values_by_metric(sku, metrics).items():
        for value in values:
            text = f"  {metric.check} {metric.name}, {shape(value)}: {value_text(value)}  ({value.source})"
            console.print(escape(text), highlight=False, soft_wrap=True)
    without = [metric for metric, values in values_by_metric(sku, metrics).items() if not values]
    for title, optional in (("UNJUDGED, no value", False), ("SKIP, no value", True)):
        if names := [f"{metric.check} {metric.name}" for metric in without if metric.is_optional is optional]:
            console.print(f"{title}: {', '.join(names)}", highlight=False, soft_wrap=True)


def as_json(models: Sequence[Sku], metrics: Sequence[ReferenceMetric]) -> list[dict[str, Any]]:
    """The reference values of all models for ``--json``."""
    return [
        {
            "name": sku.name,
            "nvml_names": list(sku.nvml_names),
            "metrics": [
                {
                    "check": metric.check,
                    "metric": metric.name,
                    "without_value": "SKIP" if metric.is_optional else "UNJUDGED",
                    "values": [value.model_dump(mode="json", exclude={"gpu", "runs"}) for value in values],
                }
                for metric, values in values_by_metric(sku, metrics).items()
            ],
        }
        for sku in models
    ]


def unjudged_lines(unjudged: Sequence[UnjudgedMetric], gpus: Sequence[str], nodes: int) -> Iterator[str]:
    """Lines that name, before a run, the metrics without a reference value on these GPUs."""
    if not unjudged:
        return
    model = " + ".join(sorted(set(gpus)))
    metrics_by_check: dict[str, list[str]] = {}
    for each in unjudged:
        exception = f" (except over {' or '.join(each.fabrics)})" if each.fabrics else ""
        metrics_by_check.setdefault(each.check, []).append(f"{each.metric}{exception}")
    where = f"{plural(nodes, 'node')} with {len(gpus)} × {model}"
    counts = f"{plural(len(unjudged), 'metric')} of {plural(len(metrics_by_check), 'check')}"
    yield f"UNJUDGED on {where}, no reference value: {counts}"
    for check, metrics in metrics_by_check.items():
        yield f"  {check}: {', '.join(metrics)}"
    yield "  to judge them: --set 'checks.CHECK.expect.METRIC=>= VALUE UNIT', or a baseline (seatrial baseline learn)"


def shapes(values: Sequence[ReferenceValue]) -> str:
    """The numbers of GPUs and nodes of some values: ``1, 8 GPUs; 2×8 GPUs (efa)``."""
    one_node = sorted({value.gpus for value in values if value.nodes == 1})
    texts = [f"{', '.join(map(str, one_node))} {'GPU' if one_node == [1] else 'GPUs'}"] if one_node else []
    return "; ".join([*texts, *dict.fromkeys(shape(value) for value in values if value.nodes > 1)])


def shape(value: ReferenceValue) -> str:
    """The number of GPUs and nodes of a value, the network between the nodes, and NCCL's algorithm."""
    gpus = plural(value.gpus, "GPU") if value.nodes == 1 else f"{value.nodes}×{value.gpus // value.nodes} GPUs"
    conditions = ", ".join(filter(None, (value.fabric if value.nodes > 1 else "", value.algorithm)))
    return f"{gpus} ({conditions})" if conditions else gpus


def value_text(value: ReferenceValue) -> str:
    """The value with its unit, and the minimum if one is published."""
    required = f", at least {format_value(value.required, value.unit)}" if value.required is not None else ""
    return f"{format_value(value.value, value.unit)}{required}"
