"""Verdicts and insights on the error counters that are read before and after a check.

Thousands of ranks report counters. So only problems become verdicts; an insight says that no counter increased.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from seatrial.checks.check import NEW_ERRORS_PREFIX, Check
from seatrial.hardware.error_counters import CounterDefinition, counter_definitions, increase
from seatrial.model import (
    CLUSTER,
    ERROR_COUNTERS,
    Basis,
    BasisKind,
    Insight,
    Measurement,
    Outcome,
    Reason,
    Verdict,
)
from seatrial.util.text import and_more

_MAX_NAMED = 6  # counters or subjects listed in one message
_UNKNOWN_INCREASE = "they may have increased"
_NO_COUNTERS_IN_RECORD = "the record was made without error counters, as by earlier versions: run the trial again"
_HEALTHY_KEYS = {"counters_read", "not_supported"}  # the only keys of a fact if counters were read and none increased
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError)  # what reading a malformed fact raises


def verdicts(check: Check, measured: Sequence[Measurement]) -> Iterator[Verdict]:
    """Verdicts on error counters that increased, or that could not be read, for each GPU that the check used.

    If the check itself has an error, only increases and malformed facts are reported.
    """
    facts = ((measurement, measurement.facts.get(ERROR_COUNTERS)) for measurement in measured)
    problems = [(measurement, fact) for measurement, fact in facts if not _is_healthy(fact)]
    no_error = not problems or not any(measurement.error for measurement in measured)
    required = no_error and check.reads_error_counters
    unavailable: dict[str, dict[str, None]] = {}  # reason → counters
    for measurement, fact in problems:
        if fact is not None:
            try:
                yield from _subject_verdicts(check.name, measurement, fact, no_error, unavailable)
            except _MALFORMED:
                yield _error(check.name, measurement.subject, f"malformed fact {ERROR_COUNTERS}: {fact!s:.200}")
        elif required and "/gpu" in measurement.subject and not measurement.skipped:
            detail = f"the error counters of this GPU were not read; {_UNKNOWN_INCREASE}"
            yield _error(check.name, measurement.subject, detail, _NO_COUNTERS_IN_RECORD)
    for reason, names in unavailable.items() if no_error else ():
        detail = f"{and_more(list(names), _MAX_NAMED)}: {reason}"
        yield Verdict(check.name, CLUSTER, Outcome.SKIP, reasons=(Reason.COUNTERS_UNAVAILABLE,), detail=detail)


def insights(measurements: Iterable[Measurement]) -> Iterator[Insight]:
    """For each check with error counters: the number of counters and GPUs, and the counters that increased."""
    summaries: dict[str, _CheckSummary] = {}
    for measurement in measurements:
        if (fact := measurement.facts.get(ERROR_COUNTERS)) is not None:
            summary = summaries.get(measurement.check) or summaries.setdefault(measurement.check, _CheckSummary())
            summary.add(measurement.subject, fact)
    for check, summary in summaries.items():
        if summary.counts:
            yield Insight(check=check, title="Error counters", text=summary.text)


def _is_healthy(fact: Any) -> bool:
    """Whether counters were read, none increased and none was unreadable."""
    count = fact.get("counters_read") if isinstance(fact, dict) and fact.keys() <= _HEALTHY_KEYS else None
    return type(count) is int and count > 0


def _counters_read(fact: Mapping[str, Any]) -> int:
    """The number of counters that were read. Raises TypeError or KeyError if the fact has none."""
    if type(fact["counters_read"]) is not int:
        raise TypeError(fact["counters_read"])
    return fact["counters_read"]


def _subject_verdicts(
    check: str, measurement: Measurement, fact: Any, no_error: bool, unavailable: dict[str, dict[str, None]]
) -> Iterator[Verdict]:
    """The verdicts on the counters of one GPU. Adds counters without a value to ``unavailable``: reason → counters."""
    count, subject = _counters_read(fact), measurement.subject
    yield from _increase_verdicts(check, measurement, fact)
    for xid in dict.fromkeys(fact.get("xids", ())):
        if (counter := counter_definitions().for_xid(xid)).level != "info":
            yield _increase_verdict(check, subject, "xid", counter, Outcome(counter.level), [f"Xid {xid}"])
    if not no_error:
        return
    if unreadable := fact.get("unreadable"):
        names = and_more([f"{name} ({reason})" for name, reason in unreadable.items()], _MAX_NAMED)
        yield _error(check, subject, f"error counters not readable: {names}; {_UNKNOWN_INCREASE}")
    elif not count and not fact.get("permission_denied") and not fact.get("not_supported"):
        yield _error(check, subject, f"no error counter was read, and no reason is recorded; {_UNKNOWN_INCREASE}")
    # if some counters were read, the insight lists the unsupported ones, and they have no verdict
    not_supported = {} if count or unreadable else fact.get("not_supported", {})
    for reason, names in (*fact.get("permission_denied", {}).items(), *not_supported.items()):
        unavailable.setdefault(reason, {}).update(_counter_names(names))


def _counter_names(names: Iterable[str]) -> dict[str, None]:
    """``gpu3 xid`` → ``xid``, to list a counter once for all GPUs."""
    return dict.fromkeys(name.partition(" ")[2] or name for name in names)


def _increase_verdicts(check: str, measurement: Measurement, fact: Mapping[str, Any]) -> Iterator[Verdict]:
    """One verdict per counter of the GPU. For the ports of its node, one per counter and outcome covers all ports."""
    minutes, node = max(1.0, measurement.seconds / 60), measurement.subject.partition("/")[0]
    changes: dict[tuple[str, str, Outcome], list[str]] = {}
    for device, counters in fact.get("increased", {}).items():
        is_port = "/" in device
        definitions = counter_definitions().port if is_port else counter_definitions().gpu
        subject = node if is_port else measurement.subject
        for name, (before, after) in counters.items():
            if result := _outcome_of_change(definitions[name], before, after, minutes):
                outcome, change = result
                changes.setdefault((subject, name, outcome), []).append(f"{device} {name} {change}")
    for (subject, name, outcome), texts in changes.items():
        counter = counter_definitions().port[name] if subject == node else counter_definitions().gpu[name]
        yield _increase_verdict(check, subject, name, counter, outcome, texts)


def _outcome_of_change(
    counter: CounterDefinition, before: int, after: int, minutes: float
) -> tuple[Outcome, str] | None:
    """The outcome and the change as text; None if the change is within the normal rate or informational."""
    if counter.level == "info":
        return None
    if before == after == counter.limit:
        return Outcome.WARN, f"is at its maximum of {after} and cannot count new errors (perfquery -R clears it)"
    if increase(before, after) <= counter.per_minute * minutes:
        return None
    return Outcome(counter.level), f"{before} → {after}"


def _increase_verdict(
    check: str, subject: str, name: str, counter: CounterDefinition, outcome: Outcome, changes: Sequence[str]
) -> Verdict:
    return Verdict(
        check=check,
        subject=subject,
        metric=f"{NEW_ERRORS_PREFIX}{name}",
        outcome=outcome,
        reasons=(Reason.ERROR_COUNTERS_INCREASED,),
        detail=and_more(changes, _MAX_NAMED),
        meaning=counter.meaning,
        evidence=f"error counters, before → after: {'; '.join(changes)}",
        fix=counter.fix,
        basis=Basis(BasisKind.RULE, "error counters", counter.per_minute, source=counter.source),
    )


def _error(check: str, subject: str, detail: str, fix: str = "") -> Verdict:
    return Verdict(check, subject, Outcome.ERROR, reasons=(Reason.COUNTERS_NOT_READ,), detail=detail, fix=fix)


class _CheckSummary:
    """The error counters of one check, summarized over all GPUs."""

    def __init__(self) -> None:
        self.gpus = 0
        self.counts: set[int] = set()  # numbers of counters per GPU
        self.increased: dict[str, set[str]] = {}  # counter → subjects
        self.unavailable: dict[str, dict[str, None]] = {}  # reason → counters
        self.all_readable = True

    def add(self, subject: str, fact: Any) -> None:
        """Add the fact of one GPU. Malformed parts of it are left out here, since the fact then has a verdict."""
        try:
            self.counts.add(_counters_read(fact))
            self.gpus += 1
            if len(fact) > 1:  # the fact has more than ``counters_read``
                self._add_problems(subject, fact)
        except _MALFORMED:
            return

    def _add_problems(self, subject: str, fact: Mapping[str, Any]) -> None:
        self.all_readable &= "unreadable" not in fact
        names = [name for counters in fact.get("increased", {}).values() for name in counters]
        for name in (*names, *(f"Xid {xid}" for xid in fact.get("xids", ()))):
            self.increased.setdefault(name, set()).add(subject)
        for key in ("not_supported", "permission_denied"):
            for reason, counters in fact.get(key, {}).items():
                self.unavailable.setdefault(reason, {}).update(_counter_names(counters))

    @property
    def text(self) -> str:
        """The summary on one line; needs at least one added fact."""
        low, high = min(self.counts), max(self.counts)
        count = f"{low}" if low == high else f"{low} to {high}"
        increases = []
        for name, subjects in self.increased.items():
            definition = counter_definitions().gpu.get(name)
            note = f" (recorded only: {definition.meaning})" if definition and definition.level == "info" else ""
            increases.append(f"{name} on {min(subjects) if len(subjects) == 1 else f'{len(subjects)} GPUs'}{note}")
        gpus = f"each of {self.gpus} GPUs" if self.gpus > 1 else "1 GPU"
        text = f"{count} {'counter' if count == '1' else 'counters'} on {gpus}, read before and after: "
        text += f"increased: {', '.join(increases)}" if increases else "none increased"
        text += "" if self.all_readable else "; some were not readable"
        for reason, names in self.unavailable.items():
            text += f"; not available: {and_more(list(names), _MAX_NAMED)} ({reason})"
        return text
