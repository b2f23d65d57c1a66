"""Readers for files in /proc, /sys and /etc, and for fields whose errors are recorded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from seatrial.model import Frozen
from seatrial.util.text import error_text, number_ranges, printable

T = TypeVar("T")


class FileFacts(Frozen):
    """Facts of a machine. A field that cannot be read is None or empty, with the error in ``unreadable``."""

    unreadable: dict[str, str] = {}


class FieldReader:
    """Reads the fields of FileFacts: a field whose ``read`` fails is None, with the error in ``unreadable``."""

    def __init__(self) -> None:
        self.unreadable: dict[str, str] = {}

    def __call__(self, field: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (OSError, ValueError) as error:
            self.unreadable[field] = error_text(error)
            return None


def read_or_none(read: Callable[[], T]) -> T | None:
    """The result of ``read``; None if it raises OSError or ValueError."""
    return FieldReader()("", read)


def path_under(root: Path, path: str) -> Path:
    """The absolute ``path`` as seen with ``root`` as the root folder."""
    return root / path.lstrip("/")


def read_text(path: Path) -> str:
    """The whole file, with bytes that are not UTF-8 as escapes. Raises OSError."""
    return path.read_bytes().decode("utf-8", "backslashreplace")


def read_line(path: Path) -> str:
    """The value in a /sys file, stripped. Raises OSError, or ValueError on an empty file."""
    value = printable(read_text(path).strip())
    if not value:
        raise ValueError(f"{path} is empty")
    return value


def read_number(path: Path) -> int:
    """The integer in a /sys file. Raises OSError or ValueError."""
    value = read_line(path)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{path}: expected an integer, read {value[:60]!r}") from None


def list_names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def id_list(numbers: Iterable[int]) -> str:
    """Numbers in the kernel's list format: {0, 1, 2, 8} → ``0-2,8``."""
    return ",".join(number_ranges(numbers))


def parse_id_list(ranges: str) -> list[int]:
    """The numbers in the kernel's list format: ``0-3,8`` → [0, 1, 2, 3, 8]. Raises ValueError."""
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", ranges):
        raise ValueError(f"expected a list such as 0-3,8, read {ranges[:60]!r}")
    spans = [part.split("-") for part in ranges.split(",")]
    return [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]
