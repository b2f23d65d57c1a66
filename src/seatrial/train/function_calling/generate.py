"""Generates rows in the layout of glaive-function-calling-v2 from a seed, for use without the dataset.

Five kinds of rows alternate: one call; two calls at once; a request without a matching function; no functions; a call
followed by thanks. Reports label these rows as generated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from seatrial.train.function_calling.glaive import CALL_MARKER, END_OF_TURN
from seatrial.util import data_files

MAX_OTHER_FUNCTIONS = 3  # largest number of functions in a prompt that the conversation does not call
_CITIES = ("Berlin", "Oslo", "Lima", "Kyoto", "Nairobi", "São Paulo", "Zürich", "Quebec", "Cairo", "Hobart")
_PEOPLE = ("Ada", "Grace", "Conan O'Brien", "Zoë", "Linus", "Margaret", "Søren", "Mei", "Amara", "Noor")
_TEXTS = (
    "it's done",
    "dinner is at 7",
    'she said "yes"',
    "bring milk, eggs and tea",
    "the ship is late",
    "don't worry",
)


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
# Kind of parameter in functions.yaml → JSON Schema, and the values, or a function that draws one
_PARAMETER_KINDS: dict[str, tuple[dict[str, Any], Sequence[Any] | Callable[[random.Random], Any]]] = {
    "city": (_STRING, _CITIES),
    "person": (_STRING, _PEOPLE),
    "people": ({"type": "array", "items": _STRING}, lambda rng: rng.sample(_PEOPLE, 2)),
    "text": (_STRING, _TEXTS),
    "currency": (_STRING, ("USD", "EUR", "JPY", "CHF", "NOK")),
    "temperature_unit": ({**_STRING, "enum": ["celsius", "fahrenheit"]}, ("celsius", "fahrenheit")),
    "cuisine": (_STRING, ("Thai", "Greek", "Peruvian", "vegan", "Turkish")),
    "language": (_STRING, ("French", "Hindi", "Welsh", "Korean")),
    "symbol": (_STRING, lambda rng: "".join(rng.choices("ABCDEF", k=3))),
    "parcel": (_STRING, lambda rng: "".join(rng.choices("0123456789", k=6))),
    "room": (_STRING, ("kitchen", "attic", "hall", "study")),
    "amount": ({"type": "number"}, (20, 35.5, 80, 99.5, 120, 250)),
    "percent": (_INTEGER, lambda rng: rng.randint(5, 30)),
    "count": (_INTEGER, lambda rng: rng.randint(2, 9)),
    "flag": ({"type": "boolean"}, lambda rng: rng.random() < 0.5),
    "date": (_STRING, lambda rng: f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"),
    "time": (_STRING, lambda rng: f"{rng.randint(5, 9):02}:{rng.randrange(0, 60, 5):02}"),
}
# Field of a function's response → a function that draws its value
_RESPONSES: dict[str, Callable[[random.Random], Any]] = {
    "degrees": lambda rng: rng.randint(-5, 35),
    "amount_out": lambda rng: rng.randint(100, 9999) / 100,
    "place": lambda rng: f"{rng.choice(('Blue', 'Old', 'North'))} {rng.choice(('Anchor', 'Harbour', 'Mast'))}",
    "code": lambda rng: "".join(rng.choices("GHJKL", k=4)),
    "status": lambda _: "ok",
    "title": lambda rng: f"The {rng.choice(('Tide', 'Keel', 'Lantern'))}",
    "clock": lambda rng: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
}
# (request, answer) without a matching function
_REQUESTS_WITHOUT_FUNCTION = (
    ("Write a poem about {city}.", "I cannot write poems with what I have been given."),
    ("Who won the match in {city}?", "I have no function that knows of matches."),
)


def conversations(count: int, seed: int) -> Iterator[dict[str, str]]:
    """``count`` generated rows with the keys system and chat, always the same for a seed."""
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        yield _ROW_KINDS[number % len(_ROW_KINDS)](rng)


@lru_cache
def functions() -> list[dict[str, Any]]:
    """The entries of functions.yaml."""
    text = (resources.files("seatrial.train.function_calling") / "functions.yaml").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = data_files.parse(text)
    return entries


def _row(rng: random.Random, called: list[dict[str, Any]], turns: list[tuple[str, str]]) -> dict[str, str]:
    """A row that lists the functions ``called`` and up to MAX_OTHER_FUNCTIONS others."""
    others = [function for function in functions() if function not in called]
    listed = called + rng.sample(others, rng.randint(1, MAX_OTHER_FUNCTIONS))
    rng.shuffle(listed)
    schemas = "\n\n".join(json.dumps(_schema(function), indent=4, ensure_ascii=False) for function in listed)
    prompt = "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -"
    return {"system": f"{prompt}\n{schemas}\n", "chat": _chat(turns)}


def _chat(turns: list[tuple[str, str]]) -> str:
    """``turns`` (role and text of each) as one string in the dataset's format."""
    lines = [f"{role}: {text}{f' {END_OF_TURN}' if role == 'ASSISTANT' else ''}" for role, text in turns]
    return "\n\n\n".join(lines) + "\n\n\n"


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    properties = {
        name: {**_PARAMETER_KINDS[kind][0], "description": f"The {name.replace('_', ' ')}"}
        for name, kind in function["parameters"].items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": function["name"], "description": function["description"], "parameters": parameters}


def _row_with_calls(rng: random.Random, count: int, last_turns: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    called = rng.sample(functions(), count)
    requests, calls, responses, answers = list[str](), list[str](), list[tuple[str, str]](), list[str]()
    for function in called:
        arguments = {name: _draw(kind, rng) for name, kind in function["parameters"].items()}
        response = {function["response"]: _RESPONSES[function["response"]](rng)}
        texts = {name: ", ".join(each) if isinstance(each, list) else each for name, each in arguments.items()}
        requests.append(function["ask"].format(**texts))
        # as in the dataset: single quotes around the arguments, and escaped apostrophes inside them
        quoted = json.dumps(arguments, ensure_ascii=False).replace("'", "\\'")
        calls.append(f"""{CALL_MARKER} {{"name": "{function["name"]}", "arguments": '{quoted}'}}""")
        responses.append(("FUNCTION RESPONSE", json.dumps(response)))
        answers.append(function["answer"].format(**texts, **response))
    turns = [("USER", " ".join(requests)), ("ASSISTANT", " ".join(calls)), *responses, ("ASSISTANT", " ".join(answers))]
    return _row(rng, called, [*turns, *last_turns])


def _draw(kind: str, rng: random.Random) -> Any:
    _, values = _PARAMETER_KINDS[kind]
    return values(rng) if callable(values) else rng.choice(values)


def _row_without_matching_function(rng: random.Random) -> dict[str, str]:
    template, answer = rng.choice(_REQUESTS_WITHOUT_FUNCTION)
    request = template.format(city=rng.choice(_CITIES))
    return _row(rng, [], [("USER", request), ("ASSISTANT", answer)])


def _row_without_functions(rng: random.Random) -> dict[str, str]:
    greeting = f"Hello! I am {rng.choice(_PEOPLE)} from {rng.choice(_CITIES)}."
    system = "SYSTEM: You are a helpful assistant, with no access to external functions.\n"
    return {"system": system, "chat": _chat([("USER", greeting), ("ASSISTANT", "Hello! What can I do for you?")])}


_ROW_KINDS: tuple[Callable[[random.Random], dict[str, str]], ...] = (
    lambda rng: _row_with_calls(rng, 1),
    lambda rng: _row_with_calls(rng, 2),
    _row_without_matching_function,
    _row_without_functions,
    lambda rng: _row_with_calls(rng, 1, (("USER", "Thank you!"), ("ASSISTANT", "You are welcome."))),
)
