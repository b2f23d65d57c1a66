"""JSON Schema, as much of it as ours uses: a keyword that this does not know is an error, never passed over."""

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
_SILENT = {"title", "description", "default", "$defs", "maxItems", "minItems", "propertyNames"}
_KNOWN = {
    *("type", "properties", "required", "additionalProperties", "items", "anyOf", "$ref", "enum", "const"),
    *("exclusiveMinimum", "minLength"),
    *_SILENT,
}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], where: str = "") -> list[str]:
    """Every place where ``value`` breaks ``schema``; ``root`` holds the definitions that it refers to."""
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    if "$ref" in schema:
        return faults(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, where)
    found = []
    if "anyOf" in schema and all(faults(value, one, root, where) for one in schema["anyOf"]):
        found.append(f"{where}: none of anyOf")
    wanted = _TYPES.get(schema.get("type", ""), (object,))
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted in (_TYPES["integer"], _TYPES["number"])):
        return [f"{where}: {value!r:.40} is no {schema['type']}"]
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        found.append(f"{where}: {value!r:.40} is not allowed")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        found.append(f"{where}: {value} is not above {schema['exclusiveMinimum']}")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        found.append(f"{where}: {value!r} is too short")
    if isinstance(value, dict):
        found += _object_faults(value, schema, root, where)
    if isinstance(value, list) and "items" in schema:
        found += [
            fault for n, item in enumerate(value) for fault in faults(item, schema["items"], root, f"{where}/{n}")
        ]
    return found


def _object_faults(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], where: str) -> list[str]:
    found = [f"{where}/{key}: missing" for key in schema.get("required", ()) if key not in value]
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for key, item in value.items():
        if key in known:
            found += faults(item, known[key], root, f"{where}/{key}")
        elif others is False:
            found.append(f"{where}/{key}: not declared")
        elif isinstance(others, dict):
            found += faults(item, others, root, f"{where}/{key}")
    return found
