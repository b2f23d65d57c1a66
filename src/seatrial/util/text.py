"""Text formatting that several packages share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


def error_text(error: Exception) -> str:
    """Return the error in one printable line: ``/sys/x: Permission denied``."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return printable(name + error.strerror)
    return printable(str(error)) or type(error).__name__


def printable(text: str) -> str:
    """Return the text with control characters and undecodable bytes as escapes, safe for JSON and terminals."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def and_more(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Return the first ``limit`` items and the number of the others: ``n1, n2 and 90 more``."""
    others = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + others


def cut_at_sentence(text: str, limit: int) -> str:
    """Return the text; if it exceeds ``limit`` characters, its start up to the end of a sentence or word, and ``…``."""
    if len(text) <= limit:
        return text
    start = text[: limit - 1]  # leaves one character for the ellipsis, which follows a blank
    end = start.rfind(". ") + 1 or start.rfind(" ")
    return f"{start[:end].rstrip()} …" if end > 0 else f"{start}…"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return the number with its noun: ``1 subject``, ``2 subjects``; ``nouns`` is an irregular plural."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def rank_list(ranks: Iterable[int], limit: int = 16) -> str:
    """Return ranks as text, with ranges: ``rank 3``, ``ranks 0-2, 5``; of more than ``limit`` ranges only the first."""
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"{'rank' if is_one else 'ranks'} {and_more(texts, limit)}"
