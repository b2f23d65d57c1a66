"""Finds hanging collectives by comparing the flight-recorder dumps of all ranks: which ranks wait, which are absent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from seatrial.discover.flight_recorder import DEFAULT_GROUP, Dump, Group, Operation
from seatrial.util.grouping import grouped

# Collectives whose sizes may differ between ranks, since only the root has all tensors, or since the parts of the ranks
# have different sizes
_UNEQUAL_SIZES = ("all_to_all", "alltoall", "scatter", "gather", "all_gather_v", "reduce_scatter_v")


@dataclass(frozen=True)
class CollectiveHang:
    """A collective, or a transfer between two ranks, that is not completed.

    ``group``: name of the process group. ``seq``: number of the collective or transfer in the group.
    ``waiting``: rank → its operation, for the ranks that have enqueued the collective and not completed it.
    ``absent``: rank → its last recorded operation in the group, for the ranks that have not enqueued the collective.
    ``without_dump``: members of the group that left no dump.
    ``differences``: quantity (operation, input sizes, output sizes, dtype) → value → ranks, for the quantities that
    differ.
    ``members_recorded``: whether the members of the group are known; gloo's dumps do not name them. If they are not
    known, ``without_dump`` can be incomplete.
    ``elsewhere``: absent rank → the other group in which it waits; such a rank is not the cause.
    For a transfer, ``waiting`` has one of its two ranks, and ``absent`` or ``without_dump`` the other.
    """

    group: str
    seq: int
    name: str
    waiting: Mapping[int, Operation]
    absent: Mapping[int, Operation | None]
    without_dump: tuple[int, ...]
    differences: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    members_recorded: bool = True
    elsewhere: Mapping[int, str] = field(default_factory=dict)

    @property
    def not_started(self) -> tuple[int, ...]:
        """The waiting ranks whose GPU has not started the collective; empty if no GPU has started it."""
        states = {rank: operation.state for rank, operation in self.waiting.items()}
        return tuple(rank for rank, state in states.items() if state == "scheduled" and "started" in states.values())

    @property
    def ranks_at_fault(self) -> tuple[int, ...]:
        """The ranks at fault according to the dumps, by the first case that holds; empty if the dumps do not show any.

        1. Ranks are absent: the absent ranks that do not wait in another group.
        2. The operations differ: the ranks with the rarest value, if they are a minority.
        3. Ranks have no dump: these ranks.
        4. In all other cases: the ranks in ``not_started``.
        """
        if self.absent:
            return tuple(rank for rank in self.absent if rank not in self.elsewhere)
        if self.differences:
            ranks_by_value = next(iter(self.differences.values()))
            fewest_ranks = min(ranks_by_value.values(), key=len)
            is_minority = 2 * len(fewest_ranks) < sum(map(len, ranks_by_value.values()))
            return fewest_ranks if is_minority else ()
        return self.without_dump or self.not_started


def collective_hangs(dumps: Iterable[Dump], world_size: int = 0) -> list[CollectiveHang]:
    """The hangs of all process groups; hangs with ranks at fault come first.

    The hang of a group is its first incomplete collective. A group without an incomplete collective can have several
    hangs: its incomplete transfers.

    ``world_size``: number of ranks of the job, 0 if it is unknown.
    """
    dump_by_rank = {dump.rank: dump for dump in dumps}
    recorded_groups = grouped(
        ((group.name, group.members), (rank, group))
        for rank, dump in sorted(dump_by_rank.items())
        for group in dump.groups.values()
    )
    hangs = []
    for (name, members), rank_groups in recorded_groups.items():
        group_by_rank = dict(rank_groups)
        is_default, members_recorded = DEFAULT_GROUP in name, bool(members)
        if not members:
            members = tuple(range(max(world_size, max(dump_by_rank) + 1))) if is_default else tuple(group_by_rank)
        if hang := _collective_hang(name, members, group_by_rank, dump_by_rank):
            hangs.append(replace(hang, members_recorded=members_recorded or (is_default and world_size > 0)))
        else:
            hangs += _transfer_hangs(name, members, group_by_rank, dump_by_rank)
    group_by_waiting_rank = {rank: hang.group for hang in hangs for rank in hang.waiting}
    for index, hang in enumerate(hangs):
        groups = {rank: group_by_waiting_rank.get(rank, hang.group) for rank in hang.absent}
        elsewhere = {rank: group for rank, group in groups.items() if group != hang.group}
        hangs[index] = replace(hang, elsewhere=elsewhere)
    return sorted(hangs, key=lambda hang: (not hang.ranks_at_fault, hang.group))


def _collective_hang(
    name: str, members: Sequence[int], group_by_rank: Mapping[int, Group], dump_by_rank: Mapping[int, Dump]
) -> CollectiveHang | None:
    """The first incomplete collective of a group over all ranks; None if there is none."""
    incomplete_seqs = [group.first_incomplete_seq for group in group_by_rank.values()]
    seq = min(filter(None, incomplete_seqs), default=None)
    if seq is None:
        return None
    enqueued = {rank: group.collectives[seq] for rank, group in group_by_rank.items() if seq in group.collectives}
    waiting = {rank: operation for rank, operation in enqueued.items() if operation.state != "completed"}
    absent: dict[int, Operation | None] = {}
    for rank in members:
        group = group_by_rank.get(rank)
        if rank in dump_by_rank and (group is None or group.last_seq < seq):
            absent[rank] = group.collectives.get(group.last_seq) if group else None
    return CollectiveHang(
        group=name,
        seq=seq,
        name=next(iter(waiting.values())).name,
        waiting=waiting,
        absent=absent,
        without_dump=tuple(rank for rank in members if rank not in dump_by_rank),
        differences=_differences(enqueued),
    )


def _differences(operation_by_rank: Mapping[int, Operation]) -> dict[str, dict[str, tuple[int, ...]]]:
    names = {operation.name for operation in operation_by_rank.values()}
    texts: dict[str, Callable[[Operation], str]] = {"operation": lambda operation: operation.name}
    if len(names) == 1:
        if not next(iter(names)).startswith(_UNEQUAL_SIZES):
            texts["input sizes"] = lambda operation: _sizes_text(operation.input_sizes)
            texts["output sizes"] = lambda operation: _sizes_text(operation.output_sizes)
        texts["dtype"] = lambda operation: ", ".join(operation.dtypes)
    differences = {}
    for quantity, text in texts.items():
        ranks = grouped((value, rank) for rank, operation in operation_by_rank.items() if (value := text(operation)))
        if len(ranks) > 1:
            differences[quantity] = {value: tuple(ranks_with_value) for value, ranks_with_value in ranks.items()}
    return differences


def _sizes_text(sizes: tuple[tuple[int, ...], ...]) -> str:
    return str([list(dimensions) for dimensions in sizes])


def _transfer_hangs(
    name: str, members: Sequence[int], group_by_rank: Mapping[int, Group], dump_by_rank: Mapping[int, Dump]
) -> list[CollectiveHang]:
    """For each rank, its first incomplete transfer for which the peer has no matching incomplete transfer."""
    hangs = []
    for rank, group in group_by_rank.items():
        for operation in group.transfers:
            kind, _, index_pair = operation.name.partition(" ")  # send 0->1, recv 1<-0: ranks within the group
            arrow, peer_kind, peer_arrow = ("->", "recv", "<-") if kind == "send" else ("<-", "send", "->")
            rank_index, _, peer_index = index_pair.partition(arrow)
            if not peer_index.isdecimal() or int(peer_index) >= len(members):
                continue
            peer = sorted(members)[int(peer_index)]
            peer_group = group_by_rank.get(peer)
            matching_name = f"{peer_kind} {peer_index}{peer_arrow}{rank_index}"
            if peer_group and any(transfer.name == matching_name for transfer in peer_group.transfers):
                continue
            peer_operation = peer_group.collectives.get(peer_group.last_seq) if peer_group else None
            hang = CollectiveHang(
                group=name,
                seq=operation.seq,
                name=operation.name,
                waiting={rank: operation},
                absent={peer: peer_operation} if peer in dump_by_rank else {},
                without_dump=() if peer in dump_by_rank else (peer,),
            )
            hangs.append(hang)
            break  # later transfers of this rank wait for this one
    return hangs
