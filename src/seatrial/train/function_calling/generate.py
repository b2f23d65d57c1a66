"""Rows in the layout of glaive-function-calling-v2, drawn from a seed where the dataset itself is not at hand.

Five kinds in turn: one call; two calls at once; a request that no function serves; no functions at all; a call, and
then thanks. What every report says of them is that they are generated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from seatrial.train.function_calling.glaive import CALL_MARKER, END_OF_TURN
from seatrial.util import data_files

MAX_OTHER_FUNCTIONS = 3  # functions that a prompt names besides the one that is wanted
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
# Each kind of parameter: its JSON Schema, and how a value is drawn.
_KINDS: dict[str, tuple[dict[str, Any], Callable[[random.Random], Any]]] = {
    "city": ({"type": "string"}, lambda draw: draw.choice(_CITIES)),
    "person": ({"type": "string"}, lambda draw: draw.choice(_PEOPLE)),
    "people": (
        {"type": "array", "items": {"type": "string"}},
        lambda draw: draw.sample(_PEOPLE, 2),
    ),
    "text": ({"type": "string"}, lambda draw: draw.choice(_TEXTS)),
    "currency": ({"type": "string"}, lambda draw: draw.choice(("USD", "EUR", "JPY", "CHF", "NOK"))),
    "temperature_unit": (
        {"type": "string", "enum": ["celsius", "fahrenheit"]},
        lambda draw: draw.choice(("celsius", "fahrenheit")),
    ),
    "cuisine": ({"type": "string"}, lambda draw: draw.choice(("Thai", "Greek", "Peruvian", "vegan", "Turkish"))),
    "language": ({"type": "string"}, lambda draw: draw.choice(("French", "Hindi", "Welsh", "Korean"))),
    "symbol": ({"type": "string"}, lambda draw: "".join(draw.choices("ABCDEF", k=3))),
    "parcel": ({"type": "string"}, lambda draw: "".join(draw.choices("0123456789", k=6))),
    "room": ({"type": "string"}, lambda draw: draw.choice(("kitchen", "attic", "hall", "study"))),
    "amount": ({"type": "number"}, lambda draw: draw.choice((20, 35.5, 80, 99.5, 120, 250))),
    "percent": ({"type": "integer"}, lambda draw: draw.randint(5, 30)),
    "count": ({"type": "integer"}, lambda draw: draw.randint(2, 9)),
    "flag": ({"type": "boolean"}, lambda draw: draw.random() < 0.5),
    "date": ({"type": "string"}, lambda draw: f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"),
    "time": ({"type": "string"}, lambda draw: f"{draw.randint(5, 9):02}:{draw.randrange(0, 60, 5):02}"),
}
_RESPONSES: dict[str, Callable[[random.Random], Any]] = {
    "degrees": lambda draw: draw.randint(-5, 35),
    "amount_out": lambda draw: draw.randint(100, 9999) / 100,
    "place": lambda draw: f"{draw.choice(('Blue', 'Old', 'North'))} {draw.choice(('Anchor', 'Harbour', 'Mast'))}",
    "code": lambda draw: "".join(draw.choices("GHJKL", k=4)),
    "status": lambda _: "ok",
    "title": lambda draw: f"The {draw.choice(('Tide', 'Keel', 'Lantern'))}",
    "clock": lambda draw: f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}",
}
_NO_FUNCTION = (
    ("Write a poem about {city}.", "I cannot write poems with what I have been given."),
    ("Who won the match in {city}?", "I have no function that knows of matches."),
)
_SMALL_TALK = (("Hello!", "Hello! What can I do for you?"), ("Thank you!", "You are welcome."))


@dataclass(frozen=True)
class _Wish:
    """A call that somebody asks for."""

    function: dict[str, Any]
    arguments: dict[str, Any]
    response: dict[str, Any]

    def _fill(self, template: str) -> str:
        shown = {name: ", ".join(v) if isinstance(v, list) else v for name, v in self.arguments.items()}
        return template.format(**shown, **self.response)

    @property
    def request(self) -> str:
        return self._fill(self.function["ask"])

    @property
    def answer(self) -> str:
        return self._fill(self.function["answer"])

    @property
    def call(self) -> str:
        # as the dataset has it: the arguments in single quotes, an apostrophe within them escaped
        arguments = json.dumps(self.arguments, ensure_ascii=False).replace("'", "\\'")
        return f"""{CALL_MARKER} {{"name": "{self.function["name"]}", "arguments": '{arguments}'}}"""


def rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """``count`` rows with the keys system and chat; the same for the same seed."""
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        yield _KINDS_OF_ROWS[number % len(_KINDS_OF_ROWS)](draw)


@lru_cache
def functions() -> list[dict[str, Any]]:
    """What functions.yaml holds."""
    text = (resources.files("seatrial.train.function_calling") / "functions.yaml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = data_files.parse(text)
    return found


def _wishes(draw: random.Random, number: int) -> list[_Wish]:
    chosen = draw.sample(functions(), number)
    return [
        _Wish(
            function=function,
            arguments={name: _KINDS[kind][1](draw) for name, kind in function["parameters"].items()},
            response={function["response"]: _RESPONSES[function["response"]](draw)},
        )
        for function in chosen
    ]


def _row(draw: random.Random, wanted: list[_Wish], turns: list[tuple[str, str]]) -> dict[str, str]:
    names = {wish.function["name"] for wish in wanted}
    others = [function for function in functions() if function["name"] not in names]
    listed = [wish.function for wish in wanted] + draw.sample(others, draw.randint(1, MAX_OTHER_FUNCTIONS))
    draw.shuffle(listed)
    described = "\n\n".join(json.dumps(_described(function), indent=4, ensure_ascii=False) for function in listed)
    prompt = "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -"
    return {"system": f"{prompt}\n{described}\n", "chat": _chat(turns)}


def _chat(turns: list[tuple[str, str]]) -> str:
    ends = {"ASSISTANT": f" {END_OF_TURN}"}
    return "\n\n\n".join(f"{role}: {text}{ends.get(role, '')}" for role, text in turns) + "\n\n\n"


def _described(function: dict[str, Any]) -> dict[str, Any]:
    properties = {
        name: {**_KINDS[kind][0], "description": f"The {name.replace('_', ' ')}"}
        for name, kind in function["parameters"].items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": function["name"], "description": function["description"], "parameters": parameters}


def _called(draw: random.Random, number: int, after: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    wishes = _wishes(draw, number)
    turns = [
        ("USER", " ".join(wish.request for wish in wishes)),
        ("ASSISTANT", " ".join(wish.call for wish in wishes)),
        *(("FUNCTION RESPONSE", json.dumps(wish.response)) for wish in wishes),
        ("ASSISTANT", " ".join(wish.answer for wish in wishes)),
    ]
    return _row(draw, wishes, [*turns, *after])


def _refused(draw: random.Random) -> dict[str, str]:
    request, answer = draw.choice(_NO_FUNCTION)
    asked = request.format(city=draw.choice(_CITIES))
    return _row(draw, [], [("USER", asked), ("ASSISTANT", answer)])


def _without_functions(draw: random.Random) -> dict[str, str]:
    request, answer = _SMALL_TALK[0]
    greeting = f"{request} I am {draw.choice(_PEOPLE)} from {draw.choice(_CITIES)}."
    system = "SYSTEM: You are a helpful assistant, with no access to external functions.\n"
    return {"system": system, "chat": _chat([("USER", greeting), ("ASSISTANT", answer)])}


def _with_thanks(draw: random.Random) -> dict[str, str]:
    request, answer = _SMALL_TALK[1]
    return _called(draw, 1, (("USER", request), ("ASSISTANT", answer)))


_KINDS_OF_ROWS: tuple[Callable[[random.Random], dict[str, str]], ...] = (
    lambda draw: _called(draw, 1),
    lambda draw: _called(draw, 2),
    _refused,
    _without_functions,
    _with_thanks,
)
