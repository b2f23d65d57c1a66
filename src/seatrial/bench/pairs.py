"""Times send and receive between pairs of members (nodes, or GPUs of one node), in rounds of disjoint pairs.

Point-to-point operations involve two ranks only, so a pair needs no process group of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean, median
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from seatrial.bench.collectives import AllocationError, algorithm_bandwidth, measure_back_to_back
from seatrial.bench.data_check import ExpectedPart, Mismatch
from seatrial.bench.operations import Operation, PreparedOperation
from seatrial.model import SeatrialError, format_bytes
from seatrial.util.grouping import grouped


@dataclass(frozen=True)
class PairTiming:
    """Transfers of one rank with its partner. ``seconds``: seconds per operation in each window.

    ``mismatch``: wrong data that the rank received; None if the data was correct.
    """

    rank: int
    partner: int
    seconds: tuple[float, ...]
    mismatch: Mismatch | None


Member = TypeVar("Member", contravariant=True)


class Members(Protocol[Member]):
    """A mapping or a sequence of the ranks of each member."""

    def __getitem__(self, member: Member, /) -> Sequence[int]: ...


TimingsByPair = dict[tuple[str, str], list[PairTiming]]  # the names of the two members of a pair → timings of its ranks


def rounds_by_group(groups: Sequence[Hashable], max_rounds: int) -> list[list[tuple[int, int]]]:
    """At most ``max_rounds`` rounds of disjoint pairs of members; no pair occurs twice.

    ``groups[i]``: the group of member i, such as a switch. A pair is two indices of ``groups``. Rounds alternate: pairs
    inside of groups, then pairs of different groups. A member that finds no partner of this kind is paired with any
    other member. In pairs of different groups, the partners are half of all members apart in the order of groups, so
    that a round uses the paths between many groups.
    """
    order = sorted(range(len(groups)), key=lambda index: groups.index(groups[index]))
    partners: list[set[int]] = [set() for _ in groups]
    rounds = []
    for number in range(max_rounds):
        within_groups = number % 2 == 0
        paired: dict[int, int] = {}
        for any_group in (False, True):
            # First the members with the fewest partners so far: they were idle in an earlier round
            for position in sorted(range(len(order)), key=lambda position: len(partners[order[position]])):
                member = order[position]
                if member in paired:
                    continue
                start = position + (1 if within_groups else len(order) // 2 + number // 2)
                for candidate in (*order[start % len(order) :], *order[: start % len(order)]):
                    is_new = candidate not in paired and candidate != member and candidate not in partners[member]
                    same_group = groups[member] == groups[candidate]
                    if is_new and (any_group or same_group == within_groups):
                        paired |= {member: candidate, candidate: member}
                        partners[member].add(candidate)
                        partners[candidate].add(member)
                        break
        rounds.append(sorted({(min(pair), max(pair)) for pair in paired.items()}))
    return [pairs for pairs in rounds if pairs]


def partner_map(pairs: Iterable[tuple[Member, Member]], members: Members[Member]) -> dict[int, int]:
    """Rank → partner for all ranks of the paired members; ``members[i]``: the ranks of member i.

    Raises ValueError if paired members have different numbers of ranks.
    """
    partners: dict[int, int] = {}
    for a, b in pairs:
        for rank, partner in zip(members[a], members[b], strict=True):
            partners |= {rank: partner, partner: rank}
    return partners


def measure_pairs(
    partners: Mapping[int, int],
    size: int,
    device: str,
    seconds: float,
    group: dist.ProcessGroup | None = None,
    receivers: Collection[int] = (),
) -> list[PairTiming]:
    """Time transfers in which each rank sends ``size`` bytes to its partner and receives as many at the same time.

    ``partners`` has both ranks of each pair; other ranks are idle. ``receivers``: these ranks only receive, and their
    partners only send. Called by all ranks with the same ``partners``, each with the ``group`` that contains its
    partner (None: the group of all ranks). The operations are timed by ``measure_back_to_back``. Raises SeatrialError
    on all ranks if the buffers do not fit into the memory of one rank.
    """
    try:
        result = measure_back_to_back(_operation(partners, group, receivers), size, "float32", device, seconds)
    except AllocationError as error:
        buffers = f"two buffers of {format_bytes(size)}"
        raise SeatrialError(f"out of memory for {buffers}: {error.summary()}; use a smaller size") from error
    return [
        PairTiming(rank, partner, result.timings.rank_windows(rank), result.mismatches.get(rank))
        for rank, partner in sorted(partners.items())
    ]


def _operation(
    partners: Mapping[int, int], group: dist.ProcessGroup | None, receivers: Collection[int] = ()
) -> Operation:
    """The transfer of this rank with its partner as an Operation; a rank without a partner does nothing."""
    partner = partners.get(dist.get_rank())
    sends, receives = dist.get_rank() not in receivers, partner not in receivers

    def prepare(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
        if partner is None:
            return PreparedOperation(lambda: None, sent[:0], received[:0], [])

        def run() -> None:
            transfers = [dist.P2POp(dist.isend, sent, partner, group)] if sends else []
            transfers += [dist.P2POp(dist.irecv, received, partner, group)] if receives else []
            for work in dist.batch_isend_irecv(transfers):
                work.wait()

        expected = [ExpectedPart(received.numel(), 0, partner)] if receives else []
        return PreparedOperation(run, sent, received, expected)

    return Operation("pairs", prepare)


@dataclass(frozen=True)
class PairResults:
    """Timings of all rounds and retries, and the rates computed from them in GB/s per rank and direction.

    ``members``: name of each member → its ranks; a member is a node, or a GPU with one rank. ``subjects``: the subject
    of each rank's metrics. ``size``: bytes per operation and direction.
    """

    timings: tuple[PairTiming, ...]
    size: int
    members: Mapping[str, Sequence[int]]
    subjects: Sequence[str]
    retries: tuple[PairTiming, ...] = ()  # second timings of slow pairs, without concurrent pairs

    @cached_property
    def all_timings(self) -> tuple[PairTiming, ...]:
        return (*self.timings, *self.retries)

    @cached_property
    def _corrupted_pairs(self) -> set[frozenset[int]]:
        return {frozenset((timing.rank, timing.partner)) for timing in self.all_timings if timing.mismatch}

    def rates(self, timing: PairTiming) -> tuple[float, ...]:
        """GB/s of one rank in every window; 0 if its pair received wrong data in any round or retry."""
        is_corrupted = frozenset((timing.rank, timing.partner)) in self._corrupted_pairs
        return tuple(0.0 if is_corrupted else algorithm_bandwidth(self.size, seconds) for seconds in timing.seconds)

    @cached_property
    def best_rates(self) -> dict[int, tuple[float, ...]]:
        """Rank → its ``rates`` with its fastest partner, without retries.

        These rates are low only if the rank is slow with every partner.
        """
        return self.best_of(self.timings)

    def best_of(self, timings: Iterable[PairTiming]) -> dict[int, tuple[float, ...]]:
        """Rank → its ``rates`` with the highest median among ``timings``."""
        rates = grouped((timing.rank, self.rates(timing)) for timing in timings)
        return {rank: max(rates_of_rank, key=median) for rank, rates_of_rank in rates.items()}

    @cached_property
    def median_best_rate(self) -> float:
        """Median over ranks of the median of their ``best_rates``, in GB/s."""
        return median(median(rates) for rates in self.best_rates.values())

    @cached_property
    def by_pair(self) -> TimingsByPair:
        """Names of the two members of a pair → timings of all ranks of the pair, without retries."""
        return self._by_pair(self.timings)

    @cached_property
    def retries_by_pair(self) -> TimingsByPair:
        return self._by_pair(self.retries)

    @cached_property
    def final_by_pair(self) -> TimingsByPair:
        """As ``by_pair``, with the timings of the retry instead if there was one."""
        return {**self.by_pair, **self.retries_by_pair}

    @property
    def max_locatable(self) -> int:
        """Maximum number of bad members that can all be located.

        Up to this number every good member has a good partner, and a majority of members is good.
        """
        partner_counts = Counter(chain.from_iterable(self.by_pair))
        fewest_partners = min(partner_counts[name] for name in self.members)
        return max(0, min(fewest_partners - 1, (len(self.members) - 1) // 2))

    def rate_matrix(self, by_pair: TimingsByPair) -> list[list[float | None]]:
        """GB/s per direction between any two of ``members``, in their order; None if they were not paired."""
        names = list(self.members)
        gb_s: list[list[float | None]] = [[None] * len(names) for _ in names]
        for (a, b), timings in by_pair.items():
            row, column = names.index(a), names.index(b)
            gb_s[row][column] = gb_s[column][row] = round(median(self.pair_rates(timings)), 3)
        return gb_s

    def retry_rates(self) -> dict[tuple[str, str], dict[str, float]]:
        """Median GB/s of each retried pair: ``concurrent`` with other pairs, and ``single`` in the retry."""
        modes = {"concurrent": self.by_pair, "single": self.retries_by_pair}
        return {
            pair: {mode: median(self.pair_rates(by_pair[pair])) for mode, by_pair in modes.items()}
            for pair in self.retries_by_pair
        }

    def pairs_below(
        self, limit: float, values: Callable[[Sequence[PairTiming]], tuple[float, ...]]
    ) -> list[tuple[str, str]]:
        """The pairs whose median of ``values`` (``pair_rates``, ``pair_shares``) is below ``limit``, lowest first.

        Pairs without values are omitted.
        """
        medians = {pair: median(found) for pair, timings in self.by_pair.items() if (found := values(timings))}
        return sorted((pair for pair in medians if medians[pair] < limit), key=medians.__getitem__)

    def pair_rates(self, timings: Sequence[PairTiming]) -> tuple[float, ...]:
        """GB/s of a pair in every window: bytes per rank over the mean time of its ranks, as nccl-tests' sendrecv.

        Wrong data does not change this rate.
        """
        windows = zip(*(timing.seconds for timing in timings), strict=True)
        return tuple(algorithm_bandwidth(self.size, fmean(window)) for window in windows)

    def pair_shares(self, timings: Sequence[PairTiming]) -> tuple[float, ...]:
        """A pair's rates in every window, divided by the lower one of the best rates of rank and partner.

        Of several ranks in ``timings``, the rank with the lowest shares counts. A rank is left out if it or its partner
        received wrong data with every partner: the best rate is then 0. Empty if no rank is left.
        """
        shares = []
        for timing in timings:
            best = min(median(self.best_rates[timing.rank]), median(self.best_rates[timing.partner]))
            if best:
                shares.append(tuple(rate / best for rate in self.rates(timing)))
        return min(shares, key=median, default=())

    def _by_pair(self, timings: Sequence[PairTiming]) -> TimingsByPair:
        member_of_rank = {rank: name for name, ranks in self.members.items() for rank in ranks}
        order = list(self.members)
        by_pair: TimingsByPair = {}
        for timing in timings:
            a, b = sorted((member_of_rank[timing.rank], member_of_rank[timing.partner]), key=order.index)
            by_pair.setdefault((a, b), []).append(timing)
        return by_pair
