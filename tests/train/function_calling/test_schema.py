from __future__ import annotations

from typing import Any

import pytest

from seatrial.train.function_calling.schema import NO_PARAMETERS, is_object_schema, matches_schema

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("parameters", [CITY, NO_PARAMETERS, {"type": "object"}])
def test_a_schema_of_an_object_is_valid(parameters: dict[str, Any]) -> None:
    assert is_object_schema(parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "string"},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": {"type": "strng"}}},
        deep(100_000),
    ],
)
def test_anything_else_is_not(parameters: dict[str, Any]) -> None:
    assert not is_object_schema(parameters)


@pytest.mark.parametrize(
    ("arguments", "fit"),
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
def test_arguments_fit_what_is_declared_and_required(arguments: object, fit: bool) -> None:
    assert matches_schema(arguments, CITY) is fit


def test_nothing_is_fetched_for_a_schema() -> None:
    remote = {"type": "object", "properties": {"a": {"$ref": "https://192.0.2.1/schema.json"}}}
    assert not matches_schema({"a": 1}, remote)
