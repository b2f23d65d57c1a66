from __future__ import annotations

import pytest
from pydantic import ValidationError

from seatrial.model.errors import DiskFullError, SeatrialError, UsageError, first_validation_error
from seatrial.model.job import Machine


def test_user_errors_share_a_base_class() -> None:
    assert issubclass(UsageError, SeatrialError)
    assert issubclass(DiskFullError, SeatrialError)


@pytest.mark.parametrize(
    ("record", "key"), [({"host": "h", "gpus": [1]}, "gpus.0"), ({"host": "h"}, "gpus"), ([], "the document")]
)
def test_first_validation_error_names_the_key(record: object, key: str) -> None:
    with pytest.raises(ValidationError) as error:
        Machine.model_validate(record)
    assert first_validation_error(error.value).startswith((f"{key}: expected ", f"{key}: required"))
