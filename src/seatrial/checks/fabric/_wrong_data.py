"""The metric ``wrong_elements`` of transfers between ranks; its evidence locates each block of wrong data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import JsonValue

from seatrial.checks.declare import Value, metric, value

if TYPE_CHECKING:
    from seatrial.bench.data_check import Mismatch
    from seatrial.bench.pairs import PairResults
    from seatrial.bench.subgroups import GroupResult

Located = tuple[Mapping[str, JsonValue], "Mismatch"]  # where wrong data arrived, such as sender and receiver; what


def wrong_data_metric(fix: str) -> metric:
    """The declaration; ``fix``: how to locate the fault, appended to the general fix."""
    meaning = "Data was corrupted in transfer; training uses the same ports and links."
    return metric("wrong_elements", "== 0", meaning, f"Do not train on these nodes. {fix}", unit="count")


def wrong_data(mismatches: Iterable[Located], subject: str | None = None) -> Value:
    """The number of wrong elements."""
    located = list(mismatches)
    evidence = [{**location, **asdict(mismatch)} for location, mismatch in located]
    wrong_elements = sum(mismatch.wrong for _, mismatch in located)
    return value("wrong_elements", wrong_elements, subject, evidence={"wrong_data": evidence} if evidence else None)


def group_wrong_data(results: Mapping[str, GroupResult], subject: str | None = None) -> Value:
    """The wrong data of all groups, located by group name and rank."""
    located: list[tuple[Mapping[str, JsonValue], Mismatch]] = []
    for name, result in results.items():
        located += (({"group": name, "rank": rank}, mismatch) for rank, mismatch in result.mismatches.items())
    return wrong_data(located, subject)


def pair_wrong_data(results: PairResults, subject: str | None = None) -> Value:
    """The wrong data of all pairs, located by sender and receiver."""
    subjects, timings = results.subjects, results.corrupted
    located = (({"from": subjects[each.partner], "to": subjects[each.rank]}, each.mismatch) for each in timings)
    return wrong_data(((location, mismatch) for location, mismatch in located if mismatch), subject)
