"""The exit codes that each caller of a hook expects. docs/hooks.md shows the same table; a test compares them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Kind = Literal["prolog", "epilog", "health"]
Caller = Literal["slurm", "soperator", "npd", "systemd"]


class Result(StrEnum):
    """How a hook ended.

    INCOMPLETE: no check failed, but something was not measured, such as a check that ran out of time. LIMITED: a check
    failed or, with ``fail_closed``, was not measured, but the drain limit (node_state/drain_limit.py) refuses to take
    one more node out of service.
    """

    PASSED = "passed"
    FAILED = "failed"
    LIMITED = "limited"
    INCOMPLETE = "incomplete"


EXIT_FAILED = 1  # on this code, a caller that takes nodes out of service does so
# Caller → exit code of each result. Slurm drains a node if Prolog or Epilog ends with any code but 0, and requeues the
# job after a failed Prolog. soperator's check_runner.py does what the check's on_fail says. node-problem-detector (npd)
# reads 0 as OK, 1 as problem and 2 as unknown.
EXIT_CODES: dict[Caller, dict[Result, int]] = {
    "slurm": {Result.PASSED: 0, Result.FAILED: 1, Result.LIMITED: 0, Result.INCOMPLETE: 0},
    "soperator": {Result.PASSED: 0, Result.FAILED: 1, Result.LIMITED: 0, Result.INCOMPLETE: 0},
    "npd": {Result.PASSED: 0, Result.FAILED: 1, Result.LIMITED: 2, Result.INCOMPLETE: 2},
    "systemd": {Result.PASSED: 0, Result.FAILED: 1, Result.LIMITED: 1, Result.INCOMPLETE: 0},
}


def exit_code(caller: Caller, result: Result, fail_closed: bool) -> int:
    """Return the exit code; ``fail_closed``: INCOMPLETE counts as FAILED."""
    if fail_closed and result is Result.INCOMPLETE:
        return EXIT_CODES[caller][Result.FAILED]
    return EXIT_CODES[caller][result]


def changes_node_state(caller: Caller, kind: Kind) -> bool:
    """Return whether the caller takes the node out of service on exit code 1, so that the drain limit applies.

    Slurm only logs the exit code of HealthCheckProgram, and systemd marks its unit as failed.
    """
    return caller in ("soperator", "npd") or (caller == "slurm" and kind != "health")
