from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.train.function_calling.score import CRITERIA, Call, equal_values, parse_calls, score, summary, table

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
    "tip": {"type": "object", "properties": {"bill": {"type": "number"}}, "required": ["bill"]},
}
WEATHER = Call("weather", {"city": "New York", "days": 3})
TIP = Call("tip", {"bill": 10})


def answer_with(*calls: Call) -> str:
    blocks = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


@pytest.mark.parametrize(
    "arguments",
    [{"city": "New York", "days": 3}, {"days": 3, "city": "new-york"}, {"city": "NEW YORK.", "days": 3.0}],
)
def test_equivalent_arguments(arguments: dict[str, Any]) -> None:
    result = score(answer_with(Call("weather", arguments)), [WEATHER], SCHEMAS)
    assert (
        result.call_correct,
        result.function_name_correct,
        result.arguments_correct,
        result.json_valid,
        result.schema_valid,
    ) == (True,) * 5


@pytest.mark.parametrize(
    ("arguments", "schema_valid"),
    [
        ({"city": "Boston", "days": 3}, True),
        ({"city": "New York"}, True),  # an expected argument is missing
        ({"days": 3}, False),  # … and is required
        ({"city": "New York", "days": 3, "unit": "celsius"}, True),  # declared but not expected
        ({"city": "New York", "days": 3, "wind": 1}, False),  # not declared
        ({"city": "New York", "days": "3"}, False),  # wrong type
        ({"city": "New York", "days": True}, False),
        ({"city": "New York", "days": 3, "unit": "kelvin"}, False),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], schema_valid: bool) -> None:
    result = score(answer_with(Call("weather", arguments)), [WEATHER], SCHEMAS)
    assert result.function_name_correct
    assert (result.call_correct, result.arguments_correct, result.schema_valid) == (False, False, schema_valid)


@pytest.mark.parametrize("name", ["Weather", "weather ", "forecast", "tip"])
def test_names_are_exact(name: str) -> None:
    result = score(answer_with(Call(name, WEATHER.arguments)), [WEATHER], SCHEMAS)
    assert (result.function_name_correct, result.call_correct) == (False, False)


def test_parallel_calls_in_any_order() -> None:
    other = Call("weather", {"city": "Oslo"})
    assert score(answer_with(TIP, other, WEATHER), [WEATHER, other, TIP], SCHEMAS).call_correct
    assert not score(answer_with(WEATHER, WEATHER, TIP), [WEATHER, other, TIP], SCHEMAS).call_correct
    over, under = (
        score(answer_with(WEATHER, TIP), [WEATHER], SCHEMAS),
        score(answer_with(WEATHER), [WEATHER, TIP], SCHEMAS),
    )
    assert (over.call_correct, over.emitted - over.expected) == (False, 1)
    assert (under.call_correct, under.emitted - under.expected) == (False, -1)


def test_no_call_expected() -> None:
    assert score("I cannot do that.", [], SCHEMAS).call_correct
    assert not score(answer_with(TIP), [], SCHEMAS).call_correct
    assert not score("<tool_call>{", [], SCHEMAS).call_correct  # an unreadable call is a call
    no_call = score("Well.", [TIP], SCHEMAS)
    assert (no_call.call_correct, no_call.emitted, no_call.json_valid) == (False, 0, None)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{'name': 'tip', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "tip"}</tool_call>',
        '<tool_call>{"name": "tip", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "tip", "arguments": {}, "more": 1}</tool_call>',
        '<tool_call>{"name": "tip", "arguments": {"bill": 10}}',  # cut off
        "<tool_call></tool_call>",
        '<tool_call>[{"name": "tip", "arguments": {}}]</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_unreadable_call_is_wrong(text: str) -> None:
    assert parse_calls(text) == [None]
    result = score(text, [TIP], SCHEMAS)
    assert (result.emitted, result.json_valid, result.schema_valid, result.call_correct) == (1, False, False, False)


def test_values() -> None:
    assert equal_values({"a": [1, "B-b"]}, {"a": [1.0, "bb"]})
    for value, other in [([1, 2], [2, 1]), (True, 1), ("1", 1), ({"a": 1}, {}), (None, ""), ([1], [1, 1])]:
        assert not equal_values(value, other)


def test_summary_counts_applicable_cases() -> None:
    scores = [score(answer_with(TIP), [TIP], SCHEMAS), score("No.", [], SCHEMAS), score("No.", [TIP], SCHEMAS)]
    counts = summary(scores)
    assert counts["call_correct"] == {"count": 2, "of": 3}
    assert counts["expected_call_correct"] == {"count": 1, "of": 2}
    assert counts["irrelevance_correct"] == {"count": 1, "of": 1}
    assert counts["json_valid"] == {"count": 1, "of": 1}
    assert counts["parallel_calls_correct"] == {"count": 0, "of": 0}
    assert counts["under_call"] == {"count": 1, "of": 3}


def record(passed: bool) -> dict[str, Any]:
    """evaluation.json with two cases, one per split, that expect a call of weather."""

    def summaries(*answers: str) -> dict[str, Any]:
        scores = (summary([score(answer, [WEATHER], SCHEMAS)]) for answer in answers)
        return dict(zip(("seen", "unseen"), scores, strict=True))

    test = {"call_correct_base": 0.0, "call_correct_tuned": 0.5, "won": 1, "lost": 0, "p_value": 0.5}
    return {
        "cases": {"seen": 1, "unseen": 1},
        "base": summaries("no", "no"),
        "tuned": summaries(answer_with(WEATHER), "no"),
        "sign_test": {**test, "significance": 0.05, "passed": passed},
    }


def test_table_sums_both_splits() -> None:
    head, *lines, _ = table(record(passed=False))
    assert head.split() == ["2", "cases", "(1", "seen,", "1", "unseen)", "base", "tuned"]
    cells = [[cell.strip() for cell in line[48:].split("  ") if cell] for line in lines]
    assert dict(zip(CRITERIA, cells, strict=True)) == {
        "call_correct": ["0 of 2", "1 of 2"],
        "expected_call_correct": ["0 of 2", "1 of 2"],
        "irrelevance_correct": ["none", "none"],
        "json_valid": ["none", "1 of 1"],
        "schema_valid": ["none", "1 of 1"],
        "function_name_correct": ["0 of 2", "1 of 2"],
        "arguments_correct": ["0 of 2", "1 of 2"],
        "parallel_calls_correct": ["none", "none"],
        "over_call": ["0 of 2", "0 of 2"],
        "under_call": ["2 of 2", "1 of 2"],
    }


@pytest.mark.parametrize("passed", [True, False])
def test_table_ends_with_the_sign_test(passed: bool) -> None:
    *_, line = table(record(passed))
    assert line.startswith("significant") is passed
    assert all(text in line for text in ("0% correct", "50% after", "1 won", "0 lost", "p 0.5", "< 0.05"))
