"""Definitions of error counters and the meaning of an increase, from data/counters.yaml."""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import Field

from seatrial.model.base import Frozen
from seatrial.util import data_files


def increase(before: int, after: int) -> int:
    """The increase of a counter; if the counter was reset between both readings, at least ``after``."""
    return after - before if after >= before else after


class CounterDefinition(Frozen):
    """What an increase of a counter means. ``level``: the outcome of an increase; info: no verdict.

    ``limit``: the value at which a port counter saturates. ``per_minute``: the normal rate of increase under load.
    """

    level: Literal["FAIL", "WARN", "info"]
    meaning: str = Field(min_length=1)
    fix: str = ""
    source: str = Field(min_length=1)
    limit: int | None = None
    per_minute: float = 0.0


class CounterDefinitions(Frozen):
    """Counters of a GPU and of an RDMA port by name.

    ``gpu['xid']`` is the definition of every Xid that is not in ``xid``, the less severe ones by number.
    """

    gpu: dict[str, CounterDefinition]
    port: dict[str, CounterDefinition]
    xid: dict[int, CounterDefinition]

    def for_xid(self, number: int) -> CounterDefinition:
        """The definition of an Xid; ``gpu['xid']`` if the number is not listed."""
        return self.xid.get(number) or self.gpu["xid"]


@cache
def counter_definitions() -> CounterDefinitions:
    return CounterDefinitions.model_validate(data_files.read("counters.yaml"))
