"""Compares the flight-recorder dumps of all ranks: which rank is absent from the collective that the others wait in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from seatrial.discover.flight_recorder import DEFAULT_GROUP, Dump, Group, Operation

# Collectives whose sizes may differ between ranks: only the root has all tensors, or each rank has its own share
_UNEQUAL_SIZES = ("all_to_all", "alltoall", "scatter", "gather", "all_gather_v", "reduce_scatter_v")


@dataclass(frozen=True)
class CollectiveHang:
    """A collective, or a transfer between two ranks, that is not completed.

    ``group``: name of the process group. ``seq``: number of the collective in the group.
    ``waiting``: rank → its operation, for the ranks that have enqueued the collective and not completed it.
    ``absent``: rank → its last recorded operation in the group, for the ranks that have not enqueued the collective.
    ``without_dump``: members of the group that left no dump.
    ``differences``: quantity (operation, input sizes, output sizes, dtype) → value → ranks, for those that differ.
    ``members_recorded``: whether the members of the group are known. Gloo's dumps do not name them, so a member without
    a dump can be missing here.
    ``elsewhere``: absent rank → the other group in which it waits; such a rank is not the cause.
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
        """The waiting ranks whose GPU has not started the collective although the GPU of another rank has."""
        states = {rank: operation.state for rank, operation in self.waiting.items()}
        return tuple(rank for rank, state in states.items() if state == "scheduled" and "started" in states.values())

    @property
    def ranks_at_fault(self) -> tuple[int, ...]:
        """The ranks at fault according to the dumps; empty if the dumps do not show any.

        If ranks are absent: those of them that do not wait elsewhere. Else, if operations differ: the ranks with the
        rarest value, if they are a minority. Else the ranks without a dump, or else those that have not started.
        """
        if self.absent:
            return tuple(rank for rank in self.absent if rank not in self.elsewhere)
        if self.differences:
            by_value = next(iter(self.differences.values()))
            fewest = min(by_value.values(), key=len)
            is_minority = 2 * len(fewest) < sum(map(len, by_value.values()))
            return fewest if is_minority else ()
        return self.without_dump or self.not_started


def collective_hangs(dumps: Iterable[Dump], world_size: int = 0) -> list[CollectiveHang]:
    """The hangs of all process groups; those with ranks at fault come first.

    Of each group it is the first collective that is not completed. In a group without one: its incomplete transfers.

    ``world_size``: number of ranks of the job, 0 if it is unknown.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    groups: dict[tuple[str, tuple[int, ...]], dict[int, Group]] = {}
    for rank, dump in sorted(by_rank.items()):
        for group in dump.groups.values():
            groups.setdefault((group.name, group.members), {})[rank] = group
    hangs = []
    for (name, members), group_by_rank in groups.items():
        is_default, members_recorded = DEFAULT_GROUP in name, bool(members)
        if not members:
            members = tuple(range(max(world_size, max(by_rank) + 1))) if is_default else tuple(group_by_rank)
        if hang := _collective_hang(name, members, group_by_rank, by_rank):
            hangs.append(replace(hang, members_recorded=members_recorded or (is_default and world_size > 0)))
        else:
            hangs += _transfer_hangs(name, members, group_by_rank, by_rank)
    group_by_waiting_rank = {rank: hang.group for hang in hangs for rank in hang.waiting}
    located = [_with_elsewhere(hang, group_by_waiting_rank) for hang in hangs]
    return sorted(located, key=lambda hang: (not hang.ranks_at_fault, hang.group))


def _collective_hang(
    name: str, members: Sequence[int], group_by_rank: Mapping[int, Group], by_rank: Mapping[int, Dump]
) -> CollectiveHang | None:
    seq = min((group.first_incomplete for group in group_by_rank.values() if group.first_incomplete), default=None)
    if seq is None:
        return None
    recorded = {rank: group.collectives[seq] for rank, group in group_by_rank.items() if seq in group.collectives}
    waiting = {rank: operation for rank, operation in recorded.items() if operation.state != "completed"}
    absent: dict[int, Operation | None] = {}
    for rank in members:
        group = group_by_rank.get(rank)
        if rank in by_rank and (group is None or group.last < seq):
            absent[rank] = group.collectives.get(group.last) if group else None
    return CollectiveHang(
        group=name,
        seq=seq,
        name=next(iter(waiting.values())).name,
        waiting=waiting,
        absent=absent,
        without_dump=tuple(rank for rank in members if rank not in by_rank),
        differences=_differences(recorded),
    )


def _differences(operations: Mapping[int, Operation]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Quantity → value → ranks, for the quantities that differ between operations with the same number."""
    names = {operation.name for operation in operations.values()}
    values: dict[str, dict[int, str]] = {"operation": {rank: op.name for rank, op in operations.items()}}
    if len(names) == 1:
        if not next(iter(names)).startswith(_UNEQUAL_SIZES):
            values["input sizes"] = {rank: _sizes_text(op.input_sizes) for rank, op in operations.items()}
            values["output sizes"] = {rank: _sizes_text(op.output_sizes) for rank, op in operations.items()}
        values["dtype"] = {rank: ", ".join(op.dtypes) for rank, op in operations.items() if op.dtypes}
    differences = {}
    for quantity, by_rank in values.items():
        ranks_by_value: dict[str, list[int]] = {}
        for rank, value in by_rank.items():
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            differences[quantity] = {value: tuple(ranks) for value, ranks in ranks_by_value.items()}
    return differences


def _sizes_text(sizes: tuple[tuple[int, ...], ...]) -> str:
    return str([list(dimensions) for dimensions in sizes])


def _transfer_hangs(
    name: str, members: Sequence[int], group_by_rank: Mapping[int, Group], by_rank: Mapping[int, Dump]
) -> list[CollectiveHang]:
    """For each rank, its first incomplete transfer for which the other end has no matching incomplete transfer."""
    hangs = []
    for rank, group in group_by_rank.items():
        for operation in group.transfers:
            kind, _, ends = operation.name.partition(" ")  # send 0->1, recv 1<-0: ranks within the group
            arrow, peer_kind, peer_arrow = ("->", "recv", "<-") if kind == "send" else ("<-", "send", "->")
            own_index, _, peer_index = ends.partition(arrow)
            if not peer_index.isdecimal() or int(peer_index) >= len(members):
                continue
            peer = sorted(members)[int(peer_index)]
            other = group_by_rank.get(peer)
            matching_name = f"{peer_kind} {peer_index}{peer_arrow}{own_index}"
            if other and any(candidate.name == matching_name for candidate in other.transfers):
                continue
            last = other.collectives.get(other.last) if other else None
            absent = {peer: last} if peer in by_rank else {}
            missing = () if peer in by_rank else (peer,)
            hangs.append(CollectiveHang(name, operation.seq, operation.name, {rank: operation}, absent, missing))
            break  # later transfers of this rank wait for this one
    return hangs


def _with_elsewhere(hang: CollectiveHang, group_by_waiting_rank: Mapping[int, str]) -> CollectiveHang:
    groups = {rank: group_by_waiting_rank.get(rank, hang.group) for rank in hang.absent}
    return replace(hang, elsewhere={rank: group for rank, group in groups.items() if group != hang.group})
