from __future__ import annotations

import json
import os

import pytest
from pydantic import ValidationError

from seatrial.model.base import Frozen, replace_surrogates

ODD = os.fsdecode(b"Universit\xe9")  # a file name that is no UTF-8


class Record(Frozen):
    name: str
    more: dict[str, tuple[str, ...]] = {}


def test_a_record_is_immutable_and_knows_its_keys() -> None:
    record = Record(name="a")
    with pytest.raises(ValidationError, match="frozen"):
        record.name = "b"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="nmae"):
        Record.model_validate({"name": "a", "nmae": "b"})


def test_bytes_that_are_no_utf8_stay_in_memory_and_are_replaced_when_written() -> None:
    record = Record(name=ODD, more={"paths": (ODD, "fine")})
    assert record.name == ODD
    replaced = {"name": "Universit\ufffd", "more": {"paths": ["Universit\ufffd", "fine"]}}
    assert json.loads(record.model_dump_json()) == replaced
    assert record.model_dump()["name"] == "Universit\ufffd"
    assert Record.model_validate_json(record.model_dump_json(indent=2)).more["paths"][0] == "Universit\ufffd"
    assert replace_surrogates({ODD: [ODD]}) == {"Universit\ufffd": ["Universit\ufffd"]}


@pytest.mark.parametrize("value", ["plain", "naïve 𝄞", 1.5, None, True])
def test_what_can_be_written_is_unchanged(value: object) -> None:
    assert replace_surrogates(value) == value
