"""Small readers of /proc, /sys and /etc: they give a value, or the reason why there is none."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class FieldReader:
    """Reads the fields of one record. A field that cannot be read is None and leaves its reason in ``unread``."""

    def __init__(self) -> None:
        self.unreadable: dict[str, str] = {}

    def __call__(self, field: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (OSError, ValueError) as error:
            self.unreadable[field] = error_text(error)
            return None


def error_text(error: Exception) -> str:
    """Why a read failed, in a line: ``/sys/x: Permission denied``."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return printable(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return printable(str(error)) or type(error).__name__


def printable(text: str) -> str:
    """The text with control characters and undecodable bytes written as escapes: it ends up in JSON and on screens."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def path_under(root: Path, path: str) -> Path:
    """An absolute path as seen from ``root``."""
    return root / path.lstrip("/")


def read_text(path: Path) -> str:
    """The whole file; bytes that are no UTF-8 are written as escapes. Raises OSError."""
    return path.read_bytes().decode("utf-8", "backslashreplace")


def read_line(path: Path) -> str:
    """The one value that a /sys file holds. Raises OSError, or ValueError on an empty file."""
    value = printable(read_text(path).strip())
    if not value:
        raise ValueError(f"{path} is empty")
    return value


def read_number(path: Path) -> int:
    """The whole number that a /sys file holds. Raises OSError or ValueError."""
    value = read_line(path)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{path}: expected a whole number, found {value[:60]!r}") from None


def list_names(folder: Path) -> list[str]:
    """What a folder holds, sorted. Raises OSError."""
    return sorted(os.listdir(folder))


def parse_id_list(ranges: str) -> list[int]:
    """The kernel's list format: ``0-3,8`` → [0, 1, 2, 3, 8]. Raises ValueError on anything else."""
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", ranges):
        raise ValueError(f"expected a list such as 0-3,8, found {ranges[:60]!r}")
    spans = [part.split("-") for part in ranges.split(",")]
    return [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]


def start_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call that may never return (a dead NFS server, a silent DNS) beside this thread.

    ``result(timeout)`` of the future raises TimeoutError when it has not answered. The thread is a daemon: one that
    hangs does not keep the process alive.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # handed to the caller by result()
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
