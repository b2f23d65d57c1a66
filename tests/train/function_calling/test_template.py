from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from seatrial.model import UsageError
from seatrial.train.function_calling import generate, template
from seatrial.train.function_calling.glaive import convert
from seatrial.train.hf import tokenization

ROWS = list(generate.conversations(60, seed=0))


@pytest.fixture
def tokenizer() -> Any:
    trained = tokenization.train((json.dumps(row) for row in ROWS), 800)
    return tokenization.prepare(trained, 800, chat=True)


def test_mask_covers_the_assistant_tokens(tokenizer: Any) -> None:
    conversation = convert(ROWS[1])  # two calls at once
    ids, mask = template.encode(tokenizer, conversation)
    trained = tokenizer.decode([token for token, is_trained in zip(ids, mask, strict=True) if is_trained])
    calls = [call["function"] for call in conversation.messages[1]["tool_calls"]]
    blocks = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"], ensure_ascii=False)}}}'
        "\n</tool_call>"
        for call in calls
    ]
    end = template.END_OF_TURN
    assert trained == "\n".join(blocks) + end + conversation.messages[-1]["content"] + end


@pytest.mark.parametrize("number", range(5))  # one row of each kind
def test_template_contains_each_part_of_a_conversation(tokenizer: Any, number: int) -> None:
    conversation = convert(ROWS[number])
    text = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
    calls = [call["function"] for message in conversation.messages for call in message.get("tool_calls", [])]
    parts = [
        *(json.dumps(tool, ensure_ascii=False) for tool in conversation.tools),
        *(json.dumps(call["arguments"], ensure_ascii=False) for call in calls),
        *(message["content"] for message in conversation.messages),
    ]
    assert [part for part in parts if part not in text] == []


def test_end_of_turn_outside_the_mask_is_detected(tokenizer: Any) -> None:
    complete = template.chat_template()
    end = "{{- '<|im_end|>' -}}\n{%- endgeneration -%}"
    assert complete.count(end) == 1
    tokenizer.chat_template = complete.replace(end, "{%- endgeneration -%}\n{{- '<|im_end|>' -}}")
    assert not template.trains_end_of_turn(tokenizer)


def test_end_of_turn_that_is_no_token_of_its_own_is_rejected(tokenizer: Any) -> None:
    assert template.trains_end_of_turn(tokenizer)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["content"] != template.END_OF_TURN]
    fast: Any = PreTrainedTokenizerFast  # untyped
    without_token = fast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="<|endoftext|>")
    with pytest.raises(UsageError, match="as one token"):
        tokenization.prepare(without_token, 800, chat=True)
