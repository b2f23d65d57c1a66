"""The table of scaling: each quantity on one GPU, one node and all nodes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from seatrial.checks import catalog
from seatrial.checks.check import ScalingMetrics
from seatrial.model import Measurement, Trial
from seatrial.report.formatting import print_value
from seatrial.util.text import plural


@dataclass(frozen=True)
class ScalingRow:
    """One quantity on several numbers of GPUs: values as text, empty if not measured.

    ``ratio``: the value on all nodes relative to one node, or to one GPU if one node was not measured.
    """

    name: str
    gpu: str
    node: str
    two_nodes: str
    cluster: str
    ratio: str


@dataclass(frozen=True)
class ScalingTable:
    """``node``, ``two_nodes`` and ``cluster`` are headings; ``two_nodes`` is empty if the cluster has two nodes."""

    node: str
    two_nodes: str
    cluster: str
    rows: tuple[ScalingRow, ...]


def scaling_table(trial: Trial) -> ScalingTable | None:
    """The table of scaling; None if no check with scaling ran on several nodes."""
    rows: list[ScalingRow] = []
    nodes, ranks = 1, 1
    for check in catalog().values():
        if not check.scaling:
            continue
        measured = [measurement for measurement in trial.measurements if measurement.check == check.name]
        facts = next((measurement.facts for measurement in measured if "world_size" in measurement.facts), {})
        measured_nodes, measured_ranks = facts.get("nodes"), facts.get("world_size")
        if type(measured_nodes) is not int or type(measured_ranks) is not int or measured_nodes < 2:
            continue
        nodes, ranks = measured_nodes, measured_ranks
        rows += (_row(name, metrics, nodes, measured) for name, metrics in check.scaling.items())
    if not rows:
        return None
    return ScalingTable(
        node=f"1 node ({plural(ranks // nodes, 'GPU')})",
        two_nodes=f"2 nodes ({plural(2 * ranks // nodes, 'GPU')})" if nodes > 2 else "",
        cluster=f"{nodes} nodes ({plural(ranks, 'GPU')})",
        rows=tuple(rows),
    )


def _row(name: str, metrics: ScalingMetrics, nodes: int, measured: list[Measurement]) -> ScalingRow:
    values: dict[str, list[float]] = {}  # metric → values of all subjects
    units: dict[str, str] = {}
    for measurement in measured:
        for metric in measurement.metrics:
            values.setdefault(metric.name, []).append(metric.value)
            units[metric.name] = metric.unit
    texts = {name: print_value(median(values[name]), unit) for name, unit in units.items()}
    cluster_metric = metrics.cluster.format(nodes=nodes)  # the name may contain {nodes}
    base_values = values.get(metrics.node) or values.get(metrics.gpu)
    ratio = ""
    if base_values and cluster_metric in values and median(base_values):
        ratio = f"{100 * median(values[cluster_metric]) / median(base_values):.1f} %"
    return ScalingRow(
        name=name,
        gpu=texts.get(metrics.gpu, ""),
        node=texts.get(metrics.node, ""),
        two_nodes=texts.get(metrics.two_nodes, ""),
        cluster=texts.get(cluster_metric, ""),
        ratio=ratio,
    )
