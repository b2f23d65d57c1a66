"""Error counters around a check: what grew, what could not be read, and where nobody read any.

A verdict for each thing that is wrong, and none for what is not: thousands of ranks bring a fact each. That nothing
grew is an insight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from seatrial.checks.base import NEW_ERRORS_PREFIX, Check
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

_NAMED = 6  # how many counters or places a sentence names
_NOT_ZERO = "what was not read may have grown"
_SILENT = {"read", "lacks"}  # all that a place has to say where counters were read and none grew
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError)


def verdicts(check: Check, measured: Sequence[Measurement]) -> Iterator[Verdict]:
    """On one check: of every GPU that it ran on there must be such a fact.

    Beside an error of the check itself, only what grew is told: that the rest is not known is clear.
    """
    odd = [(one, fact) for one in measured if not _is_fine(fact := one.facts.get(ERROR_COUNTERS))]
    sound = not odd or not any(one.error for one in measured)
    to_be_read = sound and check.reads_error_counters
    refused: dict[str, dict[str, None]] = {}
    for one, fact in odd:
        if fact is not None:
            try:
                yield from _of_place(check.name, one, fact, sound, refused)
            except _MALFORMED:
                yield _error(check.name, one.subject, f"this is no account of error counters: {fact!s:.200}")
        elif to_be_read and "/gpu" in one.subject and not one.skipped:
            yield _error(check.name, one.subject, f"the error counters of this GPU were not read: {_NOT_ZERO}")
    for why, names in refused.items() if sound else ():
        detail = f"{and_more(list(names), _NAMED)}: {why}"
        yield Verdict(check.name, CLUSTER, Outcome.SKIP, reasons=(Reason.COUNTERS_UNAVAILABLE,), detail=detail)


def _is_fine(fact: Any) -> bool:
    """Whether counters were read at this place, and there is nothing else to tell."""
    read = fact.get("read") if isinstance(fact, dict) and fact.keys() <= _SILENT else None
    return type(read) is int and read > 0


def _read(fact: Mapping[str, Any]) -> int:
    """How many counters. Raises TypeError, KeyError where nobody says."""
    if type(fact["read"]) is not int:
        raise TypeError(fact["read"])
    return fact["read"]


def _of_place(
    check: str, one: Measurement, fact: Any, sound: bool, refused: dict[str, dict[str, None]]
) -> Iterator[Verdict]:
    read = _read(fact)
    yield from _grown(check, one, fact)
    for xid in dict.fromkeys(fact.get("xids", ())):
        if (counter := counter_definitions().for_xid(xid)).level != "info":
            yield _verdict(check, one.subject, "xid", counter, Outcome(counter.level), [f"Xid {xid}"])
    if not sound:
        return
    if unread := fact.get("unread"):
        names = and_more([f"{name} ({why})" for name, why in unread.items()], _NAMED)
        yield _error(check, one.subject, f"error counters could not be read: {names}: {_NOT_ZERO}")
    elif not read and not fact.get("denied") and not fact.get("lacks"):
        yield _error(check, one.subject, f"no error counter was read, and nobody says why: {_NOT_ZERO}")
    without = {} if read or unread else fact.get("lacks", {})  # else it is enough that an insight tells of them
    for why, names in (*fact.get("denied", {}).items(), *without.items()):
        refused.setdefault(why, {}).update(_without_place(names))


def _without_place(names: Iterable[str]) -> dict[str, None]:
    """``gpu3 xid`` → ``xid``: what may not be read on one GPU may be read on none of its kind."""
    return dict.fromkeys(name.partition(" ")[2] or name for name in names)


def _grown(check: str, one: Measurement, fact: Mapping[str, Any]) -> Iterator[Verdict]:
    """A verdict for each counter of the GPU, and one for all ports of its node that counted the same."""
    minutes, node = max(1.0, one.seconds / 60), one.subject.partition("/")[0]
    found: dict[tuple[str, str, Outcome], list[str]] = {}
    for place, counters in fact.get("grew", {}).items():
        kind, subject = (counter_definitions().port, node) if "/" in place else (counter_definitions().gpu, one.subject)
        for name, (before, after) in counters.items():
            if judged := _judged(kind[name], before, after, minutes):
                outcome, words = judged
                found.setdefault((subject, name, outcome), []).append(f"{place} {name} {words}")
    for (subject, name, outcome), all_words in found.items():
        counter = counter_definitions().port[name] if subject == node else counter_definitions().gpu[name]
        yield _verdict(check, subject, name, counter, outcome, all_words)


def _judged(counter: CounterDefinition, before: int, after: int, minutes: float) -> tuple[Outcome, str] | None:
    """None where nothing is wrong."""
    if counter.level == "info":
        return None
    if before == after == counter.limit:
        return Outcome.WARN, f"stands at its limit of {after}, and shows no new ones (perfquery -R clears it)"
    if increase(before, after) <= counter.per_minute * minutes:
        return None
    return Outcome(counter.level), f"{before} → {after}"


def _verdict(
    check: str, subject: str, name: str, counter: CounterDefinition, outcome: Outcome, words: Sequence[str]
) -> Verdict:
    return Verdict(
        check=check,
        subject=subject,
        metric=f"{NEW_ERRORS_PREFIX}{name}",
        outcome=outcome,
        reasons=(Reason.ERROR_COUNTERS_INCREASED,),
        detail=and_more(words, _NAMED),
        meaning=counter.meaning,
        evidence=f"error counters, before → after: {'; '.join(words)}",
        fix=counter.fix,
        basis=Basis(BasisKind.RULE, "error counters", counter.per_minute, source=counter.source),
    )


def _error(check: str, subject: str, detail: str) -> Verdict:
    return Verdict(check, subject, Outcome.ERROR, reasons=(Reason.COUNTERS_NOT_READ,), detail=detail)


class _Account:
    """What the facts of one check say together."""

    def __init__(self) -> None:
        self.places = 0
        self.read: set[int] = set()
        self.grew: dict[str, set[str]] = {}
        self.lacks: dict[str, dict[str, None]] = {}
        self.all_read = True

    def add(self, subject: str, fact: Any) -> None:
        try:
            self.read.add(_read(fact))
            self.places += 1
            if len(fact) > 1:
                self._add_rest(subject, fact)
        except _MALFORMED:  # the verdicts tell of it
            return

    def _add_rest(self, subject: str, fact: Mapping[str, Any]) -> None:
        self.all_read &= "unread" not in fact
        grew = [name for counters in fact.get("grew", {}).values() for name in counters]
        for name in (*grew, *(f"Xid {xid}" for xid in fact.get("xids", ()))):
            self.grew.setdefault(name, set()).add(subject)
        for kind in ("lacks", "denied"):
            for why, names in fact.get(kind, {}).items():
                self.lacks.setdefault(why, {}).update(_without_place(names))

    @property
    def text(self) -> str:
        least, most = min(self.read), max(self.read)
        count = f"{least}" if least == most else f"{least} to {most}"
        growth = [f"{name} on {min(on) if len(on) == 1 else len(on)}" for name, on in self.grew.items()]
        words = f"these grew: {', '.join(growth)}" if growth else "none grew"
        without = "".join(f"; not there: {and_more(list(names), _NAMED)} ({why})" for why, names in self.lacks.items())
        unread = "" if self.all_read else "; some could not be read"
        return f"{count} at each of {self.places} GPUs, read before and after: {words}{unread}{without}"


def insights(measurements: Iterable[Measurement]) -> Iterator[Insight]:
    """Of every check around which error counters were read: how many, at how many places, and which of them grew."""
    accounts: dict[str, _Account] = {}
    for one in measurements:
        if (fact := one.facts.get(ERROR_COUNTERS)) is not None:
            account = accounts.get(one.check) or accounts.setdefault(one.check, _Account())
            account.add(one.subject, fact)
    for check, account in accounts.items():
        if account.read:
            yield Insight(check=check, title="Error counters", text=account.text)
