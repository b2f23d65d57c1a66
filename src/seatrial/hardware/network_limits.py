"""The shares of a network's bound that good clusters reach, from data/network_limits.yaml."""

from __future__ import annotations

from functools import cache
from typing import Literal, Self

from pydantic import Field, model_validator

from seatrial.model import ByteSize, Frozen
from seatrial.util import data_files

_SHARE = Field(gt=0, lt=1)


class NetworkLimit(Frozen):
    """The limits of some operations on ``nodes`` to ``max_nodes`` nodes, as shares of the bound of the network.

    ``fail_below`` and ``warn_below`` are the shares. ``min_size``: the smallest buffer size to which they apply.
    ``setting``: an NCCL variable that the share depends on; with another value of the variable a low bandwidth is no
    fault.
    """

    operations: tuple[str, ...] = Field(min_length=1)
    fabric: Literal["rdma", "efa", "tcp", "mnnvl"]
    nodes: int = Field(ge=2)
    max_nodes: int | None = None
    min_size: ByteSize
    fail_below: float = _SHARE
    warn_below: float = _SHARE
    setting: str = ""
    reason: str = Field(min_length=1)
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _has_ordered_limits(self) -> Self:
        if self.warn_below < self.fail_below:
            raise ValueError(f"warn_below {self.warn_below} is below fail_below {self.fail_below}")
        if self.max_nodes is not None and self.max_nodes < self.nodes:
            raise ValueError(f"max_nodes {self.max_nodes} is below nodes {self.nodes}")
        return self

    def applies_to(self, operation: str, fabric: str, nodes: int) -> bool:
        in_range = self.nodes <= nodes and (self.max_nodes is None or nodes <= self.max_nodes)
        return operation in self.operations and fabric == self.fabric and in_range


@cache
def network_limits() -> tuple[NetworkLimit, ...]:
    """The entries that ship with seatrial.

    Raises ValueError if two entries apply to the same operation, kind of network and number of nodes.
    """
    limits = tuple(NetworkLimit.model_validate(entry) for entry in data_files.read("network_limits.yaml"))
    for index, limit in enumerate(limits):
        for other in limits[:index]:
            for operation in limit.operations:
                start = max(limit.nodes, other.nodes)
                if all(entry.applies_to(operation, limit.fabric, start) for entry in (limit, other)):
                    raise ValueError(f"data/network_limits.yaml: two entries for {operation} on {start} nodes")
    return limits


def find_limit(operation: str, fabric: str, nodes: int) -> NetworkLimit | None:
    """The entry for an operation over ``fabric`` on this number of nodes; None if no share is known.

    EFA is RDMA: without an entry of its own, that of RDMA counts.
    """
    limits = (limit for limit in network_limits() if limit.applies_to(operation, fabric, nodes))
    return next(limits, None) or (find_limit(operation, "rdma", nodes) if fabric == "efa" else None)
