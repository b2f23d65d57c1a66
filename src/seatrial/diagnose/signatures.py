"""Failure signatures: patterns of log lines, their causes and fixes, from data/signatures."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from seatrial.diagnose import errnos, xid
from seatrial.diagnose.signature import Row, Signature, place_of
from seatrial.diagnose.site_signatures import with_site_rows
from seatrial.model import Frozen, UsageError
from seatrial.util import data_files, user_cache

_FACTS = "log_facts.yaml"
LAST_ROLES = ("fact", "recovery", "family", "general", "error_line")  # searched after the others, in this order


class Match(Frozen):
    """A signature that occurs in a text, with the matching line.

    ``values``: of the named groups. ``place``: the device or node that the values name. ``time``: Unix seconds, None if
    unknown. ``raised_in``: the library of the deepest frame of the traceback above the line.
    """

    signature: Signature
    line: str
    source: str
    values: dict[str, str] = {}
    time: float | None = None
    raised_in: str = ""

    @property
    def place(self) -> str:
        """The device, node or pod that the line names; empty if it names none."""
        return place_of(self.values)

    @property
    def log(self) -> str:
        """The name of the log."""
        return self.source.rpartition(":")[0]


@cache
def _loaded() -> tuple[tuple[Signature, ...], tuple[str, ...]]:
    """All signatures in the order of their roles, and the errors of the files of the site."""
    rows, errors = with_site_rows({row["id"]: row for row in _shipped_rows()})
    order = {role: number for number, role in enumerate(LAST_ROLES, 1)}
    return tuple(sorted(rows, key=lambda row: order.get(row.role, 0))), tuple(errors)


def _shipped_rows() -> list[Row]:
    """The signatures of data/; from the user's cache if it has them, since the YAML takes a fifth of a second."""
    texts = data_files.texts("signatures")
    texts += map(data_files.text, (_FACTS, *xid.FILES, *errnos.FILES))
    code = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (xid, errnos)]
    key = user_cache.key(*map(str.encode, [*texts, *code]))
    if content := user_cache.read("signatures", key):
        rows: list[Row] = json.loads(content)
        return rows
    files = [*data_files.read_all("signatures"), data_files.read(_FACTS)]
    rows = [*(row for file in files for row in file), *xid.xid_rows(), *errnos.errno_rows()]
    user_cache.write("signatures", key, json.dumps(rows).encode())
    return rows


def signatures() -> tuple[Signature, ...]:
    """The signatures of known failures: those of seatrial, changed and completed by the valid rows of the site."""
    return tuple(signature for signature in all_signatures() if signature.role not in LAST_ROLES)


def all_signatures() -> tuple[Signature, ...]:
    """The signatures of known failures, then those of facts, recoveries, families, general errors and error lines."""
    return _loaded()[0]


def signature_errors() -> tuple[str, ...]:
    """The errors of the files of the site, a sentence each."""
    return _loaded()[1]


def check_signatures() -> None:
    """Raise UsageError if a file of the site is wrong."""
    if errors := signature_errors():
        raise UsageError(errors[0])
