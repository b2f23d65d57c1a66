"""Converts rows of glaive-function-calling-v2 to messages with tools, the input of chat templates.

A row has two strings. ``system`` contains the functions as concatenated JSON objects; a JSON list is accepted too.
``chat`` has the turns ``USER:``, ``ASSISTANT:`` and ``FUNCTION RESPONSE:``; a turn of the assistant ends with
``<|endoftext|>``, and a call is ``<functioncall> {"name": "f", "arguments": '{"k": "v"}'}``, which is not JSON because
of the single quotes.
A row that cannot be parsed unambiguously is rejected with a reason from REJECTION_REASONS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from seatrial.train.function_calling.schema import NO_PARAMETERS, is_object_schema, matches_schema

Message = dict[str, Any]
END_OF_TURN = "<|endoftext|>"
CALL_MARKER = "<functioncall>"
REJECTION_REASONS = {
    "fields_missing": "system and chat are not two strings",
    "no_system_prompt": "system does not begin with SYSTEM:",
    "functions_unreadable": "the text after the prompt is not a sequence of JSON objects",
    "functions_missing": "the prompt announces functions but contains none",
    "function_invalid": "a function without a name, with a duplicate name, or with an invalid JSON Schema",
    "turns_unreadable": "no turn, text before the first turn, an empty turn, or an end of turn inside a turn",
    "turn_order": "turns in an invalid order, such as two consecutive turns of the user",
    "truncated": "the last turn is not a complete turn of the assistant",
    "call_unreadable": "a call that cannot be parsed, or text after a call",
    "call_unknown_function": "a call of a function that the prompt does not contain",
    "arguments_invalid": "a call whose arguments do not match the function's schema",
    "response_count": "the number of function responses differs from the number of calls",
    "control_tokens": "text with the control tokens of the chat template, which would change the trained tokens",
    "duplicate": "the same conversation as an earlier row",
}


class RejectedRow(ValueError):
    """A row that is not used; ``reason`` is a key of REJECTION_REASONS."""

    def __init__(self, reason: str, detail: str = "") -> None:
        description = REJECTION_REASONS[reason]
        super().__init__(f"{description}: {detail:.200}" if detail else description)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """``messages``: roles user, assistant and tool; arguments in ``tool_calls`` are dicts. ``tools``: the functions."""

    messages: list[Message]
    tools: list[Message]

    @property
    def parameter_schemas(self) -> dict[str, dict[str, Any]]:
        """Function name → JSON Schema of its parameters."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    def record(self) -> dict[str, Any]:
        return {"messages": self.messages, "tools": self.tools}


_CONTROL = re.compile(r"<\|im_(start|end)\|>")


def convert(row: Mapping[str, Any]) -> Conversation:
    """The conversation in ``row``. Raises RejectedRow."""
    system, chat = row.get("system"), row.get("chat")
    if not isinstance(system, str) or not isinstance(chat, str):
        raise RejectedRow("fields_missing")
    if _CONTROL.search(system + chat):
        raise RejectedRow("control_tokens")
    conversation = Conversation(messages=[], tools=_tools(system))
    for role, text in _turns(chat):
        _ADD_TURN[role](conversation, text)
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        raise RejectedRow("truncated", f"the last turn is the {last['role']}'s")
    return conversation


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_reject_constant)
# strict=False accepts line breaks in strings, since an argument may be code
_LAX_JSON = json.JSONDecoder(parse_constant=_reject_constant, strict=False)


def _tools(system: str) -> list[Message]:
    if not system.startswith("SYSTEM:"):
        raise RejectedRow("no_system_prompt", system)
    start = re.search(r"[{\[]", system)
    if not start:
        if "with access to the following functions" in system:
            raise RejectedRow("functions_missing", system)
        return []
    functions: list[Any] = []
    position = start.start()
    while position < len(system):
        value, position = _decode(_JSON, system, position, "functions_unreadable")
        functions += value if isinstance(value, list) else [value]
        position = _skip_space(system, position)
    tools = [_tool(function) for function in functions]
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RejectedRow("function_invalid", "duplicate name")
    return tools


def _tool(function: Any) -> Message:
    if not isinstance(function, dict):
        raise RejectedRow("functions_unreadable", repr(function))
    name, parameters = function.get("name"), function.get("parameters") or NO_PARAMETERS
    if (
        not isinstance(name, str)
        or not name.strip()
        or not isinstance(parameters, dict)
        or not is_object_schema(parameters)
    ):
        raise RejectedRow("function_invalid", json.dumps(function))
    description = str(function.get("description", ""))
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TURN = re.compile(r"^(USER|ASSISTANT|FUNCTION RESPONSE):", re.MULTILINE)


def _turns(chat: str) -> list[tuple[str, str]]:
    """Role (a key of _ADD_TURN) and text of each turn."""
    text_before, *parts = _TURN.split(chat)
    roles, texts = parts[::2], [text.strip() for text in parts[1::2]]
    if text_before.strip() or not texts or not all(texts):
        raise RejectedRow("turns_unreadable", chat)
    if roles[-1] == "ASSISTANT" and not texts[-1].endswith(END_OF_TURN):
        raise RejectedRow("truncated", texts[-1][-80:])
    return list(zip(roles, texts, strict=True))


def _add_user(conversation: Conversation, text: str) -> None:
    messages = conversation.messages
    if messages and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise RejectedRow("turn_order", text)
    messages.append({"role": "user", "content": text})


def _add_assistant(conversation: Conversation, text: str) -> None:
    messages = conversation.messages
    if not messages or messages[-1]["role"] == "assistant":
        raise RejectedRow("turn_order", text)
    if _unanswered_calls(messages):
        raise RejectedRow("response_count", text)
    turn = text.removesuffix(END_OF_TURN)
    if END_OF_TURN in turn:
        raise RejectedRow("turns_unreadable", text)
    content, *calls = turn.split(CALL_MARKER)
    message: Message = {"role": "assistant", "content": content.strip()}
    if calls:
        message["tool_calls"] = [_call(call, conversation.parameter_schemas) for call in calls]
    elif not message["content"]:
        raise RejectedRow("turns_unreadable", text)
    messages.append(message)


def _add_response(conversation: Conversation, text: str) -> None:
    unanswered = _unanswered_calls(conversation.messages)
    if not unanswered:
        raise RejectedRow("response_count", text)
    conversation.messages.append({"role": "tool", "name": unanswered[0], "content": text})


_ADD_TURN = {"USER": _add_user, "ASSISTANT": _add_assistant, "FUNCTION RESPONSE": _add_response}


def _unanswered_calls(messages: list[Message]) -> list[str]:
    """Names of the functions that the last assistant message called and that have no response yet, in order."""
    responses = 0  # messages of tools at the end
    while responses < len(messages) and messages[-1 - responses]["role"] == "tool":
        responses += 1
    calls = messages[-1 - responses].get("tool_calls", []) if responses < len(messages) else []
    return [call["function"]["name"] for call in calls[responses:]]


_CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_ESCAPED_QUOTE = re.compile(r"(?<!\\)((?:\\\\)*)\\'")


def _call(text: str, schemas: Mapping[str, dict[str, Any]]) -> Message:
    """The call in ``text``; ``schemas``: function name → JSON Schema of its parameters."""
    text = text.strip()
    head = _CALL_HEAD.match(text)
    if not head:
        raise RejectedRow("call_unreadable", text)
    name, _ = _decode(_JSON, head.group(1), 0, "call_unreadable")
    arguments, text_after = _arguments(text[head.end() :])
    if text_after.strip() != "}" or not isinstance(arguments, dict):
        raise RejectedRow("call_unreadable", text)
    if name not in schemas:
        raise RejectedRow("call_unknown_function", name)
    if not matches_schema(arguments, schemas[name]):
        raise RejectedRow("arguments_invalid", text)
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str) -> tuple[Any, str]:
    """Split ``text`` into the arguments and the text after them.

    The arguments are a JSON object, with or without single quotes around the object. The JSON decoder finds the end of
    the object, so that an apostrophe inside of a string does not end the object.
    """
    if not text.startswith("'"):
        arguments, end = _decode(_LAX_JSON, text, 0, "call_unreadable")
        return arguments, text[end:]
    try:
        arguments, end = _decode(_LAX_JSON, text, 1, "call_unreadable")
    except RejectedRow:  # \' is an apostrophe inside single quotes, and an error in JSON
        text = _ESCAPED_QUOTE.sub(r"\1'", text)
        arguments, end = _decode(_LAX_JSON, text, 1, "call_unreadable")
    closing = _skip_space(text, end)
    if text[closing : closing + 1] != "'":
        raise RejectedRow("call_unreadable", text)
    return arguments, text[closing + 1 :]


def _decode(decoder: json.JSONDecoder, text: str, position: int, reason: str) -> tuple[Any, int]:
    """The JSON value at ``position`` and the index of its end. Raises RejectedRow with ``reason``."""
    try:
        return decoder.raw_decode(text, _skip_space(text, position))
    except (ValueError, RecursionError) as error:
        raise RejectedRow(reason, f"{error}: {text[position : position + 80]!r}") from error


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
