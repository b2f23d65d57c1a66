"""A failure signature: the pattern of a log line, its cause and its fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

from pydantic import Field

from seatrial.diagnose.errnos import has_speaker
from seatrial.diagnose.status_rules import Rule, fault
from seatrial.model import Finding, Frozen
from seatrial.model.trial import Action, Confidence
from seatrial.util.secrets import REDACTED, redacted, secret_values

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
MAX_QUOTE = 300  # characters of a line in the evidence
_SLURM_COMMAND = re.compile(r"\b(?:scontrol|sinfo|squeue|sacct|sacctmgr|srun|slurmd)\b")
_COMMAND_PART = re.compile(r"""(?:[^;"']|"[^"]*"|'[^']*'|;(?! ))+""")  # up to a "; " outside of quotes
_VALUE = re.compile(r"\{([a-z_]+)\}")  # the name of a value in a template
_OPTIONAL = re.compile(r"\[([^\[\]]*\{[a-z_]+\}[^\[\]]*)\]")  # a part of a template whose value may be unknown


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

    def values(self, line: str, above: Callable[[], Sequence[str]] = list) -> dict[str, str] | None:
        """Name of each group → its value in ``line``, which may be empty; None if the line is not of this kind.

        Then the groups of the header, from the closest line ``above`` that has one, the values of the rule, and the
        path and option in ``line``. Digits at the end of a group's name are removed, since a pattern cannot use a name
        twice.
        """
        match = self._regex.search(line[:MAX_LINE])
        if match is None or (self.errno and has_speaker(line)):
            return None
        headers = map(self._header.search, reversed(above())) if self.header else iter(())
        values: dict[str, str] = {}
        for each in filter(None, (match, next(filter(None, headers), None))):
            for group, value in each.groupdict().items():
                name = group.rstrip("0123456789")
                values[name] = values.get(name) or value or ""
        if self.rule:
            named = fault(self.rule, values, [*above(), *line.splitlines()])
            if named is None:
                return None
            values |= named
        for name, pattern in (("path", _PATH), ("option", _OPTION)):
            if not values.get(name) and (found := pattern.search(line[:MAX_LINE])):
                values[name] = next(filter(None, found.groups()))
        return values

    def matches(self, line: str) -> bool:
        """Whether ``line`` is of this kind."""
        return self.values(line) is not None

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
        """The title with ``values``; those that neither title, command nor place have come after it."""
        used = f"{self.title} {self.first_command} {self.fix}"
        groups = {group.rstrip("0123456789") for group in self._regex.groupindex} - _PLACES.keys()
        others = (name for name in sorted(groups) if values.get(name) and f"{{{name}}}" not in used)
        more = ", ".join(f"{name} {values[name][:_MAX_VALUE]}" for name in others)
        return filled(self.title, values) + (f" ({more})" if more else "")

    def command(self, values: Mapping[str, str], *, has_slurm: bool = True) -> str:
        """The first command with ``values``, without the parts that need a value which is unknown.

        The values are quoted for a shell, and one that begins with "-" counts as unknown: a user may paste the command,
        and anybody may write a line of a log. ``has_slurm``: with parts that are commands of Slurm.
        """
        known = {name: value for name, value in values.items() if not value.startswith("-")}
        parts = (part.strip() for part in _COMMAND_PART.findall(self.first_command) if _has_values(part, known))
        kept = (part for part in parts if has_slurm or not _SLURM_COMMAND.search(part))
        return filled("; ".join(kept), known, shlex.quote)


class Match(Frozen):
    """A signature that occurs in a text, with the matching line.

    ``values``: of the named groups. ``time``: Unix seconds, None if unknown. ``raised_in``: the library of the deepest
    frame of the traceback above the line.
    """

    signature: Signature
    line: str
    source: str
    values: dict[str, str] = {}
    time: float | None = None
    raised_in: str = ""

    @property
    def place(self) -> str:
        """The device, node or pod that the line names; empty if it names none."""
        return place_of(self.values)

    @property
    def log(self) -> str:
        """The name of the log."""
        return self.source.rpartition(":")[0]

    @property
    def confidence(self) -> Confidence:
        """Low for a kind of error, a consequence or a failed step: the line says more than the title."""
        is_kind = self.signature.role in ("family", "general", "cascade", "step")
        return "low" if is_kind else self.signature.confidence

    @cached_property
    def shown_line(self) -> str:
        """The line without secrets; replaced before a quotation is cut, since half a secret has no form."""
        return str(redacted(self.line, secret_values()))

    def finding(self, subject: str, confidence: Confidence, *, has_slurm: bool = True) -> Finding:
        """The finding at ``subject``; without commands of Slurm if the system of the log has none (``has_slurm``)."""
        signature, shown = self.signature, self.shown_line
        values = {
            name: REDACTED if value in self.line and value not in shown else value
            for name, value in self.values.items()
        }
        title, command = signature.titled(values), signature.command(values, has_slurm=has_slurm)
        return Finding(
            title=f"{title} in {self.raised_in}" if self.raised_in else title,
            subject=subject,
            confidence=confidence,
            evidence=f"{signature.cause} Log line: {shown[:MAX_QUOTE]}",
            first_command=command,
            fix=filled(signature.fix, values, shlex.quote),
            action=signature.action,
            source=self.source,
            signature=signature.id,
        )


def filled(template: str, values: Mapping[str, str], quoted: Callable[[str], str] = str) -> str:
    """``template`` with the known ``values`` in place of their names; without its optional parts that need others."""

    def known_part(part: re.Match[str]) -> str:
        return part[1] if _has_values(part[1], values) else ""

    def value(name: re.Match[str]) -> str:
        return quoted(values[name[1]]) if values.get(name[1]) else name[0]

    return _VALUE.sub(value, _OPTIONAL.sub(known_part, template))


def _has_values(template: str, values: Mapping[str, str]) -> bool:
    """Whether all values that ``template`` names are known."""
    return all(values.get(name) for name in _VALUE.findall(template))


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
