"""Errors shown to the user, and the exception for a check that is not applicable."""

from __future__ import annotations

import reprlib

from pydantic import (
    ValidationError,
)

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
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}{got}"


class NotApplicable(Exception):
    """Raised by a check that is not applicable on this machine; the message is the reason shown with SKIP."""
