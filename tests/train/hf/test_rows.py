from __future__ import annotations

from typing import Any

import pytest

from seatrial.train.hf import rows

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind."}


def test_rows_depend_only_on_the_seed() -> None:
    few, many, other = (list(rows.generate_rows("alpaca", count, seed)) for count, seed in ((8, 0), (20, 0), (20, 1)))
    assert few == many[:8]
    assert many != other


def test_generated_answers_match_their_instructions() -> None:
    generated = rows.generate_rows("alpaca", 400, seed=5)
    for reverse, add, count, letter in zip(*[generated] * 4, strict=True):
        assert reverse["output"].split() == reverse["input"].split()[::-1]
        first, second = (int(part) for part in add["instruction"].rstrip("?").split() if part.isdigit())
        assert add["output"] == f"{first} plus {second} is {first + second}."
        _, word, times, _ = count["instruction"].split()
        assert count["output"].split() == [word] * int(times)
        assert letter["output"] == f"{letter['input']} begins with {letter['input'][0]}."


def test_both_layouts_have_the_same_tasks() -> None:
    for chat, plain in zip(rows.generate_rows("no_robots", 12, 0), rows.generate_rows("alpaca", 12, 0), strict=True):
        prompt = "\n\n".join(part for part in (plain["instruction"], plain["input"]) if part)
        assert chat["prompt"] == prompt
        assert rows.conversation(chat).messages == [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": plain["output"]},
        ]
        assert rows.prompt_and_output(plain)[1] == plain["output"]


@pytest.mark.parametrize("messages", [[USER, ASSISTANT], [SYSTEM, USER, ASSISTANT], [USER, ASSISTANT] * 2])
def test_alternating_turns_are_a_conversation_without_tools(messages: list[dict[str, str]]) -> None:
    conversation = rows.conversation({"messages": [turn | {"id": 7} for turn in messages]})
    assert (conversation.messages, conversation.tools) == (messages, [])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no JSON object in UTF-8"),
        ({"prompt": "Hi"}, "no messages"),
        ({"messages": "Hi"}, "no messages"),
        ({"messages": ["Hi", "Hello"]}, "no messages"),
        ({"messages": []}, "turns out of order"),
        ({"messages": [SYSTEM]}, "turns out of order"),
        ({"messages": [USER]}, "turns out of order"),
        ({"messages": [ASSISTANT, USER]}, "turns out of order"),
        ({"messages": [USER, ASSISTANT, SYSTEM, USER, ASSISTANT]}, "turns out of order"),
        ({"messages": [USER, ASSISTANT | {"content": " \n"}]}, "an empty turn"),
        ({"messages": [USER | {"content": None}, ASSISTANT]}, "an empty turn"),
    ],
)
def test_invalid_conversation_is_rejected_with_the_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        rows.conversation(row)


def test_prompt_has_an_input_only_if_the_row_has_one() -> None:
    row = {"instruction": "Add", "input": "1 1", "output": "2"}
    assert rows.prompt_and_output(row) == ("### Instruction:\nAdd\n\n### Input:\n1 1\n\n### Response:\n", "2")
    for empty in ("", None):
        assert rows.prompt_and_output(row | {"input": empty}) == ("### Instruction:\nAdd\n\n### Response:\n", "2")


@pytest.mark.parametrize("change", [{"instruction": ""}, {"output": ""}, {"output": 2}, {"input": 3}])
def test_row_without_instruction_or_output_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no instruction, input and output"):
        rows.prompt_and_output({"instruction": "Add", "input": "1 1", "output": "2"} | change)
    with pytest.raises(ValueError, match="no JSON object"):
        rows.prompt_and_output({})
