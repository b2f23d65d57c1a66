"""Parsing and formatting of byte sizes and of values with units."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

BINARY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B)?\s*")


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
    """``count`` bytes in the largest binary unit: ``1MiB``, or with one decimal: ``1.5GiB``."""
    for unit in reversed(BINARY_UNITS):
        scaled = count / BINARY_UNITS[unit]
        if scaled >= 1:
            return f"{scaled:.0f}{unit}" if scaled == int(scaled) else f"{scaled:.1f}{unit}"
    return f"{count:.0f}B"


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]


def format_value(value: float, unit: str) -> str:
    """The value with its unit: bytes in binary units, yes/no for a bool, otherwise four significant digits."""
    if unit == "B":
        return format_bytes(value)
    if unit == "bool":
        return "yes" if value else "no"
    digits = f"{value:.4g}" if value % 1 and abs(value) < 10_000 else f"{value:,.0f}"
    return f"{digits} {unit}" if unit else digits
