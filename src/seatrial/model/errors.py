"""Errors shown to the user, and the exception for a check that is not applicable."""

from __future__ import annotations

import reprlib

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from seatrial.util.secrets import redacted


class SeatrialError(Exception):
    """An error in the user's input or machine; the message names the value, its source and the expected value."""


class UsageError(SeatrialError):
    """An invalid command line or trial file, or expected hardware that the machine does not have. Exit code 2."""


class DiskFullError(SeatrialError):
    """A file did not fit on its disk; an error of the user's setup, not a fault of the cluster."""


def first_validation_error(error: ValidationError) -> str:
    """The key of the first validation error, its message and the value: ``cluster.nodes: … (got 'two')``.

    Without the values of variables, which may be secrets.
    """
    first = error.errors()[0]
    is_variable = "env" in first["loc"]
    got = "" if first["type"] == "missing" or is_variable else f" (got {reprlib.repr(redacted(first['input']))})"
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {validation_message(first)}{got}"


_EXPECTED = {  # type of pydantic's error → message in the words of YAML
    "tuple_type": "expected a list, such as [a, b]",
    "dict_type": "expected a mapping, such as {key: value}",
    "model_type": "expected a mapping, such as {key: value}",
    "missing": "required key is missing",
}


def validation_message(details: ErrorDetails) -> str:
    """The message of a validation error in plain words, without pydantic's."""
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return _EXPECTED.get(details["type"], message)


class NotApplicable(Exception):
    """Raised by a check that is not applicable on this machine; the message is the reason shown with SKIP."""
