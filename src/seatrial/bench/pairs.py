"""Exchanges between two nodes at a time, in rounds of disjoint pairs.

They go through the group of all ranks: what two of its ranks send each other is no other rank's affair, so that no
groups need to be made, however many pairs there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from seatrial.bench.collectives import time_operation
from seatrial.bench.exact import Mismatch, Part, fill, verify
from seatrial.bench.rank import gather


@dataclass(frozen=True)
class Line:
    """What one rank saw of its exchange with a partner: seconds of each window, and data that arrived wrong."""

    rank: int
    partner: int
    seconds: tuple[float, ...]
    mismatch: Mismatch | None


def circle(nodes: int, most: int) -> list[list[tuple[int, int]]]:
    """At most ``most`` rounds in which each of ``nodes`` meets one other, and never the same twice.

    The circle method of round-robin tournaments (Kirkman, 1847): one stays, the others move on by one seat. All rounds
    together hold every pair once; with an odd number of nodes one of them rests in each.
    """
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(min(most, len(seats) - 1)):
        facing = [(seats[place], seats[-1 - place]) for place in range(len(seats) // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def exchange(partners: Mapping[int, int], size: int, device: str, seconds: float) -> list[Line]:
    """Let all ranks send ``size`` bytes to their partner and receive as many from it, both at once, again and again.

    ``partners`` holds both directions of each pair; who is not in it looks on. Called by all ranks with the same.
    Windows begin together on all ranks; see ``time_operation``. One more exchange is checked bit by bit.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    partner = partners.get(rank)
    count = 0 if partner is None else size // 4
    sent, received = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    fill(sent, rank, ranks)
    run = _exchange(sent, received, partner)
    timings = time_operation(run, torch.device(device), seconds)
    fill(received, rank + 1, ranks)  # what it must not hold afterwards
    run()
    mismatches = gather(None if partner is None else verify(received, ranks, [Part(count, 0, (partner,))]))
    return [Line(one, other, timings.of_rank(one), mismatches[one]) for one, other in sorted(partners.items())]


def _exchange(sent: torch.Tensor, received: torch.Tensor, partner: int | None) -> Callable[[], None]:
    def run() -> None:
        if partner is not None:
            both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

    return run
