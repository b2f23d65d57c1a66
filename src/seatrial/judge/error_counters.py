"""Verdicts and insights on the error counters that are read before and after a check.

Thousands of ranks report counters. So only problems become verdicts; an insight says that no counter increased.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from pydantic import JsonValue, StrictInt, ValidationError, model_validator

from seatrial.checks.check import NEW_ERRORS_PREFIX, Check
from seatrial.hardware.error_counters import CounterDefinition, counter_definitions, increase
from seatrial.model import (
    CLUSTER,
    ERROR_COUNTERS,
    Basis,
    BasisKind,
    Frozen,
    Insight,
    Measurement,
    Outcome,
    Reason,
    Verdict,
    node_of,
)
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more, plural

_MAX_NAMED = 6  # counters or subjects listed in one message
_NO_COUNTERS = "the error counters of this GPU were not read; they may have increased"


def _definitions(device: str) -> Mapping[str, CounterDefinition]:
    """Name → definition of the counters of a GPU, or of a port such as ``mlx5_0/1``."""
    return counter_definitions().port if "/" in device else counter_definitions().gpu


class _Counters(Frozen):
    """The fact ERROR_COUNTERS of one GPU, see telemetry/error_counts.py."""

    counters_read: StrictInt
    increased: dict[str, dict[str, tuple[int, int]]] = {}  # device → counter → its value before and after
    xids: tuple[int, ...] = ()
    unreadable: dict[str, str] = {}  # counter → reason
    permission_denied: dict[str, tuple[str, ...]] = {}  # reason → counters
    not_supported: dict[str, tuple[str, ...]] = {}

    @model_validator(mode="after")
    def _names_known_counters(self) -> _Counters:
        if any(changes.keys() - _definitions(device).keys() for device, changes in self.increased.items()):
            raise ValueError("unknown counters")
        return self

    @cached_property
    def are_healthy(self) -> bool:
        """Whether counters were read, none increased and none was unreadable."""
        return self.counters_read > 0 and not (self.increased or self.xids or self.unreadable or self.permission_denied)


def _read(measurements: Iterable[Measurement]) -> Iterator[tuple[Measurement, JsonValue, _Counters | None]]:
    """Each measurement with its fact; None for the counters of a missing or malformed fact.

    Thousands of GPUs have few different facts: equal ones are read once.
    """
    read: dict[str, _Counters | None] = {}
    for measurement in measurements:
        fact = measurement.facts.get(ERROR_COUNTERS)
        if (text := repr(fact)) not in read:
            try:
                read[text] = _Counters.model_validate(fact)
            except ValidationError:
                read[text] = None
        yield measurement, fact, read[text]


def verdicts(check: Check, measured: Sequence[Measurement]) -> Iterator[Verdict]:
    """Verdicts on error counters that increased, or that could not be read, for each GPU that the check used.

    If the check itself has an error, only increases and malformed facts are reported.
    """
    has_error = any(each.error for each in measured)
    unavailable: dict[str, dict[str, None]] = {}  # reason → counters
    for measurement, fact, counters in _read(measured):
        subject, problem = measurement.subject, ""
        if counters:
            if counters.are_healthy:
                continue
            yield from _increases(check.name, measurement, counters)
            problem = "" if has_error else _unreadable(counters)
            for reason, names in [] if has_error else _unavailable(counters):
                unavailable.setdefault(reason, {}).update(dict.fromkeys(names))
        elif fact is not None:
            problem = f"malformed fact {ERROR_COUNTERS}: {fact!s:.200}"
        elif check.reads_error_counters and "/gpu" in subject and not measurement.skipped and not has_error:
            problem = _NO_COUNTERS
        if problem:
            yield Verdict(check.name, subject, Outcome.ERROR, reasons=(Reason.ERROR_COUNTERS,), detail=problem)
    for reason, named in unavailable.items():
        detail = f"error counters not available: {and_more(list(named), _MAX_NAMED)}: {reason}"
        yield Verdict(check.name, CLUSTER, Outcome.SKIP, reasons=(Reason.ERROR_COUNTERS,), detail=detail)


def _unreadable(counters: _Counters) -> str:
    """Why counters may have increased unseen; empty if all were read, or for a known reason not."""
    if counters.unreadable:
        names = [f"{name} ({reason})" for name, reason in counters.unreadable.items()]
        return f"error counters not readable, they may have increased: {and_more(names, _MAX_NAMED)}"
    has_reason = counters.counters_read or counters.permission_denied or counters.not_supported
    return "" if has_reason else f"{_NO_COUNTERS}, and no reason is recorded"


def _unavailable(counters: _Counters, *, all_unsupported: bool = False) -> Iterator[tuple[str, list[str]]]:
    """(reason, counters without a value). ``gpu3 xid`` is ``xid``, to list a counter once for all GPUs.

    If some counters were read, the insight lists the unsupported ones, and they have no verdict.
    """
    is_listed = all_unsupported or not (counters.counters_read or counters.unreadable)
    for reason, names in (*counters.permission_denied.items(), *(counters.not_supported.items() if is_listed else ())):
        yield reason, [name.partition(" ")[2] or name for name in names]


def _increases(check: str, measurement: Measurement, counters: _Counters) -> Iterator[Verdict]:
    """One verdict per counter of the GPU. For the ports of its node, one per counter and outcome covers all ports."""
    minutes, node = max(1.0, measurement.seconds / 60), node_of(measurement.subject)
    found: dict[tuple[str, str, Outcome], tuple[CounterDefinition, list[str]]] = {}
    for device, changes in counters.increased.items():
        subject = node if "/" in device else measurement.subject
        for name, (before, after) in changes.items():
            counter, change = _definitions(device)[name], f"{before} → {after}"
            if counter.level == "info":
                continue
            outcome = Outcome(counter.level)
            if before == after == counter.limit:
                outcome = Outcome.WARN
                change = f"is at its maximum of {after} and cannot count new errors (perfquery -R clears it)"
            elif increase(before, after) <= counter.per_minute * minutes:
                continue
            found.setdefault((subject, name, outcome), (counter, []))[1].append(f"{device} {name} {change}")
    for xid in dict.fromkeys(counters.xids):
        if (counter := counter_definitions().for_xid(xid)).level != "info":
            found[measurement.subject, f"xid {xid}", Outcome(counter.level)] = counter, [f"Xid {xid}"]
    for (subject, name, outcome), (counter, texts) in found.items():
        normal = f"at most {counter.per_minute:g} per minute" if counter.per_minute else "none"
        yield Verdict(
            check=check,
            subject=subject,
            metric=NEW_ERRORS_PREFIX + name.partition(" ")[0],
            outcome=outcome,
            reasons=(Reason.ERROR_COUNTERS,),
            detail=f"{and_more(texts, _MAX_NAMED)} during this check, expected {normal}",
            meaning=counter.meaning,
            evidence=f"error counters, before → after: {'; '.join(texts)}",
            fix=counter.fix,
            basis=Basis(BasisKind.RULE, "error counters", counter.per_minute, source=counter.source),
        )


def insights(measurements: Iterable[Measurement]) -> Iterator[Insight]:
    """For each check with error counters: the number of counters and GPUs, and the counters that increased."""
    read = ((each.check, (each.subject, counters)) for each, _, counters in _read(measurements) if counters)
    for check, of_gpus in grouped(read).items():
        yield Insight(check=check, title="Error counters", text=_summary(of_gpus))


def _summary(of_gpus: Sequence[tuple[str, _Counters]]) -> str:
    counts = sorted({counters.counters_read for _, counters in of_gpus})
    increased: dict[str, set[str]] = {}  # counter → subjects
    unavailable: dict[str, dict[str, None]] = {}  # reason → counters
    for subject, counters in of_gpus:
        names = [name for changes in counters.increased.values() for name in changes]
        for name in (*names, *(f"Xid {xid}" for xid in counters.xids)):
            increased.setdefault(name, set()).add(subject)
        for reason, missing in _unavailable(counters, all_unsupported=True):
            unavailable.setdefault(reason, {}).update(dict.fromkeys(missing))
    increases = []
    for name, subjects in increased.items():
        definition = counter_definitions().gpu.get(name)
        note = f" (recorded only: {definition.meaning})" if definition and definition.level == "info" else ""
        increases.append(f"{name} on {min(subjects) if len(subjects) == 1 else f'{len(subjects)} GPUs'}{note}")
    parts = [f"increased: {', '.join(increases)}" if increases else "none increased"]
    parts += ["some were not readable"] if any(counters.unreadable for _, counters in of_gpus) else []
    parts += [f"not available: {and_more(list(names), _MAX_NAMED)} ({reason})" for reason, names in unavailable.items()]
    count = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"{count} counters on each of {plural(len(of_gpus), 'GPU')}, read before and after: {'; '.join(parts)}"
