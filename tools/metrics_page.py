"""The page metrics.md of the site: all metrics with unit, meaning and rules."""

from __future__ import annotations

from seatrial.checks import catalog
from seatrial.checks.base import Check
from seatrial.report.inventory import rule_text

HEAD = """# Metrics

Look up the name, unit and meaning of each metric: for thresholds in `expect` ([trials](trials.md)), for `trial.json`
and for Prometheus.

| notation | meaning |
| --- | --- |
| a name that ends in `.*` | a family of metrics: the star stands for a size, a directory, a type or a training run |
| the column "meaning" | what the metric is; if it has a rule, what a value that violates the rule means |
| `if NAME = VALUE` in the column "rule" | the rule applies only if the check recorded this value of the fact NAME |

A *fact* is a recorded property of a measurement, such as the backend.
"""


def pages() -> dict[str, str]:
    """Return the page by its path in the site."""
    return {"metrics.md": "\n".join([HEAD, *(_section(check) for check in catalog().values() if check.declared)])}


def _section(check: Check) -> str:
    lines = [
        f"## {check.name}",
        "",
        f"{check.title}.",
        "",
        "| metric | unit | meaning | rule |",
        "| --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in check.declared:
        rules = " <br> ".join(rule_text(rule) for rule in each.rules)
        rows.setdefault((each.unit, each.meaning, rules), []).append(f"`{each.name}`")
    for (unit, meaning, rules), metrics in rows.items():
        lines.append(f"| {' <br> '.join(metrics)} | {unit or '–'} | {meaning} | {rules or '–'} |")
    return "\n".join([*lines, ""])
