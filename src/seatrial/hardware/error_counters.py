"""Which error counters there are, and what it means that one grew: data/counters.yaml, with the source of each."""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import Field

from seatrial.model.base import Frozen
from seatrial.util import data_files


def increase(before: int, after: int) -> int:
    """What a counter gained. One that went back was cleared meanwhile: what it shows is the least that it gained."""
    return after - before if after >= before else after


class CounterDefinition(Frozen):
    """``limit``: a counter of the port that stands there counts no further. ``per_minute``: so many are normal."""

    level: Literal["FAIL", "WARN", "told"]
    means: str = Field(min_length=1)
    fix: str = ""
    source: str = Field(min_length=1)
    limit: int | None = None
    per_minute: float = 0.0


class CounterDefinitions(Frozen):
    """Counters of a GPU and of an RDMA port by name; Xids by number, where they mean less than ``gpu['xid']`` does."""

    gpu: dict[str, CounterDefinition]
    port: dict[str, CounterDefinition]
    xid: dict[int, CounterDefinition]

    def for_xid(self, number: int) -> CounterDefinition:
        return self.xid.get(number) or self.gpu["xid"]


@cache
def counter_definitions() -> CounterDefinitions:
    return CounterDefinitions.model_validate(data_files.read("counters.yaml"))
