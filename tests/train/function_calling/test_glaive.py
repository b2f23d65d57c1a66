from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.train.function_calling.glaive import REJECTION_REASONS, RejectedRow, convert
from tests.paths import ROOT

PAGE = ROOT / "docs" / "workloads" / "function-calling-qwen2-7b.md"


def test_row_of_the_page_is_a_conversation_with_a_call() -> None:
    (row,) = (json.loads(line) for line in PAGE.read_text().splitlines() if line.startswith('{"system"'))
    conversation = convert(row)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


# As in the dataset: concatenated pretty-printed objects, three line breaks between turns.
SYSTEM = """SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -
{
    "name": "get_exchange_rate",
    "description": "Get the exchange rate between two currencies",
    "parameters": {
        "type": "object",
        "properties": {
            "base_currency": {"type": "string", "description": "The currency to convert from"},
            "target_currency": {"type": "string", "description": "The currency to convert to"}
        },
        "required": ["base_currency", "target_currency"]
    }
}

{
    "name": "note",
    "description": "Keep a text {with braces}",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "stars": {"type": "integer"}}}
}
"""
NO_FUNCTIONS = "SYSTEM: You are a helpful assistant, with no access to external functions.\n"
RATE = (
    '<functioncall> {"name": "get_exchange_rate", "arguments": '
    """'{"base_currency": "USD", "target_currency": "EUR"}'}"""
)


def chat(*turns: str) -> str:
    return "\n\n\n".join(turns) + "\n\n\n"


def call_of(arguments: str, name: str = "note") -> Any:
    text = f"""<functioncall> {{"name": "{name}", "arguments": {arguments}}} <|endoftext|>"""
    message = convert({"system": SYSTEM, "chat": chat("USER: Note it.", f"ASSISTANT: {text}")}).messages[-1]
    return message["tool_calls"][0]["function"]["arguments"]


def test_row_of_the_dataset() -> None:
    conversation = convert(
        {
            "system": SYSTEM,
            "chat": chat(
                "USER: Hi, what is a euro worth?",
                f"ASSISTANT: {RATE} <|endoftext|>",
                'FUNCTION RESPONSE: {"exchange_rate": 0.85}',
                "ASSISTANT: One dollar is 0.85 euros. <|endoftext|>",
            ),
        }
    )
    assert list(conversation.parameter_schemas) == ["get_exchange_rate", "note"]
    arguments = {"base_currency": "USD", "target_currency": "EUR"}
    call = {"type": "function", "function": {"name": "get_exchange_rate", "arguments": arguments}}
    assert conversation.messages == [
        {"role": "user", "content": "Hi, what is a euro worth?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "get_exchange_rate", "content": '{"exchange_rate": 0.85}'},
        {"role": "assistant", "content": "One dollar is 0.85 euros."},
    ]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("""'{"text": "plain"}'""", "plain"),
        ("""'{"text": "it's raining"}'""", "it's raining"),  # apostrophe without escape
        (r"""'{"text": "it\'s raining"}'""", "it's raining"),  # with escape
        (r"""'{"text": "it\'s \"odd\""}'""", 'it\'s "odd"'),
        (r"""'{"text": "C:\\dir\\"}'""", "C:\\dir\\"),
        ("""'{"text": "'}'"}'""", "'}'"),  # the end of a call inside a string
        ("""'{"text": "naïve – 東京 🚢"}'""", "naïve – 東京 🚢"),
        ("""'{"text": "line\none"}'""", "line\none"),
        ("""{"text": "not quoted"}""", "not quoted"),
        ("""' {"text": "spaces"} ' """, "spaces"),
    ],
)
def test_quotes_in_arguments(written: str, text: str) -> None:
    assert call_of(written) == {"text": text}


def test_responses_match_calls_in_order() -> None:
    both = f"""Sure. {RATE} <functioncall> {{"name": "note", "arguments": '{{}}'}}"""
    conversation = convert(
        {
            "system": SYSTEM,
            "chat": chat(
                "USER: Both.",
                f"ASSISTANT: {both} <|endoftext|>",
                "FUNCTION RESPONSE: 1",
                "FUNCTION RESPONSE: 2",
                "ASSISTANT: Done. <|endoftext|>",
            ),
        }
    )
    assert conversation.messages[1]["content"] == "Sure."
    assert [(m["name"], m["content"]) for m in conversation.messages[2:4]] == [
        ("get_exchange_rate", "1"),
        ("note", "2"),
    ]


def test_no_functions_and_functions_as_a_list() -> None:
    talk = chat("USER: Hello", "ASSISTANT: Hello! <|endoftext|>")
    assert convert({"system": NO_FUNCTIONS, "chat": talk}).tools == []
    listed = f"{SYSTEM.splitlines()[0]}\n" + json.dumps([{"name": "a"}, {"name": "b", "parameters": {}}])
    assert list(convert({"system": listed, "chat": talk}).parameter_schemas) == ["a", "b"]


HEAD = SYSTEM.splitlines()[0]
ANSWERED = chat("USER: Hello", "ASSISTANT: Hello! <|endoftext|>")


@pytest.mark.parametrize(
    ("reason", "system", "talk"),
    [
        ("fields_missing", None, ANSWERED),
        ("fields_missing", SYSTEM, ["USER: Hello"]),
        ("no_system_prompt", "You are helpful.", ANSWERED),
        ("functions_missing", HEAD, ANSWERED),
        ("functions_unreadable", SYSTEM[: len(SYSTEM) // 2], ANSWERED),
        ("functions_unreadable", f"{HEAD}\n{{}} and then text", ANSWERED),
        ("functions_unreadable", f"{HEAD}\n[1, 2]", ANSWERED),
        ("functions_unreadable", f'{HEAD}\n{{"name": "f", "parameters": {{"minimum": NaN}}}}', ANSWERED),
        ("functions_unreadable", HEAD + '\n{"a":' * 100_000, ANSWERED),
        ("function_invalid", f'{HEAD}\n{{"description": "nameless"}}', ANSWERED),
        ("function_invalid", f'{HEAD}\n{{"name": "f"}} {{"name": "f"}}', ANSWERED),
        ("function_invalid", f'{HEAD}\n{{"name": "f", "parameters": {{"type": "float"}}}}', ANSWERED),
        ("function_invalid", f'{HEAD}\n{{"name": "f", "parameters": {{"type": "string"}}}}', ANSWERED),
        ("control_tokens", SYSTEM, chat("USER: <|im_end|> obey", "ASSISTANT: No. <|endoftext|>")),
        ("turns_unreadable", SYSTEM, ""),
        ("turns_unreadable", SYSTEM, "Hello " + ANSWERED),
        ("turns_unreadable", SYSTEM, chat("USER:", "ASSISTANT: Hello! <|endoftext|>")),
        ("turns_unreadable", SYSTEM, chat("USER: Hello", "ASSISTANT: One <|endoftext|> two <|endoftext|>")),
        ("turn_order", SYSTEM, chat("USER: One", "USER: Two", "ASSISTANT: Hello! <|endoftext|>")),
        ("turn_order", SYSTEM, chat("ASSISTANT: Hello! <|endoftext|>")),
        (
            "turn_order",
            SYSTEM,
            chat("USER: One", f"ASSISTANT: {RATE} <|endoftext|>", "USER: Two", "ASSISTANT: a <|endoftext|>"),
        ),
        ("truncated", SYSTEM, chat("USER: Hello", "ASSISTANT: Hel")),
        ("truncated", SYSTEM, chat("USER: Hello", f"ASSISTANT: {RATE} <|endoftext|>", "FUNCTION RESPONSE: 1")),
        ("call_unreadable", SYSTEM, chat("USER: Hello", f"ASSISTANT: {RATE[:-10]} <|endoftext|>")),
        ("call_unreadable", SYSTEM, chat("USER: Hello", f"ASSISTANT: {RATE} and more <|endoftext|>")),
        ("call_unreadable", SYSTEM, chat("USER: Hello", 'ASSISTANT: <functioncall> {"name": "note"} <|endoftext|>')),
        ("call_unknown_function", SYSTEM, chat("USER: a", f"ASSISTANT: {RATE.replace('get_', 'set_')} <|endoftext|>")),
        ("call_unknown_function", NO_FUNCTIONS, chat("USER: a", f"ASSISTANT: {RATE} <|endoftext|>")),
        ("arguments_invalid", SYSTEM, chat("USER: a", f"ASSISTANT: {RATE.replace('base', 'bass')} <|endoftext|>")),
        ("response_count", SYSTEM, chat("USER: a", "FUNCTION RESPONSE: 1", "ASSISTANT: b <|endoftext|>")),
        (
            "response_count",
            SYSTEM,
            chat(
                "USER: a",
                f"ASSISTANT: {RATE} {RATE} <|endoftext|>",
                "FUNCTION RESPONSE: 1",
                "ASSISTANT: b <|endoftext|>",
            ),
        ),
    ],
)
def test_rejection_reasons(reason: str, system: Any, talk: Any) -> None:
    with pytest.raises(RejectedRow) as caught:
        convert({"system": system, "chat": talk})
    assert caught.value.reason == reason
    assert REJECTION_REASONS[reason] in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("arguments", ["'[1]'", "'\"text\"'", '\'{"text": "open\'', '\'{"text": "a"}', "''"])
def test_arguments_must_be_an_object(arguments: str) -> None:
    with pytest.raises(RejectedRow) as caught:
        call_of(arguments)
    assert caught.value.reason == "call_unreadable"


def test_remote_schema_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("network access")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    system = SYSTEM.replace('{"type": "integer"}', '{"$ref": "http://localhost/schema.json"}')
    text = """<functioncall> {"name": "note", "arguments": '{"stars": 3}'} <|endoftext|>"""
    with pytest.raises(RejectedRow) as caught:
        convert({"system": system, "chat": chat("USER: a", f"ASSISTANT: {text}")})
    assert caught.value.reason == "arguments_invalid"
