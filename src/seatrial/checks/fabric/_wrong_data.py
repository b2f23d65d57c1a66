"""The metric ``wrong_elements`` of transfers between ranks; its evidence locates each block of wrong data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import JsonValue

from seatrial.checks.declare import Value, metric, value

if TYPE_CHECKING:
    from seatrial.bench.collectives import CollectiveResult
    from seatrial.bench.data_check import Mismatch
    from seatrial.bench.pairs import PairTiming

Located = tuple[Mapping[str, JsonValue], "Mismatch"]  # where wrong data arrived, such as sender and receiver; what


def wrong_data_metric(fix: str) -> metric:
    """The declaration; ``fix``: how to locate the fault, appended to the general fix."""
    meaning = "Data was corrupted in transfer; training uses the same ports and links."
    return metric("wrong_elements", "== 0", meaning, f"Do not train on these nodes. {fix}", unit="count")


def wrong_data(mismatches: Iterable[Located], subject: str | None = None) -> Value:
    located = list(mismatches)
    evidence = [{**location, **asdict(mismatch)} for location, mismatch in located]
    wrong_elements = sum(mismatch.wrong for _, mismatch in located)
    return value("wrong_elements", wrong_elements, subject, evidence={"wrong_data": evidence} if evidence else None)


def in_groups(results: Mapping[str, CollectiveResult]) -> Iterator[Located]:
    """The wrong data of all groups, located by group name and rank."""
    for name, result in results.items():
        for rank, mismatch in result.mismatches.items():
            yield {"group": name, "rank": rank}, mismatch


def in_pairs(timings: Iterable[PairTiming], names: Sequence[str | int]) -> Iterator[Located]:
    """The wrong data of all pairs, located by the ``names`` of sender and receiver; ``names``: by rank."""
    for timing in timings:
        if timing.mismatch:
            yield {"from": names[timing.partner], "to": names[timing.rank]}, timing.mismatch
