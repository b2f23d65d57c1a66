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
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
# A conversation with each kind of turn
_EXAMPLE = Conversation(
    tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    messages=[
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "f", "content": "response"},
        {"role": "assistant", "content": "answer"},
    ],
)


def chat_template() -> str:
    return (resources.files("seatrial.train.function_calling") / "template.jinja").read_text(encoding="utf-8")


def trains_end_of_turn(tokenizer: Any) -> bool:
    """Whether, with the tokenizer's template, the end of each assistant turn has a loss, and of no other turn."""
    tokens, mask = encode(tokenizer, _EXAMPLE)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    trained_ends = [trained for token, trained in zip(tokens, mask, strict=True) if token == end]
    roles = ["system", *(message["role"] for message in _EXAMPLE.messages)]  # the tools are a system turn
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
