from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from seatrial.model import Trial
from tests.report import samples


def test_trial_round_trip() -> None:
    trial = samples.accepted()
    assert Trial.model_validate_json(trial.model_dump_json()) == trial


@pytest.mark.parametrize("wrong", [{"seconds": -1}, {"seconds": True}, {"started": "now"}])
def test_numbers_of_a_trial_are_in_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Trial.model_validate({**samples.accepted().model_dump(), **wrong})


def test_empty_fields_of_verdicts_are_not_written() -> None:
    written = json.loads(samples.accepted().model_dump_json())["verdicts"]
    assert written
    assert all({"check", "subject", "outcome"} <= set(verdict) for verdict in written)
    values = [value for verdict in written for key, value in verdict.items() if key != "subject"]
    assert not [value for value in values if value in ("", [], None)]


@pytest.mark.parametrize("version", ["1", "2", 3])
def test_other_schema_version_is_rejected(version: object) -> None:
    record = json.loads(samples.accepted().model_dump_json())
    with pytest.raises(ValidationError, match=r"schema_version"):
        Trial.model_validate({**record, "schema_version": version})
