"""The records of a search for slow nodes: limits, steps, rates, slow ranks, slow paths and the conclusion.

Rail i connects the ranks with index i of all nodes (GPUs with their NICs). A path is the network between two nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log, log1p
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from seatrial.model import Frozen

Stage = Literal["rounds", "suspects", "paths", "directions"]
Direction = Literal["sends", "receives", "both"]
Pair = tuple[str, str]  # names of two nodes

# Facts of the check that measures the steps: rows of PairRate, and node → subjects of its ranks
PAIR_RATES, RANKS_BY_NODE = "pair_rates", "ranks_by_node"


@dataclass(frozen=True)
class Limits:
    """The limits from which a rate counts as slow.

    ``min_deficit``: the smallest deficit that is a fault, as a share of the healthy rate. ``min_noise``: the smallest
    relative noise to assume, since few pairs may agree by chance. ``use_best``: the fastest of repeated rates counts
    instead of the median, since disturbances only lower a rate.
    """

    min_deficit: float
    min_noise: float
    use_best: bool = False

    @property
    def log_deficit(self) -> float:
        """``min_deficit`` on the scale of ``log_ratio``, as a positive number."""
        return -log1p(-self.min_deficit)


# NCCL: a fault of 5 % is found with noise of 1 %. CPUs: processes compete for cores, so that healthy rates differ by a
# factor of up to 4 (4 nodes on 2 cores), and only a rate below 40 % counts.
GPU_LIMITS = Limits(min_deficit=0.025, min_noise=0.005)
CPU_LIMITS = Limits(min_deficit=0.6, min_noise=0.2, use_best=True)


@dataclass(frozen=True)
class PairStep:
    """Disjoint pairs to measure concurrently. ``unidirectional``: only the first node of each pair sends."""

    stage: Stage
    pairs: tuple[Pair, ...]
    unidirectional: bool = False


class PairRate(Frozen):
    """The rate of each rail between two nodes in GB/s per direction; ``unidirectional``: only ``first`` sent.

    ``retransmitted``: the share of their TCP segments that the two nodes sent again; 0 also if TCP was not measured.
    """

    stage: Stage
    first: str
    second: str
    gb_s: tuple[Annotated[FiniteFloat, Field(ge=0, le=1e6)], ...] = Field(min_length=1)
    unidirectional: bool = False
    retransmitted: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _require_two_nodes(self) -> PairRate:
        if self.first == self.second:
            raise ValueError(f"a pair of {self.first} with itself")
        return self

    @property
    def pair(self) -> Pair:
        """Both names in alphabetical order."""
        return (self.first, self.second) if self.first < self.second else (self.second, self.first)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow with the ranks of all partner nodes; ``rail``: its index on ``node``.

    ``deficits``: 1 - rate / healthy rate of each repetition. ``direction``: None if it is unknown.
    """

    node: str
    rail: int
    deficits: tuple[float, ...]
    direction: Direction | None = None


@dataclass(frozen=True)
class SlowPath:
    """Two nodes that are slow with each other on a rail, but not with other nodes.

    ``deficits`` as in SlowRank. ``direction``: "sends" is from the first to the second node of ``pair``.
    """

    pair: Pair
    rail: int
    deficits: tuple[float, ...]
    direction: Direction | None = None


@dataclass(frozen=True)
class Conclusion:
    """The slow ranks, paths and rails among ``nodes`` nodes with ``rails`` rails each.

    ``suspects``: nodes that were slow in the first rounds, fewer than half of all. ``noise``: relative standard
    deviation of healthy pairs. ``healthy_gb_s``: the typical rate of a healthy pair on one rail. ``healthy_pairs``: the
    number of healthy pairs in the first rounds. ``healthy_range_gb_s``: the lowest and the highest rate of these pairs,
    each the mean over the rails. With two nodes the last two describe the healthy rails instead.
    """

    nodes: int
    rails: int
    ranks: tuple[SlowRank, ...] = ()
    paths: tuple[SlowPath, ...] = ()
    slow_rails: Mapping[int, float] = field(default_factory=dict)  # rail → deficit
    suspects: tuple[str, ...] = ()
    noise: float = 0.0
    healthy_gb_s: float = 0.0
    healthy_pairs: int = 0
    healthy_range_gb_s: tuple[float, float] = (0.0, 0.0)


def log_ratio(rate: float, reference: float) -> float:
    """Log of rate / reference; a rate of 0 counts as a millionth of the reference."""
    return log(max(rate / reference, 1e-6)) if reference else 0.0


def slow_direction(sends: bool, receives: bool) -> Direction | None:
    """The direction in which a transfer is slow: of two slow ones "both"."""
    if sends and receives:
        return "both"
    return "sends" if sends else "receives" if receives else None
