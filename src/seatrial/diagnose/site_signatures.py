"""Signatures of a site: rows in a folder of the site that add to the shipped signatures, or change them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from seatrial.diagnose.patterns import unsupported
from seatrial.diagnose.signature import Row, Signature
from seatrial.model import UsageError

VARIABLE = "SEATRIAL_SIGNATURES"
_MAX_BYTES = 2**20


def with_site_rows(shipped: Mapping[str, Row]) -> tuple[list[Signature], list[str]]:
    """The shipped signatures (ID → row) with the changes and additions of the site, and the errors of its files.

    A row with the ID of a shipped signature replaces the fields that it has. A wrong row is left out.
    """
    rows = dict(shipped)
    site: dict[str, Signature] = {}  # ID → signature
    places: dict[str, str] = {}  # ID → file and number of its row
    errors: list[str] = []
    for place, row in _rows(errors):
        try:
            signature = _signature(row, shipped, place)
            if signature.id in site:
                raise UsageError(f"{place} ({signature.id}): the same id is in {places[signature.id]}")
        except UsageError as error:
            errors.append(str(error))
        else:
            site[signature.id], places[signature.id] = signature, place
            rows.pop(signature.id, None)
    unchanged = [Signature.model_validate(row) for row in rows.values()]
    return [*unchanged, *site.values()], errors


def _rows(errors: list[str]) -> Iterator[tuple[str, Any]]:
    """File and number of each row with the row; adds a sentence to ``errors`` for a file that cannot be read."""
    for path in _files(errors):
        try:
            for number, row in enumerate(_read(path), 1):
                yield f"{path}, row {number}", row
        except UsageError as error:
            errors.append(str(error))


def _files(errors: list[str]) -> list[Path]:
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


def _read(path: Path) -> Iterator[Any]:
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
    yield from content or ()


def _signature(row: Any, shipped: Mapping[str, Row], place: str) -> Signature:
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
