"""Text output of the commands `discover`, `checks` and `explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from seatrial.checks.check import Check
from seatrial.judge.insights.power import CERTAINTY, samples_table
from seatrial.model import Finding, Rule, format_bytes, format_value
from seatrial.model.rule import ALL_REDUCE, BOUND, GEMM, OPPOSITE, PEERS, REFERENCE, Limit
from seatrial.report.text import clean

# Mounted filesystems that `discover` prints; a container host can have hundreds
MAX_MOUNTS = 12
# Filesystem types of containers and of memory. An overlay reports the size of the disk below it
_CONTAINER_TYPES = ("overlay", "tmpfs", "squashfs")
SCOPES = (
    "Scopes: CONTROL = once, on this host; NODE = once per node; GPU = one process per GPU, without communication; "
    "CLUSTER = all ranks in one process group; if the title says one GPU, the other ranks wait."
)


def print_inventory(facts: Mapping[str, Any], console: Console) -> None:
    """Print facts, one line per component.

    Instead of a list of records inside a record, its length is printed. If there are more than MAX_MOUNTS mounted
    filesystems, only this many are printed. ``--json`` prints all records.
    """
    mounts = facts.get("host", {}).get("mounts", {})
    if len(mounts.get("filesystems", ())) > MAX_MOUNTS:
        facts = {**facts, "host": {**facts["host"], "mounts": _shortened_mounts(mounts)}}
    for depth, key, text in _lines(facts, 0):
        heading = f"[bold]{escape(clean(key))}[/]" if key else ""
        line = f"{'  ' * depth}{heading}{'  ' if key and text else ''}{escape(clean(text))}"
        console.print(line, highlight=False, soft_wrap=True)


def _shortened_mounts(mounts: Mapping[str, Any]) -> dict[str, Any]:
    """``mounts`` with MAX_MOUNTS filesystems, and the number of the others by type.

    Filesystems that do not respond come first, then those that contain /dev/shm, /, the home directory and the
    directory for temporary files. The remaining ones follow in order of size, those of _CONTAINER_TYPES last.
    """
    filesystems = mounts["filesystems"]
    containing: set[str] = set()
    for name in ("shm", "tmp", "home", "root"):
        path = PurePosixPath(mounts[name]["path"])
        targets = (mount["target"] for mount in filesystems if path.is_relative_to(mount["target"]))
        containing.add(max(targets, key=len, default=""))

    def priority(mount: Mapping[str, Any]) -> tuple[bool, bool, bool, int]:
        is_of_container = mount["type"] in _CONTAINER_TYPES
        return mount["responding"], mount["target"] not in containing, is_of_container, -(mount["size_bytes"] or 0)

    ordered = sorted(filesystems, key=priority)
    shown, others = ordered[:MAX_MOUNTS], ordered[MAX_MOUNTS:]
    counts = Counter(mount["type"] for mount in others).most_common()
    text = f"and {len(others)} more ({', '.join(f'{count} {kind}' for kind, count in counts)})"
    if hung := sum(not mount["responding"] for mount in others):
        text += f"; {hung} of them do not respond"
    more = f"{text}; all: seatrial discover --json"
    return {**mounts, "filesystems": [*sorted(shown, key=lambda mount: str(mount["target"])), more]}


def _lines(facts: Mapping[str, Any], depth: int) -> Iterator[tuple[int, str, str]]:
    """Indentation, heading and text of each line."""
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            yield depth, key, _pairs({name: inner for name, inner in value.items() if not _is_nested(inner)})
            yield from _lines({name: inner for name, inner in value.items() if _is_nested(inner)}, depth + 1)
        elif _is_nested(value):
            yield depth, key, ""
            for item in value:
                yield depth + 1, "", _pairs(item) if isinstance(item, dict) else _short(item)


def _is_nested(value: Any) -> bool:
    return (isinstance(value, dict) and bool(value)) or (
        isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    )


def _pairs(facts: Mapping[str, Any]) -> str:
    """``key value`` pairs on one line, without empty values; values of ``*_bytes`` in binary units."""
    return ", ".join(
        f"{key.removesuffix('_bytes')} {format_bytes(value) if key.endswith('_bytes') else _short(value)}"
        for key, value in facts.items()
        if value not in (None, "", [], {})
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_pairs(value)})"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return str(len(value))
    if isinstance(value, list):
        return " ".join(_short(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def print_check_list(checks: Mapping[str, Check], console: Console) -> None:
    """Print name, scope and title of each check on one line."""
    console.print(f"{SCOPES}\nRules of a check: seatrial show checks NAME\n", highlight=False)
    name_width = max((len(check.name) for check in checks.values()), default=0)
    scope_width = max((len(check.scope) for check in checks.values()), default=0)
    for check in checks.values():
        line = f"{check.name:<{name_width}}  {check.scope:<{scope_width}}  {check.title}"
        console.print(escape(line), highlight=False, soft_wrap=True)


def print_checks(checks: Mapping[str, Check], console: Console) -> None:
    """Print each check with its title, scope, needs, rules, and the metrics without a rule."""
    console.print(f"{SCOPES}\n", highlight=False)
    for check in checks.values():
        console.print(f"[bold]{check.name}[/]  {escape(check.title)}", highlight=False)
        scope = f"{check.phase}, scope {check.scope}, {_needs(check)}, at most {check.limit_s:.0f} s"
        console.print(scope if check.rules else f"{scope}, no rules", highlight=False)
        for rule in check.rules:
            console.print(Padding(f"[bold]{rule.metric}[/]  {rule_text(rule)}", (0, 0, 0, 2)), highlight=False)
            console.print(Padding(escape(rule.meaning), (0, 0, 0, 6)), highlight=False)
        judged = {rule.metric for rule in check.rules}
        recorded = [
            f"{name} ({unit})" if unit else name
            for name, unit in check.units.items()
            if name not in judged and not any(fnmatchcase(metric, name) for metric in judged)
        ]
        if recorded:
            console.print(Padding(escape(f"no rule: {', '.join(recorded)}"), (0, 0, 0, 2)), highlight=False)
        console.print()


def print_power(check: Check, console: Console) -> None:
    """Print how many samples each limit of a check needs to reject a slowdown, for several levels of noise."""
    metrics_by_limit: dict[float, list[str]] = {}
    for rule in check.rules:
        if (share := rule.share(REFERENCE)) is not None:
            metrics_by_limit.setdefault(share, []).append(rule.metric)
    if not metrics_by_limit:
        console.print(f"[bold]{check.name}[/]: no limit relative to a reference value", highlight=False)
    for limit, metrics in metrics_by_limit.items():
        text = f"[bold]{check.name}[/]: FAIL below {limit:.0%} of the reference: {', '.join(metrics)}"
        console.print(text, highlight=False)
        text = f"samples per measurement to reject a slowdown in {CERTAINTY:.0%} of trials; noise: standard deviation"
        console.print(text, highlight=False)
        counts_by_noise = samples_table(limit)  # noise → slowdown → number of samples, None above the highest number
        table = Table(box=None, padding=(0, 2, 0, 2))
        table.add_column("noise", justify="right")
        for slowdown in next(iter(counts_by_noise.values())):
            table.add_column(f"{slowdown:.0%} slower", justify="right")
        for noise, counts in counts_by_noise.items():
            table.add_row(f"{noise:.1%}", *(f"{count:,}" if count else "> 100,000" for count in counts.values()))
        console.print(table, highlight=False)


def checks_as_json(checks: Mapping[str, Check]) -> list[dict[str, Any]]:
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
    """Print the findings in logs."""
    for finding in findings:
        subject = f"{finding.subject}; " if finding.subject else ""
        source = escape(clean(f"({subject}{finding.source}; confidence: {finding.confidence})"))
        console.print(f"[bold]{escape(clean(finding.title))}[/]  {source}", highlight=False, soft_wrap=True)
        texts = (("cause", finding.evidence), ("run first", finding.first_command), ("fix", finding.fix))
        for title, text in filter(lambda row: row[1], texts):
            console.print(f"  {title:<11}{escape(clean(text))}", highlight=False, soft_wrap=True)


def _needs(check: Check) -> str:
    parts = ["GPUs"] if check.needs.gpus else []
    parts += [f"{check.needs.min_ranks} ranks"] if check.needs.min_ranks > 1 else []
    return f"requires {' and '.join(parts)}" if parts else "no requirements"


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
