"""Failure signatures: patterns of log lines, their causes and fixes, from data/signatures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

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


class _Loaded(NamedTuple):
    """``specific``: the signatures of known failures. ``families``, ``general``: those of these roles.

    ``errors``: of the files of the site.
    """

    specific: tuple[Signature, ...]
    families: tuple[Signature, ...]
    general: tuple[Signature, ...]
    errors: tuple[str, ...]


@cache
def _loaded() -> _Loaded:
    rows, errors = with_site_rows({row["id"]: row for row in _shipped_rows()})
    return _Loaded(
        specific=tuple(signature for signature in rows if signature.role not in ("family", "general")),
        families=tuple(signature for signature in rows if signature.role == "family"),
        general=tuple(signature for signature in rows if signature.role == "general"),
        errors=tuple(errors),
    )


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
    return _loaded().specific


def all_signatures() -> tuple[Signature, ...]:
    """The signatures of known failures, then those of role ``family``, then those of role ``general``."""
    return (*signatures(), *_loaded().families, *_loaded().general)


def signature_errors() -> tuple[str, ...]:
    """The errors of the files of the site, a sentence each."""
    return _loaded().errors


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
