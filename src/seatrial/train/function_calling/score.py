"""Is an answer the right call? By the rules of the Berkeley Function-Calling Leaderboard's AST checker.

bfcl_eval/eval_checker/ast_eval/ast_checker.py of gorilla: as many calls as expected, each expected one matched by
another answer in any order; the exact name; all required parameters, none that is not declared; the right types; the
right values, strings compared without case, spaces and ``,./-_*^``. Where nothing is to be called, nothing may be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.train.function_calling.schema import matches_schema

Schemas = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of one answer. None where the question does not arise, such as the arguments of a call that is not expected."""

    expected: int  # calls
    emitted: int  # calls that can be read or not
    json_valid: bool | None  # every emitted call is a JSON object with a name and an object of arguments
    schema_valid: bool | None  # … of a function that was offered, and its arguments fit
    function_name_correct: bool | None  # the names called are the names expected
    arguments_correct: bool | None  # … and so are the arguments of each
    call_correct: bool  # all of it, or rightly nothing

    @property
    def over_call(self) -> bool:
        return self.emitted > self.expected

    @property
    def under_call(self) -> bool:
        return self.emitted < self.expected


_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse_calls(text: str) -> list[Call | None]:
    """The calls in a model's answer, in order; None for one that cannot be read, among them one that is cut off."""
    return [_read(match) for match in _BLOCK.finditer(text)]


def _read(match: re.Match[str]) -> Call | None:
    if not match.group(0).endswith("</tool_call>"):
        return None
    try:
        found = json.loads(match.group(1))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or set(found) != {"name", "arguments"}:
        return None
    name, arguments = found["name"], found["arguments"]
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def expected_calls(message: Mapping[str, Any]) -> list[Call]:
    """The calls of an assistant's message."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [Call(function["name"], function["arguments"]) for function in functions]


def score(text: str, expected: Sequence[Call], schemas: Schemas) -> Score:
    """Score a model's answer. ``schemas``: the parameters of each function on offer."""
    emitted = parse_calls(text)
    calls = [call for call in emitted if call]
    readable = len(calls) == len(emitted)
    names = readable and sorted(call.name for call in calls) == sorted(call.name for call in expected)
    matched = names and _all_match(calls, expected, schemas)
    return Score(
        expected=len(expected),
        emitted=len(emitted),
        json_valid=readable if emitted else None,
        schema_valid=readable and all(_fits(call, schemas) for call in calls) if emitted else None,
        function_name_correct=names if expected else None,
        arguments_correct=matched if expected else None,
        call_correct=matched if expected else not emitted,
    )


def _all_match(calls: Iterable[Call], expected: Sequence[Call], schemas: Schemas) -> bool:
    """Whether each expected call has an answer of its own, in whatever order."""
    left = list(calls)
    for wanted in expected:
        match = next((call for call in left if _matches(call, wanted, schemas)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _matches(call: Call, wanted: Call, schemas: Schemas) -> bool:
    return (
        call.name == wanted.name
        and _fits(call, schemas)
        and set(call.arguments) == set(wanted.arguments)
        and all(equal_values(call.arguments[name], value) for name, value in wanted.arguments.items())
    )


def _fits(call: Call, schemas: Schemas) -> bool:
    return call.name in schemas and matches_schema(call.arguments, schemas[call.name])


_IGNORED = re.compile(r"[ ,./\-_*^]")


def equal_values(value: object, wanted: object) -> bool:
    """Equal values of JSON; strings as BFCL normalises them, true is not 1, and 1 is 1.0."""
    if isinstance(value, str) and isinstance(wanted, str):
        return _normal(value) == _normal(wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(equal_values, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return set(value) == set(wanted) and all(equal_values(value[key], wanted[key]) for key in wanted)
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


def _normal(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


def summary(scores: Iterable[Score]) -> dict[str, dict[str, int]]:
    """How many of how many: ``{"full": {"count": 8, "of": 10}, …}``. Irrelevance: rightly called nothing."""
    every = list(scores)
    calls = [score for score in every if score.expected]
    none = [score for score in every if not score.expected]
    questions: dict[str, list[bool | None]] = {
        "full": [score.call_correct for score in every],
        "calls_full": [score.call_correct for score in calls],
        "irrelevance": [score.call_correct for score in none],
        "json_valid": [score.json_valid for score in every],
        "schema_valid": [score.schema_valid for score in every],
        "names": [score.function_name_correct for score in calls],
        "arguments": [score.arguments_correct for score in calls],
        "parallel_full": [score.call_correct for score in calls if score.expected > 1],
        "over_call": [score.over_call for score in every],
        "under_call": [score.under_call for score in every],
    }
    asked = {name: [answer for answer in answers if answer is not None] for name, answers in questions.items()}
    return {name: {"count": sum(answers), "of": len(answers)} for name, answers in asked.items()}


_ASKED = {
    "full": "fully right",
    "calls_full": "fully right where there was something to call",
    "irrelevance": "nothing called where there was nothing to",
    "json_valid": "calls in valid JSON",
    "schema_valid": "calls valid by their schema",
    "names": "right functions",
    "arguments": "right arguments",
    "parallel_full": "several calls at once, fully right",
    "over_call": "called more than was expected",
    "under_call": "called less than was expected",
}


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """What evaluation.json says, for a person: what was asked, and how many of how many each model was right in."""
    cases = record["cases"]
    asked = f"{sum(cases.values())} cases ({', '.join(f'{count} {split}' for split, count in cases.items())})"
    yield f"{asked:48}  {'base':>11}  {'tuned':>11}"
    for name, words in _ASKED.items():
        base, tuned = (_of_all(record[model], name) for model in ("base", "tuned"))
        yield f"{words:48}  {base:>11}  {tuned:>11}"
    gate = record["gate"]
    better = "better by more than chance" if gate["passed"] else "not better by more than chance"
    yield (
        f"After the training {better}: {gate['full_base']:.0%} of cases fully right before, {gate['full_tuned']:.0%} "
        f"after; {gate['won']} won, {gate['lost']} lost, p {gate['p_value']:.3g} (asked: < {gate['significance']:g})"
    )


def _of_all(splits: Mapping[str, Any], name: str) -> str:
    """Of all splits together."""
    count, of = (sum(split[name][key] for split in splits.values()) for key in ("count", "of"))
    return f"{count} of {of}" if of else "none"
