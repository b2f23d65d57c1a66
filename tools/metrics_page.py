"""The page metrics.md of the site: all metrics with unit, meaning and rules."""

from __future__ import annotations

from seatrial.checks import catalog
from seatrial.checks.base import Check
from seatrial.model import Rule
from seatrial.report.inventory import rule_text
from seatrial.util import data_files

HEAD = """# Metrics

Look up the name, unit and meaning of each metric: for thresholds in `expect` ([trials](trials.md)), for `trial.json`
and for Prometheus.

| notation | meaning |
| --- | --- |
| a name that ends in `.*` | a family of metrics: the star stands for a size, a directory, a type or a training run |
| `RUN` in a name | one of the training runs of the check |
| `if NAME == VALUE` in the column "rule" | the rule applies only if the check recorded this value of the fact NAME |

A *fact* is a recorded property of a measurement, such as the backend.
"""
_MEANINGS: dict[str, str] = data_files.read("metric_meanings.yaml")


def meaning(check: str, metric: str) -> str:
    """The meaning of a metric: by check and name, by name, or by family. Raises KeyError where there is none."""
    family = metric.partition(".")[0]
    for key in (f"{check}/{metric}", f"{check}/{family}.*", metric, f"{family}.*", family):
        if key in _MEANINGS:
            return _MEANINGS[key]
    raise KeyError(f"data/metric_meanings.yaml has no meaning of {check}/{metric}")


def pages() -> dict[str, str]:
    """Return the page by its path in the site."""
    return {"metrics.md": "\n".join([HEAD, *(_section(check) for check in catalog().values() if check.units)])}


def _section(check: Check) -> str:
    lines = [
        f"## {check.name}",
        "",
        f"{check.title}.",
        "",
        "| metric | unit | meaning | rule |",
        "| --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for metric, unit in check.units.items():
        rules = " <br> ".join(_rule(rule) for rule in check.rules if _is_on(rule, metric))
        family = metric if metric.endswith("*") else metric.partition(".")[0]
        rows.setdefault((family, unit, meaning(check.name, metric), rules), []).append(metric)
    for (family, unit, text, rules), metrics in rows.items():
        name = metrics[0] if len(metrics) == 1 else f"{family}.RUN"
        lines.append(f"| `{name}` | {unit or '–'} | {text} | {rules or '–'} |")
    return "\n".join([*lines, ""])


def _is_on(rule: Rule, metric: str) -> bool:
    return rule.metric == metric or (metric.endswith(".*") and rule.metric.startswith(metric[:-1]))


def _rule(rule: Rule) -> str:
    member = f"{rule.metric.partition('.')[2]}: " if "." in rule.metric else ""
    return member + rule_text(rule)
