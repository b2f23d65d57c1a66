"""The chat template: ``<tools>`` and ``<tool_call>`` as Hermes and Qwen2.5 write them, the assistant's part marked.

Ours, because a model's own may leave out tools without a word (Qwen2's does), and because the mask of what is trained
on needs ``{% generation %}`` around it, the end of the turn included: a model that is never trained on it never stops.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from seatrial.train.function_calling.glaive import Conversation

END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)

# One of each thing that must survive the rendering; the words occur nowhere else.
_SENTINELS = {
    "a tool's name": "sentinel_function",
    "a tool's description": "sentinel description",
    "a tool's parameter": "sentinel_parameter",
    "a call's arguments": "sentinel argument",
    "a second call": "sentinel second",
    "a tool's response": "sentinel response",
    "the user's text": "sentinel user",
    "the answer": "sentinel answer",
}


def chat_template() -> str:
    return (resources.files("seatrial.train.function_calling") / "template.jinja").read_text(encoding="utf-8")


def _sentinel_conversation() -> Conversation:
    name, parameter = _SENTINELS["a tool's name"], _SENTINELS["a tool's parameter"]
    arguments = (_SENTINELS["a call's arguments"], _SENTINELS["a second call"])
    calls = [{"type": "function", "function": {"name": name, "arguments": {parameter: text}}} for text in arguments]
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}}
    function = {"name": name, "description": _SENTINELS["a tool's description"], "parameters": schema}
    return Conversation(
        tools=[{"type": "function", "function": function}],
        messages=[
            {"role": "user", "content": _SENTINELS["the user's text"]},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "name": name, "content": _SENTINELS["a tool's response"]},
            {"role": "tool", "name": name, "content": "{}"},
            {"role": "assistant", "content": _SENTINELS["the answer"]},
        ],
    )


def missing_parts(tokenizer: Any) -> list[str]:
    """What this tokenizer's template loses of a conversation with tools, or leaves out of what is trained on."""
    conversation = _sentinel_conversation()
    text = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
    missing = [what for what, sentinel in _SENTINELS.items() if sentinel not in text]
    if END_OF_TURN not in text:
        missing.append("the end of a turn")
    elif not _stops(tokenizer, conversation):
        missing.append("the end of a turn, in the mask")
    return missing


def _stops(tokenizer: Any, conversation: Conversation) -> bool:
    """Whether every turn of the assistant is trained to its end, and nobody else's is."""
    tokens, mask = encode(tokenizer, conversation)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    ends = [trained for token, trained in zip(tokens, mask, strict=True) if token == end]
    roles = [message["role"] for message in conversation.messages]
    return ends == [False, *(role == "assistant" for role in roles)]


def encode(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Token ids of the conversation, and which of them are the assistant's: what the loss is taken of."""
    found = tokenizer.apply_chat_template(
        conversation.messages,
        tools=conversation.tools or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return found["input_ids"], [bool(trained) for trained in found["assistant_masks"]]
