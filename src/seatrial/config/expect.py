"""Validate thresholds of a trial: the check measures the metric, and the unit is that of the metric."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from seatrial.model import Threshold, format_bytes, parse_bytes


def metric_error(metric: str, options: BaseModel, metrics: Mapping[str, str]) -> str:
    """Return why the check with these ``options`` does not measure ``metric``; empty when it does."""
    name, _, member = metric.partition(".")
    if member in ("", "*") and f"{name}.*" in metrics:
        return f"expected one of {name}.*, such as {name}.{next(iter(_members(options, name) or ['1GiB']))}"
    if declared_unit(metric, metrics) is None:
        return f"unknown metric of this check{nearest(metric, metrics)}"
    if metric in metrics:
        return ""
    members = _members(options, name)
    if members is not None and member not in members:
        return f"{member!r} is not measured with these options; measured: {', '.join(members)}"
    return _wrong_size(member) if members is None and "sizes" in type(options).model_fields else ""


def _members(options: BaseModel, metric: str) -> list[str] | None:
    """The members of a family of metrics such as ``busbw.*``; None where the options do not list them.

    They are the option ``sizes`` (or the option that ``size_option_by_metric`` names for the metric), or ``paths``.
    """
    if "paths" in type(options).model_fields:
        return list(getattr(options, "paths", ())) or ["run_directory"]
    sizes = getattr(options, getattr(options, "size_option_by_metric", {}).get(metric, "sizes"), None)
    return None if sizes is None else [_exact(size) for size in sizes]


def _exact(size: int) -> str:
    """A size as metric names spell it: the short form where it is exact, else bytes."""
    short = format_bytes(size)
    return f"{size}B" if "." in short else short


def _wrong_size(member: str) -> str:
    try:
        spelling = _exact(parse_bytes(member))
    except (ValueError, OverflowError) as error:
        return str(error)
    return "" if member == spelling else f"the metric name spells {member!r} as {spelling!r}"


def limit_error(limit: Threshold, declared: str | None) -> str:
    """Return why ``limit`` cannot apply to a metric in the unit ``declared``; empty when it can."""
    if limit.unit != declared and (limit.unit or declared == "%"):  # 0.9 without a unit could be a ratio or below 1 %
        return f"the threshold has the unit {limit.unit!r}; the metric has the unit {declared!r}"
    if declared == "%" and not 0 <= limit.value <= 100:
        return f"{limit.value:g} % is not between 0 and 100 %"
    if declared == "%" and limit.op in (">", ">=") and 0 < limit.value < 1:
        return f"{limit.value:g} % is below 1 %; did you mean {limit.value * 100:g} %?"
    return ""


def declared_unit(metric: str, metrics: Mapping[str, str]) -> str | None:
    """The unit of a metric by its name or by a declared pattern such as ``busbw.*``; None for an undeclared metric."""
    if metric in metrics:
        return metrics[metric]
    family = f"{metric.partition('.')[0]}.*"
    return metrics.get(family) if "." in metric else None


def nearest(name: str, valid: Iterable[str]) -> str:
    """``; did you mean NAME?`` with the most similar valid name; empty where none is similar."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
