"""How figures, places and names of metrics are written, and by what they are sorted. Shared by all reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from seatrial.model import CLUSTER, format_value, parse_bytes
from seatrial.report.text import plural

_UNITS_IN_PRINT = {"count": "", "us": "µs"}
_KINDS = (("node", "nodes"), ("rank", "ranks"), ("GPU", "GPUs"), ("link", "links"), ("rail", "rails"))


def count_text(subjects: Iterable[str]) -> str:
    """How many subjects of which kind: ``cluster + 2 ranks``, ``1 node + 8 GPUs``."""
    kinds = Counter(_kind(subject) for subject in subjects)
    parts = [CLUSTER] if kinds[CLUSTER] else []
    parts += [plural(kinds[one], one, many) for one, many in _KINDS if kinds[one]]
    return " + ".join(parts) or "none"


def _kind(subject: str) -> str:
    if subject == CLUSTER:
        return CLUSTER
    if "->" in subject:
        return "link"
    if re.fullmatch(r"rail\d+", subject):
        return "rail"
    place = subject.rpartition("/")[2] if "/" in subject else ""
    return "GPU" if place.startswith("gpu") else "rank" if place.startswith("rank") else "node"


def print_value(value: float, unit: str) -> str:
    """``model.format_value`` with the unit as print has it."""
    if value >= 2.0**63:  # how a limit that is none comes as a number: RLIM_INFINITY, rounded to a float
        return "unlimited"
    if value <= -(2.0**63):
        return f"{value:.3g} {unit_text(unit)}".strip()
    return format_value(value, unit_text(unit))


def unit_text(unit: str) -> str:
    """A count needs no unit behind it, and a microsecond has a letter of its own."""
    return _UNITS_IN_PRINT.get(unit, unit)


def format_range(values: Sequence[float], unit: str) -> str:
    """``787–810 TFLOP/s``: the least and the greatest of several values, or the one that all of them are."""
    low, high = print_value(min(values), unit), print_value(max(values), unit)
    return low if low == high else f"{low.partition(' ')[0]}–{high}"


def natural_key(text: str) -> list[tuple[int, str]]:
    """A key that sorts ``node2`` before ``node10``: digits by their count first, then as text."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", text)]


def family(name: str) -> str:
    """``busbw`` of ``busbw.8GiB``: metrics or curves of one kind."""
    return name.partition(".")[0]


def bytes_of(name: str) -> int:
    """The size that a metric such as ``busbw.8GiB`` is of; 0 where its name ends in none."""
    try:
        return parse_bytes(name.partition(".")[2])
    except ValueError:
        return 0
