from __future__ import annotations

import json
import os

import pytest
from pydantic import ValidationError

from seatrial.model.base import Frozen, replace_surrogates

NOT_UTF8 = os.fsdecode(b"Universit\xe9")


class Record(Frozen):
    name: str
    more: dict[str, tuple[str, ...]] = {}


def test_record_is_immutable_and_rejects_undeclared_keys() -> None:
    record = Record(name="a")
    with pytest.raises(ValidationError, match="frozen"):
        record.name = "b"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="nmae"):
        Record.model_validate({"name": "a", "nmae": "b"})


def test_bytes_that_are_not_utf8_are_replaced_only_in_written_records() -> None:
    record = Record(name=NOT_UTF8, more={"paths": (NOT_UTF8, "fine")})
    assert record.name == NOT_UTF8
    replaced = {"name": "Universit\ufffd", "more": {"paths": ["Universit\ufffd", "fine"]}}
    assert json.loads(record.model_dump_json()) == replaced
    assert record.model_dump()["name"] == "Universit\ufffd"
    assert Record.model_validate_json(record.model_dump_json(indent=2)).more["paths"][0] == "Universit\ufffd"
    assert replace_surrogates({NOT_UTF8: [NOT_UTF8]}) == {"Universit\ufffd": ["Universit\ufffd"]}


@pytest.mark.parametrize("value", ["plain", "naïve 𝄞", 1.5, None, True])
def test_encodable_values_are_unchanged(value: object) -> None:
    assert replace_surrogates(value) == value
