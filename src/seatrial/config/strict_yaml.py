"""Parses YAML of users: PyYAML's safe loader without anchors, duplicate keys and deep nesting."""

from __future__ import annotations

from typing import Any

import yaml

from seatrial.model import UsageError

MAX_LEVELS = 32  # of nested mappings and lists; a trial needs five


def parse_yaml(text: str, source: str) -> Any:
    """Parse ``text``. Raises UsageError for text that is not valid; ``source``: name of the text for the message."""
    try:
        return yaml.load(text, Loader=StrictLoader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: an impossible date or number
        raise UsageError(f"{source}: not valid YAML: {error_text(error)}") from error


def error_text(error: Exception) -> str:
    """Return line, column and problem of an error of PyYAML; the text of any other error."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position + 1} is {chr(error.character)!r}: {error.reason}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    mark = error.problem_mark
    problem = str(error.problem).partition(" '!")[0]  # a value that begins with ! is a tag, and may be a secret
    text = f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    if error.context and error.context_mark:
        text += f" ({error.context}, line {error.context_mark.line + 1})"
    return f"{text}; indent with spaces instead of tabs" if "'\\t'" in str(error.problem) else text


class StrictLoader(yaml.SafeLoader):
    """Rejects duplicate keys (PyYAML keeps the last value), keys that are not strings, nesting beyond MAX_LEVELS, and
    anchors and aliases (a few of them can expand to a billion nodes, or to a cycle).
    """

    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            problem = "anchors and aliases are not supported: quote a value that begins with & or *"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self._level += 1
        if self._level > MAX_LEVELS:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_LEVELS} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, _key_problem(key), key.start_mark)
            if key.value in lines:
                problem = f"duplicate key {key.value!r}, also in line {lines[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _key_problem(key: yaml.Node) -> str:
    """Return why this key is not supported, and what to write instead."""
    if not isinstance(key, yaml.ScalarNode):
        return "a list or mapping cannot be a key"
    if key.tag == "tag:yaml.org,2002:merge":
        return f"merge key {key.value!r} is not supported: write the keys out"
    return f"key {key.value!r} is not a string in YAML 1.1 (nor are on, off, yes, no, null and numbers): quote it"
