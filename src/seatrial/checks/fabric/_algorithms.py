"""By which algorithm and protocol NCCL carries each operation at each size that a trial measures, by NCCL's own log.

It writes a line for each operation or for none, and a small one would be measured by that: so processes of their own,
beside the ranks, run each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.checks.base import Place
from seatrial.checks.fabric._collective import CollectiveOptions, sizes_of
from seatrial.checks.fabric._results import label
from seatrial.checks.fabric._transports import log_choices
from seatrial.discover import nccl

POINT_TO_POINT = "point to point"  # sends and receives: NCCL has no algorithm for these, and writes no line
LIMIT_S = 60.0  # for processes that take some seconds


def choices(place: Place) -> dict[str, Any]:
    """Operation → ``dtype``, ``buffers`` and, ``by_size``, what NCCL chose; or under ``not_told`` why that is unknown.

    Called by all ranks together; rank 0 has the answer, by the log of its own child.
    """
    from seatrial.bench import fresh_ranks
    from seatrial.bench.operations import OPERATIONS

    wanted = sorted(asks(place.planned, OPERATIONS), key=lambda ask: -ask["size"])
    if not wanted:
        return {}
    answers = fresh_ranks.ask_anew(
        "seatrial.bench.algorithms",
        {"asks": wanted},
        log_choices(place.out, "choices"),
        device=place.device,
        local_rank=place.local_rank,
        out=place.out / "choices",
        limit_s=LIMIT_S,
    )
    failed = {rank: answer for rank, answer in enumerate(answers) if answer.problem}
    if failed:
        first = fresh_ranks.first_to_fail(failed)
        return {"not_told": fresh_ranks.told(first, failed[first])}
    return read(wanted, answers[0].value) if place.rank == 0 else {}


def asks(planned: Mapping[str, Mapping[str, Any]], operations: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Each operation at each size that the checks of a job measure on GPUs, as ``bench.algorithms`` takes them.

    The largest come first: memory for the others is then cut from theirs.
    """
    for name in operations:
        if (planned_options := planned.get(f"collectives.{name}")) is not None:
            options = CollectiveOptions.model_validate(planned_options)
            sizes = {size for mode in options.modes for size in sizes_of(name).of(mode, options, gpu=True)}
            shape = {"operation": name, "dtype": options.dtype, "buffers": options.buffers}
            yield from ({**shape, "size": size} for size in sorted(sizes, reverse=True))


def read(wanted: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> dict[str, Any]:
    """``answer`` has, for each of ``wanted``, its exact bytes and from where to where its lines are in the log."""
    from seatrial.bench.buffers import SOURCES

    found: dict[str, Any] = {}
    for ask, (size, *lines) in zip(wanted, answer["told"], strict=True):
        empty = {"dtype": ask["dtype"], "buffers": SOURCES[ask["buffers"]], "by_size": {}}
        by_size = found.setdefault(ask["operation"], empty)["by_size"]
        by_size[label(ask["size"])] = {"bytes": size, **_choice(Path(answer["log"]), ask["operation"], lines)}
    return {name: {**one, "by_size": dict(reversed(one["by_size"].items()))} for name, one in found.items()}


def _choice(log: Path, operation: str, lines: Sequence[int]) -> dict[str, object]:
    if not lines:
        return {"algorithm": "not measured: no memory"}
    start, end = lines
    told = nccl.read(log, end - start, start).choices
    if not told:
        return {"algorithm": POINT_TO_POINT if operation in ("all_to_all", "send_receive") else "not told"}
    last = told[-1]
    return {"algorithm": last.algorithm, "protocol": last.protocol or "not told", "channels": last.channels}
