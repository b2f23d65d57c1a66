"""Metrics with given rules, for checks of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seatrial.checks.declare import metric
from seatrial.model import Rule


def with_rules(rules: Sequence[Rule], unit: str, **options: Any) -> tuple[metric, ...]:
    """A metric for each name in ``rules``, with ``options``: fields of metric."""
    by_name: dict[str, list[Rule]] = {}
    for rule in rules:
        by_name.setdefault(rule.metric, []).append(rule)
    made = {name: metric(name, unit=unit, **options) for name in by_name}
    for name, declared in made.items():
        object.__setattr__(declared, "rules", tuple(by_name[name]))
    return tuple(made.values())
