from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.train.function_calling import generate
from seatrial.train.function_calling.glaive import convert


def test_all_rows_are_usable_and_deterministic() -> None:
    rows = list(generate.conversations(200, seed=3))
    conversations = [convert(row) for row in rows]
    assert rows == list(generate.conversations(200, seed=3))
    assert rows != list(generate.conversations(200, seed=4))
    calls = [len(message.get("tool_calls", [])) for conversation in conversations for message in conversation.messages]
    assert {1, 2} <= set(calls)
    assert any(not conversation.tools for conversation in conversations)


def test_rows_do_not_depend_on_the_count() -> None:
    assert list(generate.conversations(7, seed=3)) == list(generate.conversations(20, seed=3))[:7]


def test_five_kinds_of_rows_come_in_turn() -> None:
    conversations = [convert(row) for row in generate.conversations(50, seed=1)]
    for number, conversation in enumerate(conversations):
        calls = [len(message["tool_calls"]) for message in conversation.messages if message.get("tool_calls")]
        assert calls == [[1], [2], [], [], [1]][number % 5]
        assert bool(conversation.tools) == (number % 5 != 3)
        assert conversation.messages[-1]["role"] == "assistant"
    assert {conversation.messages[-1]["content"] for conversation in conversations[4::5]} == {"You are welcome."}


def test_called_function_is_listed_with_others() -> None:
    for row in list(generate.conversations(50, seed=2))[::5]:
        conversation = convert(row)
        listed = [tool["function"]["name"] for tool in conversation.tools]
        (call,) = (call for message in conversation.messages for call in message.get("tool_calls", []))
        assert call["function"]["name"] in listed
        assert 2 <= len(set(listed)) == len(listed) <= 1 + generate.MAX_OTHER_FUNCTIONS


def test_apostrophes_and_accents_survive_conversion() -> None:
    """The layout has arguments in single quotes; apostrophes inside values are escaped."""
    arguments = [
        json.dumps(call["function"]["arguments"], ensure_ascii=False)
        for row in generate.conversations(400, seed=0)
        for message in convert(row).messages
        for call in message.get("tool_calls", [])
    ]
    assert any("Conan O'Brien" in text for text in arguments)
    assert any("São Paulo" in text for text in arguments)
    assert not any("\\'" in text for text in arguments)


@pytest.mark.parametrize("function", generate.functions(), ids=lambda function: str(function["name"]))
def test_functions_have_valid_kinds_and_complete_requests(function: dict[str, Any]) -> None:
    assert set(function["parameters"].values()) <= set(generate._PARAMETER_KINDS)
    assert function["response"] in generate._RESPONSES
    for name in function["parameters"]:
        assert f"{{{name}}}" in function["ask"]
