"""Rows of glaive-function-calling-v2 → messages with tools, as chat templates take them.

A row is two strings. ``system`` names the functions as JSON objects one after the other, which is no JSON list.
``chat`` has turns ``USER:``, ``ASSISTANT:`` and ``FUNCTION RESPONSE:``; an assistant's turn ends in ``<|endoftext|>``,
and a call is ``<functioncall> {"name": "f", "arguments": '{"k": "v"}'}``, whose single quotes make it no JSON either.
What cannot be read for certain is rejected with a reason from REASONS and counted, never repaired by guessing.
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
    "no_row": "system and chat are not two strings",
    "no_system_prompt": "system does not begin with SYSTEM:",
    "functions_unreadable": "what follows the prompt is no sequence of JSON objects",
    "functions_missing": "the prompt promises functions and names none",
    "function_invalid": "a function without a name, with a name used twice, or with an invalid JSON Schema",
    "turns_unreadable": "text before the first turn, or an empty turn",
    "turn_order": "turns that do not follow each other, such as two of the user",
    "truncated": "ends without an assistant's turn that is whole",
    "call_unreadable": "a call that cannot be parsed, or with text behind it",
    "call_unknown_function": "a call of a function that the prompt does not name",
    "arguments_do_not_fit": "a call whose arguments do not fit the function's schema",
    "responses_do_not_match": "another number of function responses than of calls",
    "control_tokens": "a text with tokens that the template sets between turns: they would move what is trained on",
    "duplicate": "the same conversation as a row before",
}


class RejectedRow(ValueError):
    """A row that is not used. ``reason`` is one of REASONS."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REJECTION_REASONS
        super().__init__(f"{REJECTION_REASONS[reason]}{detail and f': {detail:.200}'}")
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """``messages`` of user, assistant (``tool_calls`` with arguments as dict) and tool; ``tools`` as schemas."""

    messages: list[Message]
    tools: list[Message]

    @property
    def parameter_schemas(self) -> dict[str, dict[str, Any]]:
        """The parameters' schema of each function, by name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    def record(self) -> dict[str, Any]:
        return {"messages": self.messages, "tools": self.tools}


_CONTROL = re.compile(r"<\|im_(start|end)\|>")


def convert(row: Mapping[str, Any]) -> Conversation:
    """A row as a conversation. Raises Rejected."""
    system, chat = row.get("system"), row.get("chat")
    if not isinstance(system, str) or not isinstance(chat, str):
        raise RejectedRow("no_row")
    if _CONTROL.search(system + chat):
        raise RejectedRow("control_tokens")
    conversation = Conversation(messages=[], tools=_tools(system))
    for role, text in _turns(chat):
        _ROLES[role](conversation, text)
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        raise RejectedRow("truncated", f"the last turn is the {last['role']}'s")
    return conversation


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)
_LAX_JSON = json.JSONDecoder(
    parse_constant=_no_number, strict=False
)  # code in an argument has its line ends as they are


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
        found, position = _decode(_JSON, system, position, "functions_unreadable")
        functions += found if isinstance(found, list) else [found]
        position = _skip_space(system, position)
    tools = [_tool(function) for function in functions]
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RejectedRow("function_invalid", "a name stands twice")
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
    before, *parts = _TURN.split(chat)
    turns = [(role, text.strip()) for role, text in zip(parts[::2], parts[1::2], strict=True)]
    if before.strip() or not turns or not all(text for _, text in turns):
        raise RejectedRow("turns_unreadable", chat)
    if turns[-1][0] == "ASSISTANT" and not turns[-1][1].endswith(END_OF_TURN):
        raise RejectedRow("truncated", turns[-1][1][-80:])
    return turns


def _add_user(conversation: Conversation, text: str) -> None:
    messages = conversation.messages
    if messages and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise RejectedRow("turn_order", text)
    messages.append({"role": "user", "content": text})


def _add_assistant(conversation: Conversation, text: str) -> None:
    messages = conversation.messages
    if not messages or messages[-1]["role"] == "assistant":
        raise RejectedRow("turn_order", text)
    if _open_calls(messages):
        raise RejectedRow("responses_do_not_match", text)
    content, *calls = text.removesuffix(END_OF_TURN).split(CALL_MARKER)
    if END_OF_TURN in text.removesuffix(END_OF_TURN):
        raise RejectedRow("turns_unreadable", text)
    message: Message = {"role": "assistant", "content": content.strip()}
    if calls:
        message["tool_calls"] = [_call(call, conversation.parameter_schemas) for call in calls]
    elif not message["content"]:
        raise RejectedRow("turns_unreadable", text)
    messages.append(message)


def _add_response(conversation: Conversation, text: str) -> None:
    waiting = _open_calls(conversation.messages)
    if not waiting:
        raise RejectedRow("responses_do_not_match", text)
    conversation.messages.append({"role": "tool", "name": waiting[0], "content": text})


_ROLES = {"USER": _add_user, "ASSISTANT": _add_assistant, "FUNCTION RESPONSE": _add_response}


def _open_calls(messages: list[Message]) -> list[str]:
    """Names of the functions that were called last and have not answered."""
    answered = 0
    while messages and answered < len(messages) and messages[-1 - answered]["role"] == "tool":
        answered += 1
    calls = messages[-1 - answered].get("tool_calls", []) if answered < len(messages) else []
    return [call["function"]["name"] for call in calls[answered:]]


_CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_ESCAPED_QUOTE = re.compile(r"(?<!\\)((?:\\\\)*)\\'")


def _call(text: str, functions: Mapping[str, dict[str, Any]]) -> Message:
    text = text.strip()
    head = _CALL_HEAD.match(text)
    if not head:
        raise RejectedRow("call_unreadable", text)
    name, _ = _decode(_JSON, head.group(1), 0, "call_unreadable")
    arguments, rest = _arguments(text[head.end() :])
    if rest.strip() != "}" or not isinstance(arguments, dict):
        raise RejectedRow("call_unreadable", text)
    if name not in functions:
        raise RejectedRow("call_unknown_function", name)
    if not matches_schema(arguments, functions[name]):
        raise RejectedRow("arguments_do_not_fit", text)
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str) -> tuple[Any, str]:
    """The arguments at the start of ``text``, and what follows them: an object, in single quotes or bare.

    The object says itself where it ends, so that an apostrophe within one of its strings ends nothing.
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
    try:
        return decoder.raw_decode(text, _skip_space(text, position))
    except (ValueError, RecursionError) as error:
        raise RejectedRow(reason, f"{error}: {text[position : position + 80]!r}") from error


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
