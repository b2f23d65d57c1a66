"""Reads dumps of torch's flight recorder: the collectives that a rank has enqueued, with their states.

torch writes one file per rank, ``comm_lib_trace_rank_3`` or ``nccl_trace_rank_3``: a pickle, or JSON without stacks.
Format: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, version 2.x (torch 2.5 to 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.util import plain_pickle
from seatrial.util.grouping import grouped
from seatrial.util.input_files import open_file, parse_json, read_bytes
from seatrial.util.text import printable

MAX_DUMP_BYTES = 64 * 2**20  # a dump of 20,000 collectives has 30 MB; by default torch keeps the last 2,000
DEFAULT_GROUP = "default_pg"  # torch's description of the group of all ranks
_START_BYTES = 4096  # the start of a file, which is_dump searches for _KEYS
_DUMP_NAME = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?:\.(?:json|pkl|pickle|bin))?")
_KEYS = (b'"comm_lib_version"', b'"pg_config"', b'"collective_seq_id"')  # one is near the start of a dump in JSON
_KEPT = 20  # collectives kept before and after the first incomplete one; also the number of transfers kept
# Maximum numbers of tensors, dimensions and frames that are kept of an entry, and of characters that are kept of a text
_MAX_TENSORS, _MAX_DIMENSIONS, _MAX_FRAMES, _MAX_TEXT = 64, 8, 100, 300
_MAX_ENTRIES, _MAX_RANKS = 100_000, 1_000_000  # larger than in real dumps; they bound memory for a damaged file
# Files of libraries: a frame in any other file is the user's
_LIBRARY_FILE = re.compile(r"/(?:site|dist)-packages/(?!seatrial/)|/torch/|/lib/python\d[^/]*/(?!site-)|^<")


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} in {'/'.join(self.file.split('/')[-2:])}:{self.line}"


class Operation(NamedTuple):
    """A collective or point-to-point operation of one rank. ``seq``: its number in the process group, from 1.

    ``name``: such as ``all_reduce`` or ``send 0->1``. ``state``: scheduled (enqueued), started (on the GPU) or
    completed; gloo has no state started. ``*_sizes``: one tuple of dimensions per tensor. ``frame``: the line of the
    user's code that calls the operation.
    """

    seq: int
    name: str
    state: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    frame: Frame | None


@dataclass
class Group:
    """A process group as one rank recorded it. ``members``: ranks of the group; empty if torch did not record them.

    ``last_seq``: number of the last enqueued collective. ``collectives``: number → collective, for the last one and
    those near the first incomplete one. ``transfers``: point-to-point operations that are not completed.
    """

    name: str
    members: tuple[int, ...]
    last_seq: int = 0
    collectives: dict[int, Operation] = field(default_factory=dict)
    transfers: list[Operation] = field(default_factory=list)

    @property
    def first_incomplete_seq(self) -> int | None:
        """The number of the first collective that is not completed; None if all are."""
        return min((seq for seq, operation in self.collectives.items() if operation.state != "completed"), default=None)


@dataclass(frozen=True)
class Dump:
    """The dump of one rank. ``groups``: process groups by name."""

    rank: int
    path: Path
    groups: Mapping[str, Group]


def dump_name(path: Path) -> tuple[str, int] | None:
    """The prefix and the rank in the name of a dump; None if the name ends without a number."""
    match = _DUMP_NAME.fullmatch(path.name)
    return (match["prefix"], int(match["rank"])) if match else None


def is_dump(path: Path) -> bool:
    """Whether the name ends with a rank, and the file is a pickle or is JSON with a key of the flight recorder."""
    if dump_name(path) is None:
        return False
    try:
        with open_file(path) as file:
            start = file.read(_START_BYTES)
    except OSError:
        return False
    return plain_pickle.is_pickle(start) or (start[:1] == b"{" and any(key in start for key in _KEYS))


def read_dump(path: Path) -> Dump:
    """The dump in a file. Raises OSError, or ValueError with the reason if the file is no dump."""
    prefix_and_rank = dump_name(path)
    if prefix_and_rank is None:
        raise ValueError("its name does not end with a rank")
    _, rank = prefix_and_rank
    content = read_bytes(path, MAX_DUMP_BYTES)
    document = plain_pickle.load(content) if plain_pickle.is_pickle(content[:2]) else parse_json(content)
    if not isinstance(document, dict) or not isinstance(document.get("pg_config"), dict):
        raise ValueError("it has no key pg_config: not a dump of torch's flight recorder")
    entries = document.get("entries", [])  # absent in JSON if nothing was recorded
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("its key entries is not a list of records: not a dump of torch's flight recorder")
    if len(entries) > _MAX_ENTRIES:
        raise ValueError(f"it has {len(entries)} entries, more than {_MAX_ENTRIES}")
    return Dump(rank, path, _groups(document, entries))


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame outside of libraries, or the innermost one if all are in libraries; None without frames.

    ``frames``: innermost first.
    """
    ordered = list(frames)
    return next((frame for frame in ordered if not _LIBRARY_FILE.search(frame.file)), ordered[0] if ordered else None)


def _groups(document: Mapping[str, Any], entries: list[dict[Any, Any]]) -> dict[str, Group]:
    members_by_name = _members_by_name(document["pg_config"])
    last_completed = _last_completed_by_id(document.get("pg_status"))
    groups: dict[str, Group] = {}
    for name, group_entries in grouped((_group_name(entry), entry) for entry in entries).items():
        group = groups[name] = Group(name, members_by_name.get(name.partition(" ")[0], ()))
        collectives: list[tuple[int, str, dict[Any, Any]]] = []  # number, state and entry
        for entry in group_entries:
            state = _state(entry, last_completed.get(str(entry.get("pg_id")), -1))
            if not _is_transfer(entry):
                collectives.append((_number(entry, "collective_seq_id"), state, entry))
            elif state != "completed" and len(group.transfers) < _KEPT:
                group.transfers.append(_operation(_number(entry, "p2p_seq_id"), entry, state))
        group.last_seq = max((seq for seq, _, _ in collectives), default=0)
        first_incomplete_seq = min(
            (seq for seq, state, _ in collectives if state != "completed"), default=group.last_seq
        )
        for seq, state, entry in collectives:
            if abs(seq - first_incomplete_seq) <= _KEPT or seq == group.last_seq:
                group.collectives.setdefault(seq, _operation(seq, entry, state))
    return groups


def _members_by_name(config: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Group name → its ranks, which torch writes as ``"[0, 1, 2]"``. Gloo leaves them out, or writes an empty list."""
    members = {}
    for name, group in config.items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, str) and len(ranks) < 8 * _MAX_RANKS:  # up to 8 characters for each rank
            members[_text(name)] = tuple(int(rank) for rank in re.findall(r"\d{1,7}", ranks))
    return members


def _last_completed_by_id(pg_status: object) -> dict[str, int]:
    """Id of a group → number of its last completed collective."""
    statuses = pg_status if isinstance(pg_status, dict) else {}
    return {
        str(group_id): _number(status, "last_completed_collective")
        for group_id, status in statuses.items()
        if isinstance(status, dict)
    }


def _group_name(entry: Mapping[Any, Any]) -> str:
    """Name and description of the entry's group: ``0 default_pg``; the name alone if the group has no description."""
    group = entry.get("process_group")
    parts = [_text(part) for part in group[:2]] if isinstance(group, list | tuple) else []
    return " ".join(part for part in parts if part not in ("", "undefined")) or "unnamed"


def _is_transfer(entry: Mapping[Any, Any]) -> bool:
    return entry.get("is_p2p") is True


def _state(entry: Mapping[Any, Any], last_completed: int) -> str:
    """The state of an entry. ``last_completed``: number of the last completed collective of its group.

    The state of gloo's entries stays scheduled. When they complete, but not when they fail, they are marked as retired.
    """
    name, state = str(entry.get("profiling_name")), entry.get("state")
    is_retired = name.startswith("gloo:") and entry.get("retired") is True
    is_passed = not _is_transfer(entry) and 0 < _number(entry, "collective_seq_id") <= last_completed
    if state == "completed" or is_retired or is_passed:
        return "completed"
    return "started" if state == "started" else "scheduled"


def _operation(seq: int, entry: Mapping[Any, Any], state: str) -> Operation:
    frames = entry.get("frames")
    stack = [
        Frame(_text(frame.get("filename")), _number(frame, "line"), _text(frame.get("name")))
        for frame in (frames[:_MAX_FRAMES] if isinstance(frames, list) else ())
        if isinstance(frame, dict)
    ]
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes")
    return Operation(
        seq=seq,
        name=_text(entry.get("profiling_name")).partition(":")[2] or "unnamed",
        state=state,
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        dtypes=tuple(sorted({_text(dtype) for dtype in dtypes[:_MAX_TENSORS]})) if isinstance(dtypes, list) else (),
        frame=user_frame(stack),
    )


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    tensors = value[:_MAX_TENSORS] if isinstance(value, list) else []
    return tuple(
        tuple(size for size in tensor[:_MAX_DIMENSIONS] if isinstance(size, int))
        for tensor in tensors
        if isinstance(tensor, list)
    )


def _number(record: Mapping[Any, Any], key: str) -> int:
    """The integer under ``key``, which can be a text (as in pg_status in JSON); -1 if there is none."""
    value = record.get(key)
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return value if isinstance(value, int) else -1


def _text(value: object) -> str:
    return printable(value[:_MAX_TEXT]) if isinstance(value, str) else ""
