"""The table of scaling: each quantity on one GPU, one node and all nodes, with the verdicts on its efficiency."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from seatrial.checks import catalog
from seatrial.checks.base import ScalingMetrics
from seatrial.model import Measurement, Outcome, Trial, Verdict, worst
from seatrial.report.formatting import print_value
from seatrial.util.text import plural


@dataclass(frozen=True)
class ScalingRow:
    """One quantity on several numbers of GPUs: values as text, empty if not measured.

    ``ratio``: the value on all nodes relative to one node, or to one GPU if one node was not measured. ``judged``:
    (metric, value, outcome) of each efficiency that was evaluated.
    """

    name: str
    gpu: str
    node: str
    two_nodes: str
    cluster: str
    ratio: str
    judged: tuple[tuple[str, str, Outcome], ...]


@dataclass(frozen=True)
class ScalingTable:
    """``node``, ``two_nodes`` and ``cluster`` are headings; ``two_nodes`` is empty if the cluster has two nodes."""

    node: str
    two_nodes: str
    cluster: str
    rows: tuple[ScalingRow, ...]


def scaling_table(trial: Trial) -> ScalingTable | None:
    """The table of scaling; None if no such quantity was measured on several nodes."""
    rows: list[ScalingRow] = []
    nodes, ranks = 1, 1
    for check in catalog().values():
        measured = [measurement for measurement in trial.measurements if measurement.check == check.name]
        facts = next((measurement.facts for measurement in measured if "world_size" in measurement.facts), {})
        measured_nodes, measured_ranks = facts.get("nodes"), facts.get("world_size")
        if type(measured_nodes) is not int or type(measured_ranks) is not int:
            continue
        if check.scaling and measured_nodes > 1:
            nodes, ranks = measured_nodes, measured_ranks
            verdicts = [verdict for verdict in trial.verdicts if verdict.check == check.name]
            rows += (_row(name, metrics, nodes, measured, verdicts) for name, metrics in check.scaling.items())
    if not rows:
        return None
    node, two, all_gpus = (plural(count, "GPU") for count in (ranks // nodes, 2 * ranks // nodes, ranks))
    two_nodes = f"2 nodes ({two})" if nodes > 2 else ""
    return ScalingTable(f"1 node ({node})", two_nodes, f"{nodes} nodes ({all_gpus})", tuple(rows))


def _row(
    name: str, metrics: ScalingMetrics, nodes: int, measured: list[Measurement], verdicts: list[Verdict]
) -> ScalingRow:
    values: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    for metric in (metric for measurement in measured for metric in measurement.metrics):
        values.setdefault(metric.name, []).append(metric.value)
        texts[metric.name] = print_value(median(values[metric.name]), metric.unit)
    cluster_metric = metrics.cluster.format(nodes=nodes)  # the name may contain {nodes}
    base = next((median(values[part]) for part in (metrics.node, metrics.gpu) if part in values), 0.0)
    outcomes: dict[str, list[Outcome]] = {}
    for verdict in verdicts:
        if verdict.metric in metrics.efficiencies and verdict.outcome is not Outcome.SKIP:
            outcomes.setdefault(verdict.metric, []).append(verdict.outcome)
    return ScalingRow(
        name,
        texts.get(metrics.gpu, ""),
        texts.get(metrics.node, ""),
        texts.get(metrics.two_nodes, ""),
        texts.get(cluster_metric, ""),
        f"{100 * median(values[cluster_metric]) / base:.1f} %" if base and cluster_metric in values else "",
        tuple((metric, texts.get(metric, "not measured"), worst(of_metric)) for metric, of_metric in outcomes.items()),
    )
