"""Exchanges between two nodes, or two GPUs of a node, at a time: in rounds of disjoint pairs.

What two ranks of a group send each other is no other rank's affair, so that no group needs to be made for a pair,
however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

import torch
import torch.distributed as dist

from seatrial.bench.collectives import AllocationError, algorithm_bandwidth, measure_back_to_back
from seatrial.bench.data_check import ExpectedPart, Mismatch
from seatrial.bench.operations import Allocate, Buffers, Operation, PreparedOperation, separate_buffers, unit_factor
from seatrial.model import SeatrialError, format_bytes


@dataclass(frozen=True)
class PairTiming:
    """What one rank saw of its exchange with a partner: seconds of each window, and data that arrived wrong."""

    rank: int
    partner: int
    seconds: tuple[float, ...]
    mismatch: Mismatch | None


def round_robin(nodes: int, max_rounds: int) -> list[list[tuple[int, int]]]:
    """At most ``most`` rounds in which each of ``nodes`` meets one other, and never the same twice.

    The circle method of round-robin tournaments (Kirkman, 1847): one stays, the others move on by one seat. All rounds
    together hold every pair once; with an odd number of nodes one of them rests in each.
    """
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(min(max_rounds, len(seats) - 1)):
        facing = [(seats[place], seats[-1 - place]) for place in range(len(seats) // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def partner_map(paired: Iterable[tuple[int, int]], members: Sequence[Sequence[int]]) -> dict[int, int]:
    """Rank → rank, both ways, of one round; ``members`` are the ranks of each that is paired.

    Raises ValueError where two that are paired have unlike numbers of ranks.
    """
    found: dict[int, int] = {}
    for a, b in paired:
        for one, other in zip(members[a], members[b], strict=True):
            found |= {one: other, other: one}
    return found


def measure_pairs(
    partners: Mapping[int, int], size: int, device: str, seconds: float, group: dist.ProcessGroup | None = None
) -> list[PairTiming]:
    """Let all ranks send ``size`` bytes to their partner and receive as many from it, both at once, again and again.

    ``partners`` holds both directions of each pair; who is not in it looks on. Called by all ranks with the same, each
    with the ``group`` that it shares with its partner (None: that of all ranks). Windows begin together on all ranks;
    see ``collectives.measure``. Raises SeatrialError on all ranks where the buffers do not fit on one of them.
    """
    try:
        result = measure_back_to_back(_operation(partners, group), size, "float32", device, seconds)
    except AllocationError as error:
        raise SeatrialError(f"no memory for two buffers of {format_bytes(size)}: {error.summary()}") from error
    return [
        PairTiming(one, other, result.timings.rank_windows(one), result.mismatches.get(one))
        for one, other in sorted(partners.items())
    ]


def _operation(partners: Mapping[int, int], group: dist.ProcessGroup | None) -> Operation:
    partner = partners.get(dist.get_rank())

    def buffers(count: int, allocate: Allocate) -> Buffers:
        return separate_buffers(0 if partner is None else count, allocate)

    def prepare_on(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
        def run() -> None:
            if partner is not None:
                both = [dist.P2POp(dist.isend, sent, partner, group), dist.P2POp(dist.irecv, received, partner, group)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()

        parts = [] if partner is None else [ExpectedPart(received.numel(), 0, partner)]
        return PreparedOperation(run, sent, received, parts)

    return Operation("exchange", "1", unit_factor, prepare_on, buffers)


@dataclass(frozen=True)
class PairResults:
    """What the exchanges of all rounds come to, in GB/s each way and GPU. Wrong data counts as no data at all.

    ``nodes``: the ranks of each of those that were paired, by name: of a node, or a single one where GPUs were.
    """

    timings: tuple[PairTiming, ...]
    size: int
    nodes: Mapping[str, Sequence[int]]
    subjects: Sequence[str]
    retries: tuple[PairTiming, ...] = ()  # of paths that were tried again

    @cached_property
    def corrupted(self) -> list[PairTiming]:
        """Those whose data arrived wrong, of the rounds and of what was tried again."""
        return [line for line in (*self.timings, *self.retries) if line.mismatch]

    @cached_property
    def _wrong(self) -> set[frozenset[int]]:
        return {frozenset((line.rank, line.partner)) for line in self.corrupted}

    def rates(self, line: PairTiming) -> tuple[float, ...]:
        wrong = frozenset((line.rank, line.partner)) in self._wrong
        return tuple(0.0 if wrong else algorithm_bandwidth(self.size, seconds) for seconds in line.seconds)

    @cached_property
    def best_rates(self) -> dict[int, tuple[float, ...]]:
        """The windows of each rank with its fastest partner: low only if it is slow with every one of them."""
        return self._best(self.timings)

    @cached_property
    def best_rates_with_retries(self) -> dict[int, tuple[float, ...]]:
        """The same, where what was tried again counts as well."""
        return self._best((*self.timings, *self.retries))

    def _best(self, lines: Sequence[PairTiming]) -> dict[int, tuple[float, ...]]:
        found: dict[int, tuple[float, ...]] = {}
        for line in lines:
            rates = self.rates(line)
            if line.rank not in found or median(rates) > median(found[line.rank]):
                found[line.rank] = rates
        return found

    @cached_property
    def median_best_rate(self) -> float:
        """The median over ranks of what each reaches with its fastest partner."""
        return median(median(rates) for rates in self.best_rates.values())

    @cached_property
    def by_pair(self) -> dict[tuple[str, str], list[PairTiming]]:
        """The lines between each two nodes, those of both ends."""
        return self._by_pair(self.timings)

    @cached_property
    def retries_by_pair(self) -> dict[tuple[str, str], list[PairTiming]]:
        return self._by_pair(self.retries)

    @cached_property
    def final_by_pair(self) -> dict[tuple[str, str], list[PairTiming]]:
        """The lines of each pair: those that it had alone, where it was tried again."""
        return {**self.by_pair, **self.retries_by_pair}

    def rate_matrix(self, by_pair: Mapping[tuple[str, str], Sequence[PairTiming]]) -> list[list[float | None]]:
        """GB/s each way between any two of ``nodes``, in their order; None where two did not meet."""
        names = list(self.nodes)
        gb_s: list[list[float | None]] = [[None] * len(names) for _ in names]
        for (a, b), lines in by_pair.items():
            row, column = names.index(a), names.index(b)
            gb_s[row][column] = gb_s[column][row] = round(median(self.pair_rates(lines)), 3)
        return gb_s

    def retry_rates(self) -> dict[tuple[str, str], dict[str, float]]:
        """GB/s of the pairs that were tried again, each time."""
        return {
            pair: {
                "among others": median(self.pair_rates(self.by_pair[pair])),
                "alone": median(self.pair_rates(lines)),
            }
            for pair, lines in self.retries_by_pair.items()
        }

    def slow_paths(self, min_share: float) -> list[tuple[str, str]]:
        """Pairs that reach less than ``least`` of what their ends do with others, the slowest first."""
        shares = {pair: median(found) for pair, lines in self.by_pair.items() if (found := self.pair_shares(lines))}
        return sorted((pair for pair, share in shares.items() if share < min_share), key=lambda pair: shares[pair])

    def slow_pairs(self, min_share: float) -> list[tuple[str, str]]:
        """Pairs that reach less than ``least`` of what is usual, whoever is at fault, the slowest first."""
        rates = {pair: median(self.pair_rates(lines)) for pair, lines in self.by_pair.items()}
        return sorted(
            (pair for pair, rate in rates.items() if rate < min_share * self.median_best_rate), key=rates.__getitem__
        )

    def _by_pair(self, lines: Sequence[PairTiming]) -> dict[tuple[str, str], list[PairTiming]]:
        home = {rank: node for node, ranks in self.nodes.items() for rank in ranks}
        order = list(self.nodes)
        found: dict[tuple[str, str], list[PairTiming]] = {}
        for line in lines:
            a, b = sorted((home[line.rank], home[line.partner]), key=order.index)
            found.setdefault((a, b), []).append(line)
        return found

    def pair_rates(self, lines: Sequence[PairTiming]) -> tuple[float, ...]:
        """As nccl-tests has it for send and receive: the bytes of one rank over the mean time of all ranks."""
        windows = zip(*(line.seconds for line in lines), strict=True)
        return tuple(algorithm_bandwidth(self.size, fmean(window)) for window in windows)

    def pair_shares(self, lines: Sequence[PairTiming]) -> tuple[float, ...]:
        """Of the slowest of these lines: its rate over what the weaker of its ends reaches with its best partner."""
        shares = []
        for line in lines:
            able = min(median(self.best_rates[line.rank]), median(self.best_rates[line.partner]))
            if able:  # an end that reaches nothing with anybody says nothing of the path
                shares.append(tuple(rate / able for rate in self.rates(line)))
        return min(shares, key=median, default=())
