"""Failure signatures: patterns of log lines, their causes and fixes, from data/signatures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from seatrial.diagnose import xid
from seatrial.diagnose.signature import MAX_LINE, Row, Signature
from seatrial.diagnose.site_signatures import with_site_rows
from seatrial.model import Frozen, UsageError
from seatrial.util import data_files, user_cache


class Match(Frozen):
    """A signature that occurs in a text, with the matching line; ``time``: Unix seconds, None if unknown."""

    signature: Signature
    line: str
    source: str
    time: float | None = None


@cache
def _signatures_and_errors() -> tuple[tuple[Signature, ...], tuple[Signature, ...], tuple[str, ...]]:
    rows, errors = with_site_rows({row["id"]: row for row in _shipped_rows()})
    specific = tuple(signature for signature in rows if signature.role not in ("family", "general"))
    families = tuple(signature for signature in rows if signature.role == "family")
    general = tuple(signature for signature in rows if signature.role == "general")
    return specific, (*families, *general), tuple(errors)


def _shipped_rows() -> list[Row]:
    """The signatures of data/; from the user's cache if it has them, since the YAML takes a fifth of a second."""
    texts = data_files.texts("signatures")
    xid_texts = [*map(data_files.text, xid.FILES), Path(xid.__file__).read_text(encoding="utf-8")]
    key = user_cache.key(*map(str.encode, [*texts, *xid_texts]))
    if content := user_cache.read("signatures", key):
        rows: list[Row] = json.loads(content)
        return rows
    rows = [*(row for text in texts for row in data_files.parse(text)), *xid.xid_rows()]
    user_cache.write("signatures", key, json.dumps(rows).encode())
    return rows


def signatures() -> tuple[Signature, ...]:
    """The signatures of known failures: those of seatrial, changed and completed by the valid rows of the site."""
    return _signatures_and_errors()[0]


def all_signatures() -> tuple[Signature, ...]:
    """The signatures of known failures, then those of role ``family``, then those of role ``general``."""
    return (*signatures(), *_signatures_and_errors()[1])


def signature_errors() -> tuple[str, ...]:
    """The errors of the files of the site, a sentence each."""
    return _signatures_and_errors()[2]


def check_signatures() -> None:
    """Raise UsageError if a file of the site is wrong."""
    if errors := signature_errors():
        raise UsageError(errors[0])


def search_lines(lines: Iterable[str], source: str) -> list[Match]:
    """One match per signature that occurs in a short text such as an error; ``source`` names the check."""
    matches: dict[str, Match] = {}
    for number, line in enumerate(lines, 1):
        for signature in signatures():
            if signature.id not in matches and signature.matches(line):
                text = line[:MAX_LINE].strip()
                matches[signature.id] = Match(signature=signature, line=text, source=f"{source}:{number}")
    return list(matches.values())
