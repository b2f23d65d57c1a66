"""A validator of the JSON Schema keywords that the schema of trial.json uses; any other keyword is an error."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOT_CHECKED = {"title", "description", "default", "$defs", "maxItems", "minItems", "propertyNames"}
_KNOWN = {
    *("type", "properties", "required", "additionalProperties", "items", "anyOf", "$ref", "enum", "const"),
    *("exclusiveMinimum", "minimum", "maximum", "minLength"),
    *_NOT_CHECKED,
}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], where: str = "") -> list[str]:
    """The violations of ``schema`` by ``value``, each with its place; ``root``: the schema with the definitions."""
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    if "$ref" in schema:
        return faults(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, where)
    violations = []
    if "anyOf" in schema and all(faults(value, option, root, where) for option in schema["anyOf"]):
        violations.append(f"{where}: none of anyOf")
    types = _TYPES.get(schema.get("type", ""), (object,))
    if not isinstance(value, types) or (isinstance(value, bool) and types in (_TYPES["integer"], _TYPES["number"])):
        return [f"{where}: {value!r:.40} is no {schema['type']}"]
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        violations.append(f"{where}: {value!r:.40} is not allowed")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        violations.append(f"{where}: {value} is not above {schema['exclusiveMinimum']}")
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        violations.append(f"{where}: {value} is out of range")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        violations.append(f"{where}: {value!r} is too short")
    if isinstance(value, dict):
        violations += _object_faults(value, schema, root, where)
    if isinstance(value, list) and "items" in schema:
        violations += [
            fault for n, item in enumerate(value) for fault in faults(item, schema["items"], root, f"{where}/{n}")
        ]
    return violations


def _object_faults(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], where: str) -> list[str]:
    violations = [f"{where}/{key}: missing" for key in schema.get("required", ()) if key not in value]
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for key, item in value.items():
        if key in known:
            violations += faults(item, known[key], root, f"{where}/{key}")
        elif others is False:
            violations.append(f"{where}/{key}: not declared")
        elif isinstance(others, dict):
            violations += faults(item, others, root, f"{where}/{key}")
    return violations
