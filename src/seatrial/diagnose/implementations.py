"""Compares several implementations of the same work: is the machine slow, or one implementation? Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from seatrial.checks.check import Check
from seatrial.model import CLUSTER, BasisKind, Finding, Outcome, Verdict, VerdictKey

SLOW_MACHINE, SLOW_IMPLEMENTATION = "slow_machine", "slow_implementation"
# A threshold of a trial may be far below the speed of good hardware: passing it does not show that the machine is fast
_REFERENCES = (BasisKind.SKU, BasisKind.SITE)


def implementation_findings(
    verdicts: Sequence[Verdict], checks: Mapping[str, Check], causes: Sequence[Finding]
) -> Iterator[Finding]:
    """At most one finding per check: all implementations are slow, or some are slow and another reaches its reference.

    An implementation is slow if its speed FAILs, and fast if it PASSes against a reference value of the SKU or the
    site; other outcomes show neither. There is no finding for a slow machine if ``causes`` with high confidence explain
    all of its verdicts.
    """
    explained = {key for cause in causes if cause.confidence == "high" for key in cause.explains}
    by_metric: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.subject == CLUSTER and verdict.check in checks and checks[verdict.check].implementations:
            by_metric.setdefault((verdict.check, verdict.metric), []).append(verdict)
    for name, check in checks.items():
        if not check.implementations:
            continue
        metrics = check.implementations.speeds  # implementation → metric of its speed
        slow_names: list[str] = []
        slow: list[Verdict] = []
        fast: list[Verdict] = []  # of implementations that are not slow
        for implementation, metric in metrics.items():
            judged = by_metric.get((name, metric), [])
            if any(map(_is_slow, judged)):
                slow_names.append(implementation)
                slow += filter(_is_slow, judged)
            else:
                fast += filter(_is_as_fast_as_reference, judged)
        all_slow = bool(slow_names) and len(slow_names) == len(metrics)
        if all_slow and not explained.issuperset(map(VerdictKey.from_verdict, slow)):
            yield _slow_machine(check.implementations.machine_command, slow)
        elif slow_names and fast:
            yield _slow_implementation(check.implementations.software_command, ", ".join(slow_names), slow, fast)


def _is_slow(verdict: Verdict) -> bool:
    return verdict.outcome is Outcome.FAIL


def _is_as_fast_as_reference(verdict: Verdict) -> bool:
    return verdict.outcome is Outcome.PASS and verdict.basis is not None and verdict.basis.kind in _REFERENCES


def _slow_machine(command: str, slow: Sequence[Verdict]) -> Finding:
    return Finding(
        cause=SLOW_MACHINE,
        title="all implementations of the same training are slow: the machine, not one framework",
        subject=CLUSTER,
        confidence="medium",
        evidence="; ".join(verdict.summary for verdict in slow),
        first_command=command,
        fix="Compare the GPUs with each other: the slowest one slows down all ranks. If the matrix multiplication rate "
        "of all is good, check CPUs, environment variables and the container.",
        action="none",
        source=_source(slow),
        explains=tuple(map(VerdictKey.from_verdict, slow)),
    )


def _slow_implementation(command: str, name: str, slow: Sequence[Verdict], fast: Sequence[Verdict]) -> Finding:
    return Finding(
        cause=SLOW_IMPLEMENTATION,
        title=f"{name} is slow, another implementation of the same training is not: its software, not the machine",
        subject=CLUSTER,
        confidence="high",
        evidence="; ".join(verdict.summary for verdict in (*slow, *fast)),
        first_command=command,
        fix=f"Compare the versions with those of the reference value, and with a node where {name} is fast. Do not "
        "replace hardware because of this.",
        action="fix-environment",
        source=_source(slow),
        explains=tuple(map(VerdictKey.from_verdict, slow)),
    )


def _source(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(dict.fromkeys(f"{verdict.metric} of {verdict.check}" for verdict in verdicts))
