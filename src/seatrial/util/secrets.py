"""Finds secrets in settings, by the name of a variable or by the form of a value, and replaces them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

REDACTED = "REDACTED"
PRIVATE = 0o600  # mode of the files from which the job reads its secrets

_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|(?:^|_)(?:KEY|PAT)$|_AUTH$", re.IGNORECASE)
_MIN_CHARACTERS = 6  # a shorter value can occur in other text by chance, so it is replaced only in its own variable
# Sources: documentation of Hugging Face, GitHub, AWS, GitLab, Slack, OpenAI, and RFC 7519 (JWT)
_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{16,}|sk-[\w-]{20,}|eyJ[\w-]{4,}\.eyJ[\w-]{4,}\.[\w-]*)"
    r"|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"  # user:password of a URL
)
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)


def secret_values(document: Any) -> set[str]:
    """Return the values of secret variables in a document, without those shorter than _MIN_CHARACTERS.

    Variables are in mappings with the key ``env``, at any depth.
    """
    return {value for name, value in _variables(document) if _NAME.search(name) and len(value) >= _MIN_CHARACTERS}


def redacted(document: Any, values: Collection[str] = ()) -> Any:
    """Return a JSON document, or a text, in which REDACTED replaces secrets.

    Secrets are values of variables with a secret name, values with the form of a secret, and ``values``. An argument
    ``NAME=VALUE`` counts as a variable. Tuples stay tuples.
    """
    if isinstance(document, str):
        return _redacted_text(document, values)
    if isinstance(document, Mapping):
        return {
            key: _redacted_variables(value, values) if key == "env" else redacted(value, values)
            for key, value in document.items()
        }
    if isinstance(document, list | tuple):
        return type(document)(redacted(item, values) for item in document)
    return document


def _redacted_text(text: str, values: Collection[str]) -> str:
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment and _NAME.search(assignment["name"].rpartition(".")[2]) and assignment["value"]:
        return f"{assignment['name']}={REDACTED}"
    for value in values:
        text = text.replace(value, REDACTED)
    return _VALUE.sub(REDACTED, text)


def _redacted_variables(variables: Any, values: Collection[str]) -> Any:
    if not isinstance(variables, Mapping):
        return redacted(variables, values)
    return {
        name: REDACTED if isinstance(value, str) and value and _NAME.search(name) else redacted(value, values)
        for name, value in variables.items()
    }


def _variables(document: Any) -> Iterator[tuple[str, str]]:
    """Yield name and value of each variable in a mapping of key ``env``."""
    items = document.items() if isinstance(document, Mapping) else enumerate(document)
    for key, value in items:
        if key == "env" and isinstance(value, Mapping):
            yield from ((name, text) for name, text in value.items() if isinstance(text, str))
        elif isinstance(value, Mapping | list | tuple):
            yield from _variables(value)
