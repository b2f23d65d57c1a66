"""Which of several processes failed first, from how each of them ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from seatrial.util.signals import EXIT_TERMINATED

TERMINATED = (-signal.SIGTERM, EXIT_TERMINATED)  # by the signal, or by a handler of it


@dataclass(frozen=True)
class Failure:
    """How one rank failed. ``code``: its exit code, negative for a signal; None where it is not known to have ended.

    ``reported``: it wrote an error. ``order``: a time stamp, or the place among those that ended.
    """

    rank: int
    code: int | None
    reported: bool
    order: float

    @property
    def gives_no_reason(self) -> bool:
        """Whether it ended without writing why, and not because somebody ended it by SIGTERM.

        An exception may end in an exit code, or in an abort while the interpreter is torn down: both follow a message.
        """
        if self.code is None or self.code in TERMINATED:
            return False
        return killed(self.code) or not self.reported


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The failure that explains the others.

    A process that dies silently leaves no message while its peers report a lost connection, perhaps before its end is
    seen: so a silent end comes before every message. A peer may exit silently or abort because of one that was killed,
    so a killed one comes first of these. Otherwise the earliest counts.
    """
    return min(failures, key=_precedence)


def _precedence(failure: Failure) -> tuple[bool, bool, bool, float, int]:
    code = failure.code if failure.gives_no_reason and failure.code is not None else 0
    return not failure.gives_no_reason, code == -signal.SIGABRT, code > 0, failure.order, failure.rank


def killed(code: int) -> bool:
    """Whether a signal ended the process, other than abort()'s own and SIGTERM, by which seatrial ends processes."""
    return code < 0 and code not in (-signal.SIGABRT, -signal.SIGTERM)


def exit_reason(code: int) -> str:
    """``killed by SIGKILL``, or ``exit code 3``."""
    if code in TERMINATED:
        return "ended by SIGTERM from outside"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # the real-time signals between the first and the last have no name in Python
        return f"killed by signal {-code} (SIGRTMIN+{-code - signal.SIGRTMIN})"


def exit_hint(code: int) -> str:
    """What to look at after this exit code; empty where it says no more."""
    hint = "; SIGKILL from outside is often the kernel's out-of-memory killer: see dmesg"
    return hint if code == -signal.SIGKILL else ""
