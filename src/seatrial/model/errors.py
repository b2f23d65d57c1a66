"""Errors that the user sees, and how a check says that it does not apply."""

from __future__ import annotations

from pydantic import (
    ValidationError,
)


class SeatrialError(Exception):
    """An error of the user's input or machine: the message says what was read, where, and what was expected."""


class UsageError(SeatrialError):
    """The command line, a trial file or a promise that the machine cannot keep. Exit code 2."""


class DiskFullError(SeatrialError):
    """What was to be kept did not fit on its disk: an error of the machine's user, and no finding."""


def first_validation_error(error: ValidationError) -> str:
    """Where the first thing is that does not fit a record, and what is wrong with it: ``cluster.nodes: …``."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"


class NotApplicable(Exception):
    """Raised by a check that cannot apply where it runs. The message is the reason shown beside SKIP."""
