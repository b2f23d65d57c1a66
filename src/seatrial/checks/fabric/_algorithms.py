"""By which algorithm and protocol NCCL carries each operation at each size that a trial measures, by NCCL's own log.

It writes a line for each operation or for none, and a small one would be measured by that: so processes of their own,
beside the ranks, run each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.checks.base import Context
from seatrial.checks.fabric._collective import CollectiveOptions, default_sizes
from seatrial.checks.fabric._nccl_log import logging_environment
from seatrial.checks.fabric._results import size_label
from seatrial.discover import nccl_log

POINT_TO_POINT = "point to point"  # sends and receives: NCCL has no algorithm for these, and writes no line
TIMEOUT_S = 60.0  # for processes that take some seconds


def logged_choices(context: Context) -> dict[str, Any]:
    """Operation → ``dtype``, ``buffers`` and, ``by_size``, what NCCL chose; or under ``not_told`` why that is unknown.

    Called by all ranks together; rank 0 has the answer, by the log of its own child.
    """
    from seatrial.bench import child_ranks
    from seatrial.bench.operations import OPERATIONS

    wanted = sorted(requests(context.options_by_check, OPERATIONS), key=lambda ask: -ask["size"])
    if not wanted:
        return {}
    answers = child_ranks.run_child_ranks(
        "seatrial.bench.algorithms",
        {"asks": wanted},
        logging_environment(context.artifacts_dir, "choices"),
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / "choices",
        limit_s=TIMEOUT_S,
    )
    failed = {rank: answer for rank, answer in enumerate(answers) if answer.error}
    if failed:
        first = child_ranks.first_failed_rank(failed)
        return {"not_told": child_ranks.failure_text(first, failed[first])}
    return parse_answer(wanted, answers[0].value) if context.rank == 0 else {}


def requests(planned: Mapping[str, Mapping[str, Any]], operations: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Each operation at each size that the checks of a job measure on GPUs, as ``bench.algorithms`` takes them.

    The largest come first: memory for the others is then cut from theirs.
    """
    for name in operations:
        if (planned_options := planned.get(f"collectives.{name}")) is not None:
            options = CollectiveOptions.model_validate(planned_options)
            sizes = {size for mode in options.modes for size in default_sizes(name).for_mode(mode, options, gpu=True)}
            shape = {"operation": name, "dtype": options.dtype, "buffers": options.buffers}
            yield from ({**shape, "size": size} for size in sorted(sizes, reverse=True))


def parse_answer(wanted: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> dict[str, Any]:
    """``answer`` has, for each of ``wanted``, its exact bytes and from where to where its lines are in the log."""
    from seatrial.bench.buffers import ALLOCATORS

    found: dict[str, Any] = {}
    for ask, (size, *lines) in zip(wanted, answer["told"], strict=True):
        empty = {"dtype": ask["dtype"], "buffers": ALLOCATORS[ask["buffers"]], "by_size": {}}
        by_size = found.setdefault(ask["operation"], empty)["by_size"]
        by_size[size_label(ask["size"])] = {"bytes": size, **_choice(Path(answer["log"]), ask["operation"], lines)}
    return {name: {**one, "by_size": dict(reversed(one["by_size"].items()))} for name, one in found.items()}


def _choice(log: Path, operation: str, lines: Sequence[int]) -> dict[str, object]:
    if not lines:
        return {"algorithm": "not measured: no memory"}
    start, end = lines
    told = nccl_log.read(log, end - start, start).choices
    if not told:
        return {"algorithm": POINT_TO_POINT if operation in ("all_to_all", "send_receive") else "not told"}
    last = told[-1]
    return {"algorithm": last.algorithm, "protocol": last.protocol or "not told", "channels": last.channels}
