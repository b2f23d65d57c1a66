"""The tables of the commands `discover`, `show` and `explain`, and the note before a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.text import Text

from seatrial.checks.check import Check, Checks
from seatrial.hardware.references import Sku
from seatrial.judge.insights.power import CERTAINTY, samples_table
from seatrial.model import Finding, ReferenceValue, Rule, Scope, format_value
from seatrial.model.rule import ALL_REDUCE, BOUND, GEMM, OPPOSITE, PEERS, REFERENCE, Limit
from seatrial.report.reference_metrics import ReferenceMetric, UnjudgedMetric, values_by_metric
from seatrial.report.tables import Table, fact_tables, print_tables
from seatrial.report.text import clean
from seatrial.util.grouping import grouped
from seatrial.util.text import plural

# Mounted filesystems that `discover` prints; a container host can have hundreds
MAX_MOUNTS = 12
# Filesystem types of containers and of memory. An overlay reports the size of the disk below it
_CONTAINER_TYPES = ("overlay", "tmpfs", "squashfs")
SCOPES = Table(
    "Scopes",
    [
        (Scope.CONTROL, "once, on this host"),
        (Scope.NODE, "once per node"),
        (Scope.GPU, "one process per GPU, without communication"),
        (Scope.CLUSTER, "all ranks in one process group; if the title says one GPU, the other ranks wait"),
    ],
)
NO_VALUE = "–"


def print_inventory(facts: Mapping[str, Any], console: Console) -> None:
    """Print the facts of each component in tables. ``--json`` prints all filesystems and inner lists."""
    mounts = facts.get("host", {}).get("mounts", {})
    if len(mounts.get("filesystems", ())) > MAX_MOUNTS:
        facts = {**facts, "host": {**facts["host"], "mounts": _shortened_mounts(mounts)}}
    for component, values in facts.items():
        print_tables(list(fact_tables(values, component)), console)


def _shortened_mounts(mounts: Mapping[str, Any]) -> dict[str, Any]:
    """``mounts`` with MAX_MOUNTS filesystems, and the number of the others by type.

    Filesystems that do not respond come first, then the largest; those of _CONTAINER_TYPES come last.
    """

    def priority(mount: Mapping[str, Any]) -> tuple[bool, bool, int]:
        return mount["responding"], mount["type"] in _CONTAINER_TYPES, -(mount["size_bytes"] or 0)

    ordered = sorted(mounts["filesystems"], key=priority)
    shown, others = ordered[:MAX_MOUNTS], ordered[MAX_MOUNTS:]
    counts = Counter(mount["type"] for mount in others).most_common()
    more = f"{len(others)} more ({', '.join(f'{count} {kind}' for kind, count in counts)})"
    if hung := sum(not mount["responding"] for mount in others):
        more += f"; {hung} of them do not respond"
    return {**mounts, "filesystems": shown, "filesystems not listed": f"{more}; all: seatrial discover --json"}


def print_check_list(checks: Checks, console: Console) -> None:
    """Print name, scope and title of each check, by phase."""
    by_phase = grouped((str(check.phase), (check.name, str(check.scope), check.title)) for check in checks.values())
    print_tables([*(Table(phase, rows) for phase, rows in by_phase.items()), SCOPES], console)
    console.print("Rules of a check: seatrial show checks NAME", highlight=False)


def print_checks(checks: Checks, console: Console) -> None:
    """Print each check with its title, scope, needs, rules, and the metrics without a rule."""
    for check in checks.values():
        names = {"needs GPUs": check.needs.gpus, f"needs {check.needs.min_ranks} ranks": check.needs.min_ranks > 1}
        needs = ", ".join(name for name, is_needed in names.items() if is_needed) or "no requirements"
        text = f"{check.phase}, scope {check.scope}, {needs}, at most {check.limit_s:.0f} s"
        rules = [(rule.metric, rule_text(rule), rule.meaning) for rule in check.rules]
        judged = {rule.metric for rule in check.rules}
        recorded = [
            (name, f"no rule; in {unit}" if unit else "no rule", "")
            for name, unit in check.units.items()
            if name not in judged and not any(fnmatchcase(metric, name) for metric in judged)
        ]
        title = f"{check.name}: {check.title} ({text})"
        print_tables([Table(title, [*rules, *recorded], ("metric", "rule", "meaning of a violation"))], console)
    print_tables([SCOPES], console)


def print_power(check: Check, console: Console) -> None:
    """Print how many samples each limit of a check needs to reject a slowdown, for several levels of noise."""
    shares = ((rule.share(REFERENCE), rule.metric) for rule in check.rules)
    metrics_by_limit = grouped((share, metric) for share, metric in shares if share is not None)
    if not metrics_by_limit:
        print_tables([Table(f"{check.name}: no limit relative to a reference value", [])], console)
    for limit, metrics in metrics_by_limit.items():
        counts_by_noise = samples_table(limit)  # noise → slowdown → number of samples, None above the highest number
        header = ["noise", *(f"{slowdown:.0%} slower" for slowdown in next(iter(counts_by_noise.values())))]
        rows = [
            [f"{noise:.1%}", *(f"{count:,}" if count else "> 100,000" for count in counts.values())]
            for noise, counts in counts_by_noise.items()
        ]
        title = f"{check.name}: FAIL below {limit:.0%} of the reference: {', '.join(metrics)}"
        note = f"samples per measurement to reject a slowdown in {CERTAINTY:.0%} of trials; noise: standard deviation"
        print_tables([Table(title, []), Table(note, rows, header)], console)


def checks_as_json(checks: Checks) -> list[dict[str, Any]]:
    """The declaration of each check for ``--json``."""
    return [
        {
            "name": check.name,
            "title": check.title,
            "phase": check.phase,
            "scope": check.scope,
            "needs": {"gpus": check.needs.gpus, "ranks": check.needs.min_ranks},
            "rights": check.rights,
            "limit_s": check.limit_s,
            "metrics": dict(check.units),
            "rules": [rule.model_dump(mode="json") for rule in check.rules],
            "options": check.options.model_json_schema(),
        }
        for check in checks.values()
    ]


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings in logs. Lines are not wrapped, so that commands can be copied."""
    for finding in findings:
        subject = f"{finding.subject}; " if finding.subject else ""
        print_tables(
            [Table(f"{finding.title}  ({subject}{finding.source}; confidence: {finding.confidence})", [])], console
        )
        for title, text in (("cause", finding.evidence), ("run first", finding.first_command), ("fix", finding.fix)):
            if text:
                console.print(Text(f"  {title:<11}{clean(text)}"), soft_wrap=True)


def rule_text(rule: Rule) -> str:
    """The outcomes of violations, the limits and the condition: ``FAIL unless >= 90% of the reference value …``."""
    limits = "; ".join(f"{limit.outcome} unless {_limit_text(limit, rule)}" for limit in rule.limits)
    return f"{limits}, if {rule.when}" if str(rule.when) else limits


def _limit_text(limit: Limit, rule: Rule) -> str:
    share = f"{limit.op} {limit.value:.0%} of"
    if limit.base == REFERENCE:
        return f"{share} the reference value {rule.reference}"
    if limit.single_metric:
        return f"{share} {limit.single_metric}{' / GPUs of the node' if limit.is_per_gpu else ' of the same GPU'}"
    if limit.base:
        return f"{share} {_BASES[limit.base]}"
    if limit.unit == "bool":
        return "yes" if limit.value else "no"
    unit = "" if limit.unit == "x" else limit.unit  # "1.25 x" would read as a variable
    return f"{limit.op} {format_value(limit.value, unit)}"


_BASES = {
    PEERS: "the median of its peer group",
    BOUND: "the speed at the GPU's peak FLOP/s, if known",
    GEMM: "the speed at the matrix multiplication rate that this run measured",
    ALL_REDUCE: "the speed if gradients move at the bus bandwidth that this run measured",
    OPPOSITE: "the opposite direction",
}


def print_models(models: Sequence[Sku], metrics: Sequence[ReferenceMetric], console: Console) -> None:
    """Print a line for each GPU model: the number of metrics with a value, and the numbers of GPUs that have values."""
    rows = []
    for sku in models:
        by_metric = values_by_metric(sku, metrics)
        count = sum(map(bool, by_metric.values()))
        on = shapes([value for values in by_metric.values() for value in values]) or NO_VALUE
        rows.append((sku.name, f"{count} of {len(metrics)}", on))
    print_tables([Table("", rows, ("GPU model", "metrics with a value", "on"))], console)
    console.print("The values of one model: seatrial show skus MODEL", highlight=False)


def print_model(sku: Sku, metrics: Sequence[ReferenceMetric], console: Console) -> None:
    """Print the reference values of a GPU model with their sources, and the metrics without one."""
    by_metric = values_by_metric(sku, metrics)
    rows = [
        (f"{metric.check} {metric.name}", shape(value), value_text(value), value.source)
        for metric, values in by_metric.items()
        for value in values
    ]
    rows += [
        (f"{metric.check} {metric.name}", NO_VALUE, NO_VALUE, "SKIP" if metric.is_optional else "UNJUDGED")
        for metric, values in by_metric.items()
        if not values
    ]
    title = f"{sku.name}  NVML name: {', '.join(sku.nvml_names)}"
    print_tables([Table(title, rows, ("metric", "on", "value", "source, or outcome without a value"))], console)


def models_as_json(models: Sequence[Sku], metrics: Sequence[ReferenceMetric]) -> list[dict[str, Any]]:
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
    metrics_by_check = grouped(
        (each.check, each.metric + (f" (except over {' or '.join(each.fabrics)})" if each.fabrics else ""))
        for each in unjudged
    )
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
