"""Text formatting shared by judge, diagnose and launch."""

from __future__ import annotations

from collections.abc import Sequence


def and_more(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Return the first ``limit`` items and the number of the others: ``n1, n2 and 90 more``."""
    others = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + others
