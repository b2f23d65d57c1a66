"""Compiles the patterns of signatures for hyperscan, which finds the candidates of all of them in one pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from seatrial.diagnose.signature import Signature

# A repetition, with its minimum as group 1; or an escape or a set of characters, in which braces are no repetition
_TOKEN = re.compile(r"\{(\d+),\d+\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")


def compile_patterns(signatures: Sequence[Signature]) -> Any:
    """The database that finds lines which may match; a match has the position of its signature. About half a second.

    Raises hyperscan.error for a pattern that it does not support.
    """
    import hyperscan  # not needed to run a trial without failures

    database = hyperscan.Database()
    flags = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER  # prefilter: lookarounds match too much here
    database.compile(
        expressions=[_expression(signature) for signature in signatures],
        ids=list(range(len(signatures))),
        elements=len(signatures),
        flags=[flags] * len(signatures),
    )
    return database


def _expression(signature: Signature) -> bytes:
    """A pattern for hyperscan that matches at least the lines that ``signature`` matches.

    Repetitions have no upper limit, which takes a third of the time to compile: ``{1,60}`` becomes ``{1,}``.
    """
    # hyperscan has no named groups of Python's form
    pattern = re.sub(r"\(\?P<\w+>", "(?:", signature.pattern)
    return _TOKEN.sub(lambda token: f"{{{token[1]},}}" if token[1] else token[0], pattern).encode()


def unsupported(signature: Signature) -> str:
    """Why hyperscan does not support the pattern; empty if it does."""
    import hyperscan

    try:
        compile_patterns([signature])
    except hyperscan.error as error:
        return str(error)
    return ""
