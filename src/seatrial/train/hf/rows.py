"""Instruction rows in the layouts of no_robots and alpaca-cleaned: parsed, or generated.

The generated tasks follow simple rules, so that a short training run can learn them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from seatrial.train.function_calling.glaive import Conversation

_WORDS = (
    "anchor",
    "beacon",
    "current",
    "deck",
    "ebb",
    "fathom",
    "galley",
    "harbour",
    "island",
    "jib",
    "keel",
    "lantern",
)


Task = tuple[str, str, str]  # instruction, input (may be empty) and output: a row of either layout


def generate_rows(layout: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``count`` rows in ``layout`` (no_robots or alpaca), determined by the seed."""
    for number in range(count):
        instruction, input_text, output = _TASKS[number % len(_TASKS)](random.Random(f"{seed}/{number}"))
        if layout == "alpaca":
            yield {"instruction": instruction, "input": input_text, "output": output}
        else:
            prompt = f"{instruction}\n\n{input_text}" if input_text else instruction
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
            yield {"prompt": prompt, "messages": messages, "category": "Generated"}


def _reverse(rng: random.Random) -> Task:
    words = rng.sample(_WORDS, 3)
    return ("Write these words in reverse order.", " ".join(words), " ".join(reversed(words)))


def _add(rng: random.Random) -> Task:
    first, second = rng.randint(1, 20), rng.randint(1, 20)
    return (f"What is {first} plus {second}?", "", f"{first} plus {second} is {first + second}.")


def _count(rng: random.Random) -> Task:
    word, times = rng.choice(_WORDS), rng.randint(2, 4)
    return (f"Say {word} {times} times.", "", " ".join([word] * times))


def _first_letter(rng: random.Random) -> Task:
    word = rng.choice(_WORDS)
    return ("Which letter does this word begin with?", word, f"{word} begins with {word[0]}.")


_TASKS: tuple[Callable[[random.Random], Task], ...] = (_reverse, _add, _count, _first_letter)


def conversation(row: Mapping[str, Any]) -> Conversation:
    """A row of no_robots as a conversation. Raises ValueError with the reason if the row has no valid messages."""
    _require_object(row)
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("no messages")
    roles = [message.get("role") for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("turns out of order")
    texts = [message.get("content") for message in messages]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("an empty turn")
    return Conversation([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)], tools=[])


def prompt_and_output(row: Mapping[str, Any]) -> tuple[str, str]:
    """Prompt (instruction and, if present, input) and output of an alpaca-cleaned row.

    Raises ValueError with the reason if instruction or output is missing, or a value is not text.
    """
    _require_object(row)
    instruction, input_text, output = row.get("instruction"), row.get("input") or "", row.get("output")
    if not all(isinstance(text, str) for text in (instruction, input_text, output)) or not instruction or not output:
        raise ValueError("no instruction, input and output")
    parts = [
        f"### Instruction:\n{instruction}",
        *([f"### Input:\n{input_text}"] if input_text else []),
        "### Response:\n",
    ]
    return "\n\n".join(parts), str(output)


def _require_object(row: Mapping[str, Any]) -> None:
    if not row:  # read_rows yields an empty row for an unreadable line
        raise ValueError("no JSON object in UTF-8")
