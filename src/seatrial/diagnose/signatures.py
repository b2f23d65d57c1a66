"""All failure signatures: patterns of log lines, their causes and fixes, from data/signatures and files of the site."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from seatrial.diagnose import errnos, xid
from seatrial.diagnose.patterns import unsupported
from seatrial.diagnose.signature import Row, Signature
from seatrial.model import UsageError
from seatrial.util import data_files, user_cache

VARIABLE = "SEATRIAL_SIGNATURES"
LAST_ROLES = ("fact", "recovery", "family", "general", "error_line")  # searched after the others, in this order
_FACTS = "log_facts.yaml"
_MAX_BYTES = 2**20


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


@cache
def _loaded() -> tuple[tuple[Signature, ...], tuple[str, ...]]:
    """All signatures in the order of their roles, and the errors of the files of the site.

    A row of the site with the ID of a shipped signature replaces the fields that it has. A wrong row is left out.
    """
    shipped = {row["id"]: row for row in _shipped_rows()}
    site: dict[str, tuple[Signature, str]] = {}  # ID → signature, file and number of its row
    errors: list[str] = []
    for path in _site_files(errors):
        try:
            rows = _read(path)
        except UsageError as error:
            errors.append(str(error))
            continue
        for place, row in ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1)):
            try:
                signature = _site_signature(row, shipped, place)
                if signature.id in site:
                    raise UsageError(f"{place} ({signature.id}): the same id is in {site[signature.id][1]}")
                site[signature.id] = signature, place
            except UsageError as error:
                errors.append(str(error))
    unchanged = (Signature.model_validate(row) for name, row in shipped.items() if name not in site)
    order = {role: number for number, role in enumerate(LAST_ROLES, 1)}
    found = [*unchanged, *(signature for signature, _ in site.values())]
    return tuple(sorted(found, key=lambda each: order.get(each.role, 0))), tuple(errors)


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


def _site_files(errors: list[str]) -> list[Path]:
    """The YAML files of the site, sorted by name; none if there is no folder, or one that adds to ``errors``."""
    value = os.environ.get(VARIABLE)
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    folder = Path(value) if value else Path(config) / "seatrial" / "signatures"
    if value and not folder.is_dir():
        errors.append(f"{VARIABLE}={value}: this is not a directory; name a directory with *.yaml files, or unset it")
    try:
        return sorted(folder.glob("*.yaml"))
    except OSError as error:
        errors.append(f"cannot read {folder}: {error.strerror or error}")
        return []


def _read(path: Path) -> list[Any]:
    """The rows of a file. Raises UsageError."""
    try:
        text = path.read_bytes()[: _MAX_BYTES + 1]
        if len(text) > _MAX_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_BYTES} bytes; split it into several files")
        content = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if content is not None and not isinstance(content, list):
        raise UsageError(f"{path}: expected a list of signatures (- id: ...), found {type(content).__name__}")
    return content or []


def _site_signature(row: Any, shipped: Mapping[str, Row], place: str) -> Signature:
    """The signature of a row, which matches its own examples. Raises UsageError."""
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise UsageError(f"{place}: expected a mapping with an id such as site.storage_down")
    place = f"{place} ({row['id']})"
    try:
        signature = Signature.model_validate({**shipped.get(row["id"], {}), **row})
    except ValidationError as error:
        first_error = error.errors()[0]
        field = ".".join(str(part) for part in first_error["loc"])
        raise UsageError(f"{place}: {field}: {first_error['msg'].lower()}") from error
    try:
        fault = _fault(signature)
    except re.error as error:
        fault = f"pattern {signature.pattern!r} is not a regular expression: {error}"
    if fault:
        raise UsageError(f"{place}: {fault}")
    return signature


def _fault(signature: Signature) -> str:
    """Why the signature cannot be used; empty if it can. Raises re.error for an invalid pattern."""
    if signature.nested_repeat():
        return (
            f"pattern {signature.pattern!r} repeats a repetition, which can take hours; give one a limit, as {{1,100}}"
        )
    if signature.matches(""):
        return f"pattern {signature.pattern!r} matches every line"
    if reason := unsupported(signature):
        return f"pattern {signature.pattern!r} is not supported by the search of logs: {reason}"
    if missed := next((text for text in signature.examples if not signature.matches(text)), None):
        return f"the pattern does not match the example {missed!r}"
    if matched := next((text for text in signature.counter_examples if signature.matches(text)), None):
        return f"the pattern matches the counter-example {matched!r}"
    return ""
