"""Compiles the patterns of signatures for hyperscan, which finds the candidates of all of them in one pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from seatrial.diagnose.signature import Signature


def compile_patterns(signatures: Sequence[Signature]) -> Any:
    """The database that finds lines which may match; a match has the position of its signature. About two seconds.

    Raises hyperscan.error for a pattern that it does not support.
    """
    import hyperscan  # not needed to run a trial without failures

    database = hyperscan.Database()
    flags = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER  # prefilter: lookarounds match too much here
    database.compile(
        # hyperscan has no named groups of Python's form
        expressions=[re.sub(r"\(\?P<\w+>", "(?:", signature.pattern).encode() for signature in signatures],
        ids=list(range(len(signatures))),
        elements=len(signatures),
        flags=[flags] * len(signatures),
    )
    return database


def unsupported(signature: Signature) -> str:
    """Why hyperscan does not support the pattern; empty if it does."""
    import hyperscan

    try:
        compile_patterns([signature])
    except hyperscan.error as error:
        return str(error)
    return ""
