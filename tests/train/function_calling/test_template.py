from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.train.function_calling import generate, template
from seatrial.train.function_calling.glaive import convert
from seatrial.train.hf import tokenization

ROWS = list(generate.rows(60, seed=0))


@pytest.fixture
def tokenizer() -> Any:
    found = tokenization.train((json.dumps(row) for row in ROWS), 800)
    return tokenization.prepare(found, 800, chat=True)


def test_only_what_the_assistant_says_is_trained_on_and_all_of_it(tokenizer: Any) -> None:
    found = convert(ROWS[1])  # two calls at once
    ids, mask = template.encode(tokenizer, found)
    trained = tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted])
    calls = [call["function"] for call in found.messages[1]["tool_calls"]]
    blocks = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"], ensure_ascii=False)}}}'
        "\n</tool_call>"
        for call in calls
    ]
    end = template.END_OF_TURN
    assert trained == "\n".join(blocks) + end + found.messages[-1]["content"] + end


@pytest.mark.parametrize(
    ("cut", "left", "lost"),
    [
        ("{{- tool | tojson ~ '\\n' -}}", "", "a tool's description"),
        ("~ call.function.arguments | tojson ~", "~", "a call's arguments"),
        ("' ~ message.content ~ '\\n</tool_response>", "", "a tool's response"),
        ("{{- message.content or '' -}}", "", "the answer"),
    ],
)
def test_a_template_that_loses_something_is_refused(tokenizer: Any, cut: str, left: str, lost: str) -> None:
    whole = template.chat_template()
    assert whole.count(cut) == 1
    tokenizer.chat_template = whole.replace(cut, left)
    assert lost in template.missing_parts(tokenizer)


def test_an_end_of_turn_outside_the_mask_is_refused(tokenizer: Any) -> None:
    whole = template.chat_template()
    end = "{{- '<|im_end|>' -}}\n{%- endgeneration -%}"
    assert whole.count(end) == 1
    tokenizer.chat_template = whole.replace(end, "{%- endgeneration -%}\n{{- '<|im_end|>' -}}")
    assert template.missing_parts(tokenizer) == ["the end of a turn, in the mask"]
