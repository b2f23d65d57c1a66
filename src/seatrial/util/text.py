"""Words that the judge, the diagnosis and the launchers put the same way."""

from __future__ import annotations

from collections.abc import Sequence


def and_more(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first ``most`` of them, and of how many others a person is not told: ``n1, n2 and 90 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
