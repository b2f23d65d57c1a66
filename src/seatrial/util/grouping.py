"""Groups of items, and the value that most items have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Key → its items, from (key, item); keys and items in the order of ``pairs``."""
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def majority(values: Iterable[Item]) -> Item | None:
    """The value that more than half have; None without one."""
    counts = Counter(values)
    return next((value for value, count in counts.items() if 2 * count > counts.total()), None)
