from __future__ import annotations

from typing import Any

import pytest

from seatrial.train.function_calling.schema import NO_PARAMETERS, is_object_schema, matches_schema

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("parameters", [CITY, NO_PARAMETERS, {"type": "object"}])
def test_valid_object_schema(parameters: dict[str, Any]) -> None:
    assert is_object_schema(parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "string"},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": {"type": "strng"}}},
        nested_schema(100_000),
    ],
)
def test_invalid_object_schema(parameters: dict[str, Any]) -> None:
    assert not is_object_schema(parameters)


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        ({"city": "Oslo"}, True),
        ({"city": "Oslo", "days": 3}, True),
        ({"days": 3}, False),
        ({"city": 5}, False),
        ({"city": "Oslo", "days": 0}, False),
        ({"city": "Oslo", "country": "Norway"}, False),  # not declared
        (["Oslo"], False),
        (None, False),
    ],
)
def test_arguments_match_declared_and_required_properties(arguments: object, valid: bool) -> None:
    assert matches_schema(arguments, CITY) is valid


def test_remote_schema_is_not_downloaded() -> None:
    remote = {"type": "object", "properties": {"a": {"$ref": "https://192.0.2.1/schema.json"}}}
    assert not matches_schema({"a": 1}, remote)
