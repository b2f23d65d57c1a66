"""Finds the process whose failure caused those of the other processes, by exit codes, errors and times. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from seatrial.util.signals import EXIT_TERMINATED

TERMINATED_CODES = (-signal.SIGTERM, EXIT_TERMINATED)  # ended by SIGTERM, or by a handler for it


@dataclass(frozen=True)
class Failure:
    """The failure of one rank. ``code``: exit code; minus the number of the signal that ended it; None if unknown.

    ``reported``: whether the rank wrote an error message. ``order``: a time or position, smaller for earlier failures.
    """

    rank: int
    code: int | None
    reported: bool
    order: float

    @property
    def ended_silently(self) -> bool:
        """Whether no error of the rank's own code explains its end.

        True for a signal other than SIGTERM and SIGABRT, whatever the rank reported. True for an exit code or SIGABRT
        without a reported error. False for SIGTERM and for an unknown code.
        """
        if self.code is None or self.code in TERMINATED_CODES:
            return False
        return killed(self.code) or not self.reported


def first_failure(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the other failures.

    First come silent ends (``ended_silently``), then all other failures, since the peers of a rank that ended silently
    report a lost connection, sometimes with an earlier time. Among silent ends the order is: kill, exit code, SIGABRT,
    since the peers of a killed rank can exit or abort silently. Failures of one kind are ordered by time.
    """
    return min(failures, key=_precedence)


def _precedence(failure: Failure) -> tuple[bool, bool, bool, float, int]:
    code = failure.code if failure.ended_silently and failure.code is not None else 0
    return not failure.ended_silently, code == -signal.SIGABRT, code > 0, failure.order, failure.rank


def killed(code: int) -> bool:
    """Return whether a signal ended the process, not counting SIGABRT and SIGTERM. seatrial itself sends SIGTERM."""
    return code < 0 and code not in (-signal.SIGABRT, -signal.SIGTERM)


def exit_reason(code: int) -> str:
    """Return an exit code as text: ``killed by SIGKILL`` or ``exit code 3``."""
    if code in TERMINATED_CODES:
        return "terminated by SIGTERM from outside"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # Python names only the first and the last real-time signal
        return f"killed by signal {-code} (SIGRTMIN+{-code - signal.SIGRTMIN})"


def exit_hint(code: int) -> str:
    """Return the usual cause of this exit code with the first command to run; empty if there is none."""
    hint = "Often the kernel's out-of-memory killer. Run first, on its node: dmesg -T | tail"
    return hint if code == -signal.SIGKILL else ""
