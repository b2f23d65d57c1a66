"""Scores answers by the rules of the AST checker of the Berkeley Function-Calling Leaderboard.

Source: bfcl_eval/eval_checker/ast_eval/ast_checker.py of gorilla. An answer is correct if its calls match the expected
calls one to one, in any order. Two calls match if they have the same name, the same parameters and equal values, and
the arguments match the JSON Schema of the function. Strings are compared without case, spaces and ``,./-_*^``; single
quotes equal double quotes. If no call is expected, any call is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.train.function_calling.schema import matches_schema

Schemas = Mapping[str, dict[str, Any]]  # function name → JSON Schema of its parameters


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of one answer. None: the criterion does not apply, such as arguments_correct if no call is expected."""

    expected: int  # number of expected calls
    emitted: int  # number of emitted calls, including unreadable ones
    json_valid: bool | None  # every emitted call is a JSON object with a name and an object of arguments
    schema_valid: bool | None  # every emitted call is of an available function and matches its schema
    function_name_correct: bool | None  # the emitted names are the expected names
    arguments_correct: bool | None  # the emitted names and arguments are the expected ones
    call_correct: bool  # all criteria above are true; if no call is expected: no call is emitted


# a call up to its closing tag; an incomplete call ends at the next call or at the end of the text
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse_calls(text: str) -> list[Call | None]:
    """The calls in a model's answer, in order; None for an unreadable or incomplete call."""
    return [_parse_call(match) for match in _TOOL_CALL.finditer(text)]


def _parse_call(match: re.Match[str]) -> Call | None:
    if not match.group(0).endswith("</tool_call>"):
        return None
    try:
        call = json.loads(match.group(1))
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return None
    name, arguments = call["name"], call["arguments"]
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def expected_calls(message: Mapping[str, Any]) -> list[Call]:
    """The calls in a message of the assistant."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [Call(function["name"], function["arguments"]) for function in functions]


def score(text: str, expected: Sequence[Call], schemas: Schemas) -> Score:
    """The score of a model's answer ``text``; ``schemas``: those of the available functions."""
    emitted = parse_calls(text)
    calls = [call for call in emitted if call]
    all_readable = len(calls) == len(emitted)
    names_match = all_readable and sorted(call.name for call in calls) == sorted(call.name for call in expected)
    all_match = names_match and _all_match(calls, expected, schemas)
    return Score(
        expected=len(expected),
        emitted=len(emitted),
        json_valid=all_readable if emitted else None,
        schema_valid=all_readable and all(_matches_schema(call, schemas) for call in calls) if emitted else None,
        function_name_correct=names_match if expected else None,
        arguments_correct=all_match if expected else None,
        call_correct=all_match if expected else not emitted,
    )


def _all_match(calls: Iterable[Call], expected: Sequence[Call], schemas: Schemas) -> bool:
    """Whether ``calls`` and ``expected`` match one to one, in any order."""
    unmatched = list(calls)
    for expected_call in expected:
        match = next((call for call in unmatched if _matches(call, expected_call, schemas)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return not unmatched


def _matches(call: Call, expected_call: Call, schemas: Schemas) -> bool:
    return (
        call.name == expected_call.name
        and _matches_schema(call, schemas)
        and set(call.arguments) == set(expected_call.arguments)
        and all(equal_values(call.arguments[name], value) for name, value in expected_call.arguments.items())
    )


def _matches_schema(call: Call, schemas: Schemas) -> bool:
    return call.name in schemas and matches_schema(call.arguments, schemas[call.name])


_IGNORED_CHARACTERS = re.compile(r"[ ,./\-_*^]")


def equal_values(value: object, expected: object) -> bool:
    """Whether two JSON values are equal. Strings are normalised as in BFCL; true differs from 1, 1 equals 1.0."""
    if isinstance(value, str) and isinstance(expected, str):
        return _normalized(value) == _normalized(expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(equal_values, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return set(value) == set(expected) and all(equal_values(value[key], expected[key]) for key in expected)
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def _normalized(text: str) -> str:
    return _IGNORED_CHARACTERS.sub("", text).lower().replace("'", '"')


# Criterion → its label, and its value for a score; None: the criterion does not apply
CRITERIA: dict[str, tuple[str, Callable[[Score], bool | None]]] = {
    "call_correct": ("correct answers", lambda score: score.call_correct),
    "expected_call_correct": (
        "correct answers, call expected",
        lambda score: score.call_correct if score.expected else None,
    ),
    "irrelevance_correct": (
        "correct answers, no call expected",
        lambda score: None if score.expected else score.call_correct,
    ),
    "json_valid": ("calls with valid JSON", lambda score: score.json_valid),
    "schema_valid": ("calls with valid schema", lambda score: score.schema_valid),
    "function_name_correct": ("correct function names", lambda score: score.function_name_correct),
    "arguments_correct": ("correct arguments", lambda score: score.arguments_correct),
    "parallel_calls_correct": (
        "correct answers, several calls expected",
        lambda score: score.call_correct if score.expected > 1 else None,
    ),
    "over_call": ("more calls than expected", lambda score: score.emitted > score.expected),
    "under_call": ("fewer calls than expected", lambda score: score.emitted < score.expected),
}


def summary(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    """Criterion → ``count``: the answers that meet the criterion, ``of``: the answers to which it applies.

    Example: ``{"json_valid": {"count": 8, "of": 10}}``.
    """
    counts = {}
    for name, (_, criterion) in CRITERIA.items():
        values = [value for score in scores if (value := criterion(score)) is not None]
        counts[name] = {"count": sum(values), "of": len(values)}
    return counts


def totals(summaries: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, tuple[int, int]]:
    """Criterion → ``count`` and ``of``, summed over ``summaries`` (split → summary)."""
    splits = list(summaries.values())
    return {name: (sum(s[name]["count"] for s in splits), sum(s[name]["of"] for s in splits)) for name in splits[0]}


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """The content of evaluation.json as lines of text: one line per criterion with both models, then the sign test."""
    cases = record["cases"]
    heading = f"{sum(cases.values())} cases ({', '.join(f'{count} {split}' for split, count in cases.items())})"
    yield f"{heading:48}  {'base':>11}  {'tuned':>11}"
    columns = [totals(record[model]) for model in ("base", "tuned")]
    for name, (label, _) in CRITERIA.items():
        base, tuned = (f"{column[name][0]} of {column[name][1]}" if column[name][1] else "none" for column in columns)
        yield f"{label:48}  {base:>11}  {tuned:>11}"
    test = record["sign_test"]
    result = "significant improvement" if test["passed"] else "no significant improvement"
    yield (
        f"{result}: {test['call_correct_base']:.0%} correct before training, {test['call_correct_tuned']:.0%} after; "
        f"sign test: {test['won']} won, {test['lost']} lost, p {test['p_value']:.3g} "
        f"(threshold < {test['significance']:g})"
    )
