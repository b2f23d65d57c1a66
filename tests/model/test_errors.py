from __future__ import annotations

import pytest
from pydantic import ValidationError

from seatrial.model.errors import DiskFullError, SeatrialError, UsageError, first_validation_error
from seatrial.model.job import Machine


def test_errors_of_the_user_are_of_one_family() -> None:
    assert issubclass(UsageError, SeatrialError)
    assert issubclass(DiskFullError, SeatrialError)


@pytest.mark.parametrize(
    ("record", "place"), [({"host": "h", "gpus": [1]}, "gpus.0"), ({"host": "h"}, "gpus"), ([], "the whole")]
)
def test_the_first_fault_names_the_key(record: object, place: str) -> None:
    with pytest.raises(ValidationError) as error:
        Machine.model_validate(record)
    assert first_validation_error(error.value).startswith(f"{place}: ")
