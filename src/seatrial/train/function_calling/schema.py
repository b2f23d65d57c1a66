"""Validation of a call's arguments against the JSON Schema of the function's parameters."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def is_object_schema(parameters: dict[str, Any]) -> bool:
    """Whether ``parameters`` is a JSON Schema of an object."""
    try:
        is_schema = _validator(json.dumps(parameters)) is not None
    except RecursionError:
        return False
    return is_schema and parameters.get("type") == "object" and isinstance(parameters.get("properties", {}), dict)


def matches_schema(arguments: object, parameters: dict[str, Any]) -> bool:
    """Whether ``arguments`` match the valid schema ``parameters`` and contain only declared properties."""
    if not isinstance(arguments, dict) or not set(arguments) <= set(parameters.get("properties", {})):
        return False
    from referencing.exceptions import Unresolvable

    try:
        return bool(_validator(json.dumps(parameters)).is_valid(arguments))
    except (Unresolvable, RecursionError):
        return False


@lru_cache(maxsize=4096)  # many rows have the same functions; without a cache this took most of the preprocessing time
def _validator(json_text: str) -> Any:
    """The validator of a JSON Schema; None if it is no valid schema. Raises RecursionError."""
    from jsonschema import Draft202012Validator  # other workloads do not need it
    from jsonschema.exceptions import SchemaError
    from referencing import Registry

    schema = json.loads(json_text)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        return None
    # with an empty registry, jsonschema does not download a remote "$ref"; by default it does
    return Draft202012Validator(schema, registry=Registry())
