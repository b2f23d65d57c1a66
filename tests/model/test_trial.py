from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from seatrial.model import Trial
from tests.report import samples


def test_a_record_is_read_as_it_was_written() -> None:
    trial = samples.accepted()
    assert Trial.model_validate_json(trial.model_dump_json()) == trial


def test_empty_fields_of_verdicts_are_not_written() -> None:
    written = json.loads(samples.accepted().model_dump_json())["verdicts"]
    assert written
    assert all({"check", "subject", "outcome"} <= set(one) for one in written)
    assert not [one for one in written for name, value in one.items() if name != "subject" and value in ("", [], None)]


@pytest.mark.parametrize("version", ["1", "3", 2])
def test_another_version_is_refused(version: object) -> None:
    record = json.loads(samples.accepted().model_dump_json())
    with pytest.raises(ValidationError, match=r"schema_version"):
        Trial.model_validate({**record, "schema_version": version})
