"""YAML of users: PyYAML's safe loader, without what a config does not need and what would harm us."""

from __future__ import annotations

from typing import Any

import yaml

from seatrial.model import UsageError

MOST_LEVELS = 32  # of nesting; a trial needs five


def parse_yaml(text: str, source: str) -> Any:
    """The value that ``text`` holds. Raises UsageError, naming ``source``."""
    try:
        return yaml.load(text, Loader=StrictLoader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: an impossible date or number
        raise UsageError(f"{source}: not valid YAML: {error}") from error


class StrictLoader(yaml.SafeLoader):
    """Refuses a duplicate key (the first would silently go), a key that is not text, an anchor or alias (a few of them
    make a billion nodes, or a circle), and nesting beyond MOST_LEVELS.
    """

    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise yaml.composer.ComposerError(
                None, None, f"anchors and aliases are not read here (got {event.anchor!r})", event.start_mark
            )
        self._level += 1
        if self._level > MOST_LEVELS:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MOST_LEVELS} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is no text", key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
