"""Compares several implementations of the same work: is the machine slow, or one implementation? Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from seatrial.diagnose.causes import Run
from seatrial.model import CLUSTER, BasisKind, Finding, Outcome, Verdict

SLOW_MACHINE, SLOW_IMPLEMENTATION = "slow_machine", "slow_implementation"
# A threshold of a trial may be far below the speed of good hardware: passing it does not show that the machine is fast
_REFERENCES = (BasisKind.SKU, BasisKind.SITE)
_MACHINE_FIX = (
    "Compare the GPUs with each other: the slowest one slows down all ranks. If the matrix multiplication rate of all "
    "is good, check CPUs, environment variables and the container."
)


def implementation_findings(run: Run, causes: Sequence[Finding]) -> Iterator[Finding]:
    """At most one finding per check: all implementations are slow, or some are slow and another reaches its reference.

    An implementation is slow if its speed FAILs, and fast if it PASSes against a reference value of the SKU or the
    site; other outcomes show neither. There is no finding for a slow machine if ``causes`` with high confidence explain
    all of its verdicts.
    """
    explained = {key for cause in causes if cause.confidence == "high" for key in cause.explains}
    for name, check in run.checks.items():
        if not (work := check.implementations):
            continue
        of_check = [verdict for verdict in run.verdicts if verdict.check == name and verdict.subject == CLUSTER]
        speeds = {each: [v for v in of_check if v.metric == metric] for each, metric in work.speeds.items()}
        slow_by_name = {each: [v for v in rows if v.outcome is Outcome.FAIL] for each, rows in speeds.items()}
        slow = list(chain.from_iterable(slow_by_name.values()))
        others = chain.from_iterable(rows for each, rows in speeds.items() if not slow_by_name[each])
        passed = (verdict for verdict in others if verdict.outcome is Outcome.PASS)
        fast = [verdict for verdict in passed if verdict.basis and verdict.basis.kind in _REFERENCES]
        if all(slow_by_name.values()) and not explained.issuperset(verdict.key for verdict in slow):
            title = "all implementations of the same training are slow: the machine, not one framework"
            yield _finding(SLOW_MACHINE, work.machine_command, slow, (), title, _MACHINE_FIX)
        elif slow and fast:
            named = ", ".join(each for each, rows in slow_by_name.items() if rows)
            title = (
                f"{named} is slow, another implementation of the same training is not: its software, not the machine"
            )
            fix = (
                f"Compare the versions with those of the reference value, and with a node where {named} is fast. Do "
                "not replace hardware because of this."
            )
            yield _finding(SLOW_IMPLEMENTATION, work.software_command, slow, fast, title, fix)


def _finding(
    cause: str, command: str, slow: Sequence[Verdict], fast: Sequence[Verdict], title: str, fix: str
) -> Finding:
    return Finding(
        cause=cause,
        title=title,
        subject=CLUSTER,
        confidence="high" if fast else "medium",
        evidence="; ".join(verdict.summary for verdict in (*slow, *fast)),
        first_command=command,
        fix=fix,
        action="fix-environment" if fast else "none",
        source=", ".join(dict.fromkeys(f"{verdict.metric} of {verdict.check}" for verdict in slow)),
    ).explaining(slow)
