"""The chat template: ``<tools>`` and ``<tool_call>`` as in Hermes and Qwen2.5, with the assistant's tokens marked.

seatrial has its own template for two reasons. A model's template may omit tools silently, as Qwen2's does. The mask of
trained tokens needs ``{% generation %}`` around the assistant's tokens. These tokens include the end of turn,
since a model that is not trained to end its turn never stops.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from seatrial.train.function_calling.glaive import Conversation

END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)

# Part of a conversation → unique text that the rendered conversation must contain
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
    """The parts of a conversation with tools that the tokenizer's template omits or marks wrongly as (un)trained."""
    conversation = _sentinel_conversation()
    text = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
    missing = [part for part, sentinel in _SENTINELS.items() if sentinel not in text]
    if END_OF_TURN not in text:
        missing.append("the end of turn")
    elif not _masks_end_of_turn(tokenizer, conversation):
        missing.append("the end of turn in the mask")
    return missing


def _masks_end_of_turn(tokenizer: Any, conversation: Conversation) -> bool:
    """Whether the mask of trained tokens includes the end of each assistant turn, and of no other turn."""
    tokens, mask = encode(tokenizer, conversation)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    trained_ends = [trained for token, trained in zip(tokens, mask, strict=True) if token == end]
    roles = ["system", *(message["role"] for message in conversation.messages)]  # the tools are a system turn
    return trained_ends == [role == "assistant" for role in roles]


def encode(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Token ids of the conversation, and for each token whether it has a loss: only the assistant's do."""
    encoded = tokenizer.apply_chat_template(
        conversation.messages,
        tools=conversation.tools or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return encoded["input_ids"], [bool(trained) for trained in encoded["assistant_masks"]]
