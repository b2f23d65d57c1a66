"""Failure signatures: patterns of log lines, their causes and fixes, from data/signatures."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from seatrial.diagnose.signature import MAX_LINE, Signature
from seatrial.diagnose.site_signatures import with_site_rows
from seatrial.diagnose.xid import xid_rows
from seatrial.model import Frozen, UsageError
from seatrial.util import data_files


class Match(Frozen):
    """A signature that occurs in a text, with the matching line; ``time``: Unix seconds, None if unknown."""

    signature: Signature
    line: str
    source: str
    time: float | None = None


@cache
def _signatures_and_errors() -> tuple[tuple[Signature, ...], tuple[Signature, ...], tuple[str, ...]]:
    shipped = [*(row for rows in data_files.read_all("signatures") for row in rows), *xid_rows()]
    rows, errors = with_site_rows({row["id"]: row for row in shipped})
    known = tuple(signature for signature in rows if signature.role != "general")
    return known, tuple(signature for signature in rows if signature.role == "general"), tuple(errors)


def signatures() -> tuple[Signature, ...]:
    """The signatures of known failures: those of seatrial, changed and completed by the valid rows of the site."""
    return _signatures_and_errors()[0]


def all_signatures() -> tuple[Signature, ...]:
    """The signatures of known failures, then those of role ``general``."""
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
