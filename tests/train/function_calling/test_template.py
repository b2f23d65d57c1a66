from __future__ import annotations

import json
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("removed", "replacement", "missing_part"),
    [
        ("{{- tool | tojson ~ '\\n' -}}", "", "a tool's description"),
        ("~ call.function.arguments | tojson ~", "~", "a call's arguments"),
        ("' ~ message.content ~ '\\n</tool_response>", "", "a tool's response"),
        ("{{- message.content or '' -}}", "", "the answer"),
    ],
)
def test_incomplete_template_is_detected(tokenizer: Any, removed: str, replacement: str, missing_part: str) -> None:
    complete = template.chat_template()
    assert complete.count(removed) == 1
    tokenizer.chat_template = complete.replace(removed, replacement)
    assert missing_part in template.missing_parts(tokenizer)


def test_end_of_turn_outside_the_mask_is_detected(tokenizer: Any) -> None:
    complete = template.chat_template()
    end = "{{- '<|im_end|>' -}}\n{%- endgeneration -%}"
    assert complete.count(end) == 1
    tokenizer.chat_template = complete.replace(end, "{%- endgeneration -%}\n{{- '<|im_end|>' -}}")
    assert template.missing_parts(tokenizer) == ["the end of turn in the mask"]
