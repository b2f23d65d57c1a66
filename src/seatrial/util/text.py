"""Text formatting shared by judge, diagnose and launch."""

from __future__ import annotations

from collections.abc import Sequence


def and_more(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first ``most`` names and the number of the others: ``n1, n2 and 90 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
