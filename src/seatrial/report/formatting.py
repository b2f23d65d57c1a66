"""Text of values, subjects and metric names, and their sort keys, for all reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from seatrial.model import CLUSTER, parse_bytes, value_parts
from seatrial.util.grouping import grouped
from seatrial.util.text import plural

# A GPU, or a rank without one, of a node
DEVICE = re.compile(r"(?P<node>[^/>]+)/(?P<kind>gpu|rank)(?P<index>\d+)")
_NUMBER = re.compile(r"\d[\d.,]*")
_UNIT_TEXTS = {"count": "", "us": "µs"}


def merge_similar(texts: Iterable[str]) -> Iterator[str]:
    """Each text once. Of texts that differ only in numbers, such as those of several GPUs, only the first."""
    for first, *others in grouped((_NUMBER.sub("#", text), text) for text in texts).values():
        differing = sum(other != first for other in others)
        others_text = plural(differing, "other process", "other processes")
        yield f"{first} ({others_text} used the same method, with other numbers)" if differing else first


def subject_kind(subject: str) -> str:
    """The kind of a subject: cluster, node, rank, GPU, link, rail or port."""
    if subject == CLUSTER:
        return CLUSTER
    if "->" in subject:
        return "link"
    if re.fullmatch(r"rail\d+", subject):
        return "rail"
    if re.fullmatch(r"rank \d+( \(.*\))?", subject):  # a rank that failed before its node and device were known
        return "rank"
    device = subject.rpartition("/")[2] if "/" in subject else ""
    if re.fullmatch(r"(gpu|rank)\d*", device):
        return "GPU" if device.startswith("gpu") else "rank"
    return "port" if device else "node"


def print_value(value: float, unit: str) -> str:
    """``value`` with the unit as reports print it."""
    return _join(_printed_parts(value, unit))


def _printed_parts(value: float, unit: str) -> tuple[str, str]:
    """The number and the unit of ``value`` as reports print them; the unit can be empty."""
    if value >= 2.0**63:  # RLIM_INFINITY, rounded to a float
        return "unlimited", ""
    if value <= -(2.0**63):
        return f"{value:.3g}", unit_text(unit)
    return value_parts(value, unit_text(unit))


def _join(parts: tuple[str, str]) -> str:
    return " ".join(filter(None, parts))


def unit_text(unit: str) -> str:
    """The unit as reports print it: none for a count, µs for us."""
    return _UNIT_TEXTS.get(unit, unit)


def format_range(values: Sequence[float], unit: str) -> str:
    """``787–810 TFLOP/s``: minimum and maximum of ``values``, or one value if both print the same."""
    low, high = _printed_parts(min(values), unit), _printed_parts(max(values), unit)
    if low == high:
        return _join(low)
    same_unit = unit != "B" or low[1] == high[1]
    return f"{low[0] if same_unit else _join(low)}–{_join(high)}"


def natural_key(text: str) -> list[tuple[int, str]]:
    """A key that sorts ``node2`` before ``node10``: a number with fewer digits comes first."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", text)]


def family(name: str) -> str:
    """The family of a metric or curve: ``busbw`` for ``busbw.8GiB``."""
    return name.partition(".")[0]


def size_in_name(name: str) -> int:
    """The size in a metric name such as ``busbw.8GiB``, in bytes; 0 for a name without a size."""
    try:
        return parse_bytes(name.partition(".")[2])
    except ValueError:
        return 0
