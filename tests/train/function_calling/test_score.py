from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.train.function_calling.score import Call, equal_values, parse_calls, score, summary, table

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


def said(*calls: Call) -> str:
    blocks = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


@pytest.mark.parametrize(
    "arguments",
    [{"city": "New York", "days": 3}, {"days": 3, "city": "new-york"}, {"city": "NEW YORK.", "days": 3.0}],
)
def test_the_right_call_in_other_words(arguments: dict[str, Any]) -> None:
    got = score(said(Call("weather", arguments)), [WEATHER], SCHEMAS)
    assert (got.call_correct, got.function_name_correct, got.arguments_correct, got.json_valid, got.schema_valid) == (
        True,
    ) * 5


@pytest.mark.parametrize(
    ("arguments", "schema_valid"),
    [
        ({"city": "Boston", "days": 3}, True),
        ({"city": "New York"}, True),  # an expected argument is missing
        ({"days": 3}, False),  # … and is required
        ({"city": "New York", "days": 3, "unit": "celsius"}, True),  # one too many, though declared
        ({"city": "New York", "days": 3, "wind": 1}, False),  # not declared
        ({"city": "New York", "days": "3"}, False),  # another type
        ({"city": "New York", "days": True}, False),
        ({"city": "New York", "days": 3, "unit": "kelvin"}, False),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], schema_valid: bool) -> None:
    got = score(said(Call("weather", arguments)), [WEATHER], SCHEMAS)
    assert got.function_name_correct
    assert (got.call_correct, got.arguments_correct, got.schema_valid) == (False, False, schema_valid)


@pytest.mark.parametrize("name", ["Weather", "weather ", "forecast", "tip"])
def test_names_are_exact(name: str) -> None:
    got = score(said(Call(name, WEATHER.arguments)), [WEATHER], SCHEMAS)
    assert (got.function_name_correct, got.call_correct) == (False, False)


def test_calls_at_once_have_no_order_but_a_count() -> None:
    other = Call("weather", {"city": "Oslo"})
    assert score(said(TIP, other, WEATHER), [WEATHER, other, TIP], SCHEMAS).call_correct
    assert not score(said(WEATHER, WEATHER, TIP), [WEATHER, other, TIP], SCHEMAS).call_correct
    over, under = score(said(WEATHER, TIP), [WEATHER], SCHEMAS), score(said(WEATHER), [WEATHER, TIP], SCHEMAS)
    assert (over.call_correct, over.over_call, over.under_call) == (False, True, False)
    assert (under.call_correct, under.over_call, under.under_call) == (False, False, True)


def test_where_nothing_is_to_be_called_nothing_may_be() -> None:
    assert score("I cannot do that.", [], SCHEMAS).call_correct
    assert not score(said(TIP), [], SCHEMAS).call_correct
    assert not score("<tool_call>{", [], SCHEMAS).call_correct  # unreadable, and yet an attempt
    silent = score("Well.", [TIP], SCHEMAS)
    assert (silent.call_correct, silent.under_call, silent.json_valid) == (False, True, None)


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
def test_what_cannot_be_read_is_a_call_that_is_wrong(text: str) -> None:
    assert parse_calls(text) == [None]
    got = score(text, [TIP], SCHEMAS)
    assert (got.emitted, got.json_valid, got.schema_valid, got.call_correct) == (1, False, False, False)


def test_values() -> None:
    assert equal_values({"a": [1, "B-b"]}, {"a": [1.0, "bb"]})
    for value, wanted in [([1, 2], [2, 1]), (True, 1), ("1", 1), ({"a": 1}, {}), (None, ""), ([1], [1, 1])]:
        assert not equal_values(value, wanted)


def test_a_summary_counts_only_what_was_asked() -> None:
    found = summary([score(said(TIP), [TIP], SCHEMAS), score("No.", [], SCHEMAS), score("No.", [TIP], SCHEMAS)])
    assert found["full"] == {"count": 2, "of": 3}
    assert found["calls_full"] == {"count": 1, "of": 2}
    assert found["irrelevance"] == {"count": 1, "of": 1}
    assert found["json_valid"] == {"count": 1, "of": 1}
    assert found["parallel_full"] == {"count": 0, "of": 0}
    assert found["under_call"] == {"count": 1, "of": 3}


def record(passed: bool) -> dict[str, Any]:
    """Of two cases, one of each split, that ask for the weather."""

    def of(*said_in_them: str) -> dict[str, Any]:
        scores = (summary([score(text, [WEATHER], SCHEMAS)]) for text in said_in_them)
        return dict(zip(("seen", "unseen"), scores, strict=True))

    gate = {"full_base": 0.0, "full_tuned": 0.5, "won": 1, "lost": 0, "p_value": 0.5, "significance": 0.05}
    cases = {"seen": 1, "unseen": 1}
    return {
        "cases": cases,
        "base": of("no", "no"),
        "tuned": of(said(WEATHER), "no"),
        "gate": {**gate, "passed": passed},
    }


def test_the_table_counts_both_splits_together_for_both_models() -> None:
    head, *lines, gate = table(record(passed=False))
    assert head.split() == ["2", "cases", "(1", "seen,", "1", "unseen)", "base", "tuned"]
    found = {line[:48].strip(): line[48:].split("  ") for line in lines}
    assert {words: [cell.strip() for cell in cells if cell] for words, cells in found.items()} == {
        "fully right": ["0 of 2", "1 of 2"],
        "fully right where there was something to call": ["0 of 2", "1 of 2"],
        "nothing called where there was nothing to": ["none", "none"],
        "calls in valid JSON": ["none", "1 of 1"],
        "calls valid by their schema": ["none", "1 of 1"],
        "right functions": ["0 of 2", "1 of 2"],
        "right arguments": ["0 of 2", "1 of 2"],
        "several calls at once, fully right": ["none", "none"],
        "called more than was expected": ["0 of 2", "0 of 2"],
        "called less than was expected": ["2 of 2", "1 of 2"],
    }
    assert gate.startswith("After the training not better by more than chance: 0% of cases fully right before, 50% ")
    assert gate.endswith("1 won, 0 lost, p 0.5 (asked: < 0.05)")
