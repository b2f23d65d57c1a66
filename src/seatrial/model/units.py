"""Parsing and formatting of byte sizes and of values with units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import BeforeValidator

BINARY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B)?\s*")


@dataclass(frozen=True)
class PlausibleRange:
    """The values that a measurement in a unit can have; any other value is a measurement error."""

    low: float
    high: float
    is_integer: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.is_integer and value % 1)

    def __str__(self) -> str:
        return f"{'an integer of ' if self.is_integer else ''}{self.low:g} to {self.high:g}"


_COUNT = PlausibleRange(0, 1e19, is_integer=True)  # 2^63 - 1 is the kernel's value of an unlimited resource
_COUNT_UNITS = (
    "count errors GPUs CPUs nodes files inodes rows links lanes pairs paths ports partitions ranks devices components "
    "controllers users models processes readings mounts names products rounds sizes words"
)
# Wider than the values of any machine of the next years: values outside are unit errors, overflows or empty readings
PLAUSIBLE_RANGES: Mapping[str, PlausibleRange] = {
    "%": PlausibleRange(-100, 100),  # rules and thresholds decide whether a negative value is bad
    "bool": PlausibleRange(0, 1, is_integer=True),
    "ratio": PlausibleRange(-1e6, 1e6),
    "x": PlausibleRange(0, 1e6),
    "of the best": PlausibleRange(0, 1e3),
    "of the median": PlausibleRange(0, 1e3),
    "of the base": PlausibleRange(0, 1e3),
    "nats": PlausibleRange(-1e3, 1e3),
    "s": PlausibleRange(0, 1e8),  # three years
    "ms": PlausibleRange(0, 1e11),
    "us": PlausibleRange(0, 1e14),
    "B": PlausibleRange(0, 1e21),
    "GiB": PlausibleRange(0, 1e12),
    "GB": PlausibleRange(0, 1e12),
    "°C": PlausibleRange(0, 150),
    "W": PlausibleRange(0, 1e5),
    "MHz": PlausibleRange(0, 1e5),
    "GB/s": PlausibleRange(0, 1e6),
    "TFLOP/s": PlausibleRange(0, 1e6),
    **dict.fromkeys(_COUNT_UNITS.split(), _COUNT),
}
_UNITS_WITH_A_SCALE = ("%", "nats", "s", "ms", "us", "B", "GiB", "GB", "°C", "W", "MHz")
_RATE = PlausibleRange(0, 1e15)
_ANY = PlausibleRange(-1e15, 1e15)
_ABOVE_100_PERCENT = PlausibleRange(-1e6, 1e6)  # up to 10,000 times the reference


def plausible_range(unit: str, may_exceed_100: bool = False) -> PlausibleRange:
    """The plausible values of a metric in ``unit``; ``may_exceed_100``: it is a share that may be above 100 %."""
    if unit == "%" and may_exceed_100:
        return _ABOVE_100_PERCENT
    return PLAUSIBLE_RANGES.get(unit) or (_RATE if "/" in unit else _ANY)


def has_scale(unit: str) -> bool:
    """Whether a value in ``unit`` could be stated in another unit, as GB/s in MB/s; counts and ratios could not."""
    return "/" in unit or unit in _UNITS_WITH_A_SCALE


def parse_bytes(text: str | int) -> int:
    """The number of bytes in ``"8GiB"``, ``"512 B"`` or a plain number.

    Raises ValueError for other text, including the ambiguous decimal units (``MB``).
    """
    match = _SIZE.fullmatch(str(text))
    if not match:
        units = ", ".join(BINARY_UNITS)
        raise ValueError(f"{text!r} is not a size: expected a number and one of {units} (1 KiB = 1024 B)")
    value = float(match[1]) * BINARY_UNITS[match[2] or "B"]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def format_bytes(count: float) -> str:
    """``count`` bytes in the largest binary unit: ``1 MiB``, or with one decimal: ``1.5 GiB``."""
    return " ".join(_bytes_parts(count))


def _bytes_parts(count: float) -> tuple[str, str]:
    """Number and unit of ``count`` bytes, as texts."""
    for unit, size in reversed(BINARY_UNITS.items()):
        scaled = count / size
        # 1023.96 MiB is 1.0 GiB, not 1024.0 MiB
        if abs(scaled) >= 1 or round(abs(scaled) * 1024, 1) >= 1024:
            return (f"{scaled:.0f}" if scaled.is_integer() else f"{scaled:.1f}"), unit
    return f"{count:.0f}", "B"


@lru_cache  # a thousand nodes report the same sizes
def size_label(size: float) -> str:
    """The size as metric names and options spell it: ``1GiB``, or in bytes if that form is not exact."""
    number, unit = _bytes_parts(size)
    exact = size >= 0 and "." not in number and int(number) * BINARY_UNITS[unit] == int(size)
    return f"{number}{unit}" if exact else f"{int(size)}B"


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]


def format_value(value: float, unit: str) -> str:
    """The value with its unit: bytes in binary units, yes or no for a bool, otherwise a number.

    A number has four significant digits. From 1,000 on it is rounded to an integer and has all digits.
    """
    return " ".join(filter(None, value_parts(value, unit)))


def value_parts(value: float, unit: str) -> tuple[str, str]:
    """The number and the unit that ``format_value`` prints; the unit is empty for a bool and for a plain number."""
    if unit == "B":
        return _bytes_parts(value)
    if unit == "bool":
        return ("yes" if value else "no"), ""
    digits = f"{value:.4g}" if value % 1 and abs(value) < 999.95 else f"{value:,.0f}"
    if value == 1 and unit.isalpha() and unit.endswith("s") and len(unit) > 2:  # a count such as GPUs, not ms
        unit = unit.removesuffix("es") if unit.endswith("sses") else unit.removesuffix("s")
    return digits, unit
