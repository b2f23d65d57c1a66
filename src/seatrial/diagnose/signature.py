"""A failure signature: the pattern of a log line, its cause and its fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

from pydantic import Field

from seatrial.diagnose.errnos import has_speaker
from seatrial.diagnose.status_rules import Rule, fault
from seatrial.model import Frozen
from seatrial.model.trial import Action

Row = dict[str, Any]  # the fields of a signature, as they are in a file
# Patterns are applied to this many bytes of a line, since logs may contain lines of any length
MAX_LINE = 4096
Role = Literal[
    "root", "family", "step", "general", "cascade", "confirmation", "advice", "fact", "recovery", "error_line"
]
# Group of a pattern → the word before its value where a place is named
_PLACES = {"pod": "pod ", "node": "node ", "host": "host ", "hca": "", "nic": "", "gpu": "GPU ", "bdf": "PCI "}
# A path in quotes, before the text of an error, or at the end of a line
_PATH = re.compile(
    r"[\"'`](/[^\"'`\s:]{1,250})[\"'`]|(?:^|[\s:])(/[\w.@%+=~/-]{2,250}): (?=[A-Z])|: (/[\w.@%+=~/-]{2,250})\s{0,3}$",
    re.ASCII,
)
# A setting or name in the message of an error: in quotes, an option of a command line, or with an underscore
_OPTION = re.compile(
    r"(?:[Ee]rror|Exception|fatal)(?:\(\w{1,60}\))?: .{0,400}?(?:[`'\"](\w[\w.-]{2,60})[`'\"]"
    r"|(?<![\w/.])(--[a-z][\w-]{2,60}|[a-z]\w{0,30}_\w{2,60})(?![\w(/:-]|\.\w))",
    re.ASCII,
)
_MAX_VALUE = 80  # characters of a value in a title
_OPTIONAL = re.compile(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]")  # a part of a title with a value that may be unknown


class Signature(Frozen):
    """One kind of failure.

    Role ``root``: a cause. ``family``: a reason that any program can print, such as an errno text, with its object;
    reported if the log has no root. ``step``: a step that failed, such as the mount of a volume, without the reason;
    reported after the roots or, in a log without a root, after the families. ``general``: the last line of any Python
    error or crash, reported if the log has none of them and no other signature matches the line. ``cascade``: a
    consequence of another failure, reported if the log has none of the others. ``confirmation``: evidence of a failure
    that other lines name. ``advice``: text that a program prints with many failures. ``fact``: what a log tells about
    its world, for ``requires``. ``recovery``: the end of a wait or retry that went well; the failures before it that
    ``confirms`` names are none. ``error_line``: looks like an error. The last five are never reported alone.

    ``confirms``: patterns of the signatures that a confirmation supports or a recovery ends; by default those of its
    component, the part of the id before the dot. ``requires``: ids of facts that the log must have; "not ID": must not
    have. ``header``: pattern of the title of a block, such as ``CA 'mlx5_0'``, whose values belong to the lines below.
    ``rule``: the rule of discover that must find a fault in the values of the line and the lines above it.
    ``confidence`` low: the title says what failed, and the line why.
    ``errno``: the pattern is the text of an errno; it does not match what errnos.yaml knows by its speaker. The title
    and the command have values of groups, such as ``{host}``; ``[ of {host}]`` in a title is left out without a value.
    """

    id: str
    title: str
    pattern: str
    role: Role = "root"
    confirms: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    header: str = ""
    rule: Rule | None = None
    confidence: Literal["low", "medium"] = "medium"
    errno: bool = False
    cause: str
    first_command: str
    fix: str
    action: Action
    source: str
    examples: tuple[str, ...] = Field(min_length=1)
    counter_examples: tuple[str, ...] = Field(min_length=1)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE | re.ASCII)

    @cached_property
    def _header(self) -> re.Pattern[str]:
        return re.compile(self.header, re.ASCII)

    def matches(self, line: str, above: Sequence[str] = ()) -> bool:
        """Whether the pattern occurs in ``line``, and the rule finds a fault there and in the lines ``above``."""
        match = self._regex.search(line[:MAX_LINE])
        if match is None or (self.errno and has_speaker(line)):
            return False
        return self.rule is None or fault(self.rule, match.groupdict(), [*above, *line.splitlines()]) is not None

    def span(self, line: str) -> tuple[int, int] | None:
        """Begin and end of the first match of the pattern in ``line``; None if there is none."""
        match = self._regex.search(line[:MAX_LINE])
        return match.span() if match else None

    def confirms_signature(self, identifier: str) -> bool:
        """Whether this confirmation supports the signature with this id."""
        patterns = self.confirms or (f"{self.id.partition('.')[0]}.*",)
        return any(fnmatchcase(identifier, pattern) for pattern in patterns)

    def nested_repeat(self) -> bool:
        """Whether an unbounded repetition contains another one, such as ``(a+)+``, whose search can take hours."""
        parser: Any = import_module("re._parser")
        return _has_nested_repeat(parser.parse(self.pattern), parser.MAXREPEAT, repeated=False)

    def fits(self, facts: Collection[str]) -> bool:
        """Whether a log with these facts has what the signature requires."""
        return all((each.removeprefix("not ") in facts) is not each.startswith("not ") for each in self.requires)

    @property
    def name(self) -> str:
        """The title without values of a line."""
        return _OPTIONAL.sub("", self.title)

    def titled(self, values: Mapping[str, str]) -> str:
        """The title with ``values``; an optional part is left out if one of its values is unknown.

        Values that neither title, command nor place have come after it.
        """
        used = f"{self.title} {self.first_command} {self.fix}"
        groups = {group.rstrip("0123456789") for group in self._regex.groupindex}
        others = [name for name in groups - _PLACES.keys() if values.get(name) and f"{{{name}}}" not in used]

        def with_values(part: re.Match[str]) -> str:
            return "" if any(not values.get(name) for name in re.findall(r"\{(\w+)\}", part[1])) else part[1]

        title = _OPTIONAL.sub(with_values, self.title)
        title = re.sub(r"\{(\w+)\}", lambda name: values.get(name[1]) or name[0], title)
        more = ", ".join(f"{name} {values[name][:_MAX_VALUE]}" for name in sorted(others))
        return f"{title} ({more})" if more else title

    def command(self, values: Mapping[str, str]) -> str:
        """The first command with ``values``, without the parts that need a value which is unknown."""
        groups = {"path": 0, "option": 0, **self._regex.groupindex, **self._header.groupindex}
        missing = [name for group in groups if not values.get(name := group.rstrip("0123456789"))]
        parts = self.first_command.split("; ")
        kept = [part for part in parts if not any(f"{{{name}}}" in part for name in missing)]
        return self.filled("; ".join(kept or parts), {"path": ".", **values})

    def filled(self, text: str, values: Mapping[str, str]) -> str:
        """``text`` with the named groups of the pattern, such as ``{gpu}``, replaced by their values.

        The values are quoted for a shell, since a user may paste the command and anybody may write a line of a log.
        """
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", shlex.quote(value))
        return text

    def values(self, line: str, above: Sequence[str] = ()) -> dict[str, str]:
        """Name of each group → its value in ``line``, which may be empty; {} if there is no match.

        Also the groups of the header, from the closest line ``above`` that has one, the values of the rule, and the
        path and option in ``line``. Digits at the end of a group's name are removed, since a pattern cannot use a name
        twice.
        """
        match = self._regex.search(line[:MAX_LINE])
        header = next(filter(None, map(self._header.search, reversed(above))), None) if self.header else None
        values: dict[str, str] = {}
        for group, value in (pair for each in (header, match) if each for pair in each.groupdict().items()):
            name = group.rstrip("0123456789")
            values[name] = values.get(name) or value or ""
        if self.rule and match:
            values |= fault(self.rule, values, [*above, *line.splitlines()]) or {}
        for name, pattern in (("path", _PATH), ("option", _OPTION)):
            found = pattern.search(line[:MAX_LINE]) if match and not values.get(name) else None
            values |= {name: next(filter(None, found.groups()))} if found else {}
        return values


def place_of(values: Mapping[str, str]) -> str:
    """The device, node or pod that the values of a line name; empty if they name none."""
    return ", ".join(f"{word}{values[name]}" for name, word in _PLACES.items() if values.get(name))


def _has_nested_repeat(node: Any, unbounded: Any, *, repeated: bool) -> bool:
    """Whether a parsed pattern has an unbounded repetition within another one; ``repeated``: the node is within one."""
    items = getattr(node, "data", node)  # of a SubPattern, which is a list of operations
    if not isinstance(items, list | tuple):
        return False
    repeats = len(items) == 3 and items[1] is unbounded  # (minimum, maximum, SubPattern)
    if repeats and repeated:
        return True
    return any(_has_nested_repeat(item, unbounded, repeated=repeated or repeats) for item in items)
