"""Validates thresholds of a trial: the check measures the metric, and the units agree."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping

from pydantic import BaseModel

from seatrial.model import Threshold, UsageError, has_scale, parse_bytes, size_label


def metric_error(metric: str, options: BaseModel, metrics: Mapping[str, str]) -> str:
    """Return why the check with these ``options`` does not measure ``metric``; empty if it does."""
    name, _, member = metric.partition(".")
    if member in ("", "*") and f"{name}.*" in metrics:
        example, *_ = _members(options, name) or ["1GiB"]
        return f"expected one of {name}.*, such as {name}.{example}"
    if declared_unit(metric, metrics) is None:
        return f"unknown metric of this check{nearest(metric, metrics)}"
    if metric in metrics and f"{name}.*" not in metrics:
        return ""
    members = _members(options, name)
    if members is not None and member not in members:
        return f"{member!r} is not measured with these options; measured: {', '.join(members)}"
    return _spelling_error(member) if members is None and "sizes" in type(options).model_fields else ""


def _members(options: BaseModel, metric: str) -> list[str] | None:
    """Return the members of a family of metrics such as ``busbw.*``; None if the options do not list them.

    Members are the values of the option ``paths``. If the check has no such option, they are the values of an option
    with sizes: ``sizes``, or for a family in ``size_option_by_metric`` of the options the one named there.
    """
    if "paths" in type(options).model_fields:
        return list(getattr(options, "paths", ())) or ["run_directory"]  # measured if no path is given
    size_option = getattr(options, "size_option_by_metric", {}).get(metric, "sizes")
    sizes = getattr(options, size_option, None)
    return None if sizes is None else [size_label(size) for size in sizes]


def _spelling_error(member: str) -> str:
    """Return why ``member`` is not the name of a size; empty if it is."""
    try:
        spelling = size_label(parse_bytes(member))
    except (ValueError, OverflowError) as error:
        return str(error)
    return "" if member == spelling else f"the metric name spells {member!r} as {spelling!r}"


def threshold_unit_error(threshold: Threshold, unit: str | None) -> str:
    """Return why ``threshold`` cannot apply to a metric with this unit; empty if it can."""
    # without a unit, 350 could be GB/s or MB/s, and 0.9 a ratio or a percentage; a count or a ratio needs no unit
    if threshold.unit != unit and (threshold.unit or has_scale(unit or "")):
        units = [f"the unit {text!r}" if text else "no unit" for text in (threshold.unit, unit)]
        return f"the threshold has {units[0]}; the metric has {units[1]}"
    if unit == "%" and not 0 <= threshold.value <= 100:
        return f"{threshold.value:g} % is not between 0 and 100 %"
    if unit == "%" and threshold.op in (">", ">=") and 0 < threshold.value < 1:
        return f"{threshold.value:g} % is below 1 %; did you mean {threshold.value * 100:g} %?"
    return ""


def declared_unit(metric: str, metrics: Mapping[str, str]) -> str | None:
    """Return the unit of a metric, declared for its name or for its family ``busbw.*``; None if undeclared."""
    if metric in metrics:
        return metrics[metric]
    family = f"{metric.partition('.')[0]}.*"
    return metrics.get(family) if "." in metric else None


def matching(patterns: Collection[str], names: Collection[str], noun: str, hint: str) -> list[str]:
    """Return the names that match a pattern, such as ``train.*``, in their order.

    Raises UsageError for a pattern without a match. ``noun``: what the names are of; ``hint``: the end of the message.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"no {noun} matches {pattern!r}{nearest(pattern, names)}{hint}")
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` with the most similar valid name; empty if none is similar."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
