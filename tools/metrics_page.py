"""The page metrics.md of the site: all metrics with unit, meaning and rules."""

from __future__ import annotations

from seatrial.checks import catalog
from seatrial.checks.check import Check
from seatrial.report.inventory import rule_text

HEAD = """# Metrics

Look up the name, unit and meaning of each metric: for thresholds in `expect` ([trials](trials.md)), for `trial.json`
and for Prometheus.

| notation | meaning |
| --- | --- |
| a name that ends in `.*` | a family of metrics: the star stands for a size, a directory, a type or a training run |
| several checks in a heading | metrics that are the same in each of these checks; further ones have their own section |
| the column "meaning" | what the metric is; if it has a rule, what a value that violates the rule means |
| `if NAME == VALUE` in the column "rule" | the rule applies only if the check recorded this value of the fact NAME |

A *fact* is a recorded property of a measurement, such as the backend.
"""


def pages() -> dict[str, str]:
    """Return the page by its path in the site."""
    checks_by_row: dict[str, list[str]] = {}
    for check in catalog().values():
        for row in _rows(check):
            checks_by_row.setdefault(row, []).append(check.name)
    rows_by_checks: dict[tuple[str, ...], list[str]] = {}
    for row, checks in checks_by_row.items():
        rows_by_checks.setdefault(tuple(checks), []).append(row)
    return {"metrics.md": "\n".join([HEAD, *(_section(*section) for section in rows_by_checks.items())])}


def _section(checks: tuple[str, ...], rows: list[str]) -> str:
    titles = [f"{catalog()[checks[0]].title}.", ""] if len(checks) == 1 else []
    return "\n".join(
        [
            f"## {', '.join(checks)}",
            "",
            *titles,
            "| metric | unit | meaning | rule |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _rows(check: Check) -> list[str]:
    names_by_row: dict[str, list[str]] = {}
    for each in check.declared:
        rules = "<br>".join(rule_text(rule) for rule in each.rules)
        names_by_row.setdefault(f"{each.unit or '–'} | {each.meaning} | {rules or '–'}", []).append(f"`{each.name}`")
    return [f"| {'<br>'.join(names)} | {row} |" for row, names in names_by_row.items()]
