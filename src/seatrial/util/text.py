"""Text formatting that several packages share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

# Zero-width characters and direction marks, as a range of a pattern: a terminal shows none of them
INVISIBLE = "\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"


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


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as text, with ranges: ``rank 3``, ``ranks 0-2, 5``; of more than 16 ranges only the first."""
    texts = number_ranges(ranks)
    return f"{'rank' if len(texts) == 1 and texts[0].isdecimal() else 'ranks'} {and_more(texts, 16)}"


def number_ranges(numbers: Iterable[int]) -> list[str]:
    """Return the ranges of consecutive numbers: {0, 1, 2, 8} → ``0-2``, ``8``."""
    unique = set(numbers)
    starts = sorted(number for number in unique if number - 1 not in unique)
    ends = sorted(number for number in unique if number + 1 not in unique)
    return [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
