"""Definitions of error counters and the meaning of an increase, from data/counters.yaml."""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import Field

from seatrial.model.base import Frozen
from seatrial.util import data_files


def increase(before: int, after: int) -> int:
    """How much a counter increased; after a reset between both readings, ``after`` is the lower bound."""
    return after - before if after >= before else after


class CounterDefinition(Frozen):
    """``limit`` is the value at which a port counter saturates; ``per_minute`` is the normal rate under load."""

    level: Literal["FAIL", "WARN", "info"]
    meaning: str = Field(min_length=1)
    fix: str = ""
    source: str = Field(min_length=1)
    limit: int | None = None
    per_minute: float = 0.0


class CounterDefinitions(Frozen):
    """Counters of a GPU and of an RDMA port by name; ``xid`` lists Xids that are less severe than ``gpu['xid']``."""

    gpu: dict[str, CounterDefinition]
    port: dict[str, CounterDefinition]
    xid: dict[int, CounterDefinition]

    def for_xid(self, number: int) -> CounterDefinition:
        """The definition of an Xid; ``gpu['xid']`` if the number is not listed."""
        return self.xid.get(number) or self.gpu["xid"]


@cache
def counter_definitions() -> CounterDefinitions:
    """All counter definitions that ship with seatrial."""
    return CounterDefinitions.model_validate(data_files.read("counters.yaml"))
