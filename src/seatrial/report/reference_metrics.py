"""The metrics with reference values for a GPU model, and the metrics of a planned trial without one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from seatrial.checks.check import Check, Checks, SkipIf
from seatrial.config.schema import Config
from seatrial.hardware.bounds import physical_base
from seatrial.hardware.references import MODEL_SEPARATOR, Reference, References, Sku, skus
from seatrial.judge.plausibility import metric_lookup, metric_shape
from seatrial.model import Baseline, ReferenceValue, Scope
from seatrial.model.rule import BOUND


@dataclass(frozen=True)
class ReferenceMetric:
    """A metric that a rule compares with a reference value. ``key``: the key of this value in the SKU data.

    ``is_optional``: if a known GPU model has no value, the metric is SKIP instead of UNJUDGED. ``is_per_node``: each
    node is measured separately. ``min_nodes`` and ``max_nodes``: on fewer or more nodes the rule gives no verdict.
    ``has_bound_limit``: without a value it is compared with what the hardware could do at most.
    """

    check: str
    name: str
    key: str
    is_optional: bool
    is_per_node: bool
    min_nodes: int = 1
    max_nodes: int | None = None
    has_bound_limit: bool = False


@dataclass(frozen=True)
class UnjudgedMetric:
    """A metric that will be UNJUDGED for lack of a reference value. ``fabrics``: networks for which it has a value."""

    check: str
    metric: str
    fabrics: tuple[str, ...] = ()


def reference_metrics(checks: Checks) -> tuple[ReferenceMetric, ...]:
    """All metrics that rules compare with reference values, in the order of the checks."""
    metrics: dict[ReferenceMetric, None] = {}
    for check in checks.values():
        for rule in check.rules:
            declared = check.declaration(rule.metric)
            if rule.reference:
                metric = ReferenceMetric(
                    check=check.name,
                    name=rule.metric,
                    key=rule.reference,
                    is_optional=bool(declared and declared.reference_optional),
                    is_per_node=check.per_node,
                    min_nodes=rule.when.min_nodes,
                    max_nodes=rule.when.max_nodes,
                    has_bound_limit=rule.share(BOUND) is not None,
                )
                metrics[metric] = None
    return tuple(metrics)


def values_by_metric(sku: Sku, metrics: Sequence[ReferenceMetric]) -> dict[ReferenceMetric, tuple[ReferenceValue, ...]]:
    """ReferenceMetric → its reference values for a GPU model, empty where there is none."""
    return {
        metric: tuple(value for value in sku.expected.get(metric.key, ()) if value.nodes == 1 or not metric.is_per_node)
        for metric in metrics
    }


def unjudged_metrics(
    config: Config,
    checks: Checks,
    planned: Iterable[str],
    gpus: Sequence[str],
    site: Baseline | None,
) -> tuple[UnjudgedMetric, ...]:
    """The metrics of the ``planned`` checks that have neither a reference value nor a threshold of the trial.

    ``gpus`` are the NVML names of the GPUs of a node. The network is not known before the run: a metric between nodes
    is listed even if it has a value over some networks; of an unknown GPU model, one that NVML's facts will bound too.
    """
    if not gpus:
        return ()
    planned, references = set(planned), References(site, skus())
    unjudged = []
    for metric in reference_metrics(checks):
        if metric.check not in planned or _has_threshold(metric, config):
            continue
        facts = _facts(metric, checks[metric.check], config, gpus)
        lookup = metric_lookup(checks[metric.check], metric.name, metric.key)
        by_bound = metric.has_bound_limit and facts and physical_base(lookup, facts, references)
        if not facts or by_bound or isinstance(references.site_or_sku_reference(metric.key, facts), Reference):
            continue
        found = [references.sku(name) for name in str(facts["gpu"]).split(MODEL_SEPARATOR)]
        if not metric.is_optional or not all(isinstance(sku, Sku) for sku in found):  # otherwise it is SKIP
            shape = facts["world_size"], facts["nodes"]
            values = found[0].expected.get(metric.key, ()) if len(found) == 1 and isinstance(found[0], Sku) else ()
            fabrics = (value.fabric for value in values if (value.gpus, value.nodes) == shape)
            unjudged.append(UnjudgedMetric(metric.check, metric.name, tuple(filter(None, fabrics))))
    return tuple(unjudged)


def _has_threshold(metric: ReferenceMetric, config: Config) -> bool:
    """Whether the trial has a threshold on the metric. If the trial sets ``sizes``, a threshold on any size counts."""
    settings, family = config.checks[metric.check], metric.name.rpartition(".")[0]
    if settings.options.get("sizes") and family:
        return any(name.rpartition(".")[0] == family for name in settings.expect)
    return metric.name in settings.expect


def _facts(metric: ReferenceMetric, check: Check, config: Config, gpus: Sequence[str]) -> dict[str, JsonValue]:
    """The facts that will select a reference value; empty if the rule or the check does not apply."""
    if not metric.min_nodes <= config.cluster.nodes <= (metric.max_nodes or config.cluster.nodes):
        return {}
    nodes = 1 if metric.is_per_node else config.cluster.nodes
    ranks = len(gpus) * nodes
    if check.needs.min_ranks > ranks or (SkipIf.ONE_NODE in check.skip_if and config.cluster.nodes == 1):
        return {}
    lookup = metric_lookup(check, metric.name, metric.key)
    # In checks with scope CLUSTER only training metrics have no bound. Their reference values are for all ranks
    if lookup.bounded_by or check.scope is not Scope.CLUSTER:
        ranks, nodes = metric_shape(check, lookup, ranks, nodes)
    return {"gpu": MODEL_SEPARATOR.join(sorted(set(gpus))), "world_size": ranks, "nodes": nodes}
