"""The algorithm and protocol that NCCL selects for each measured operation and size, read from NCCL's log.

NCCL logs either every operation or none, and logging slows small operations. Each operation therefore runs once in
separate child processes with logging enabled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from seatrial.checks.check import Context
from seatrial.checks.fabric._nccl_log import NOT_LOGGED, logging_environment
from seatrial.checks.fabric._sizes import CollectiveOptions, default_gpu_sizes, mode_sizes
from seatrial.hardware.network_time import TcpNetwork, limit_with_network
from seatrial.model import size_label

POINT_TO_POINT = "point to point"  # sends and receives have no algorithm, and NCCL logs none
TIMEOUT_S = 60.0  # the child processes run for a few seconds; a slow network extends this limit


def logged_choices(context: Context) -> dict[str, Any]:
    """Operation → ``dtype``, ``buffers`` and ``by_size`` with NCCL's choices, from the log of rank 0's child process.

    All ranks call this together; ranks other than 0 return an empty dict. If a child process fails, all ranks return
    ``{"unavailable": REASON}``.
    """
    from seatrial.bench import child_ranks, rank
    from seatrial.bench.operations import OPERATIONS

    nodes = len(set(rank.gather(context.node)))
    network = context.tcp_network
    # The largest size first: the allocator then serves smaller buffers from the memory of the largest
    ordered_requests = sorted(
        requests(context.options_by_check, OPERATIONS, nodes, network), key=lambda request: -request["size"]
    )
    if not ordered_requests:
        return {}
    results = child_ranks.run_child_ranks(
        "seatrial.bench.algorithms",
        {"requests": ordered_requests},
        logging_environment(context.artifacts_dir, "choices"),
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / "choices",
        spare_gpus="all",
        limit_s=TIMEOUT_S
        + sum(limit_with_network(0, network, request["operation"], request["size"], 1) for request in ordered_requests),
    )
    if failure := child_ranks.first_failure_text(results):
        return {"unavailable": failure}
    return choices_by_operation(ordered_requests, results[0].value) if context.rank == 0 else {}


def requests(
    options_by_check: Mapping[str, Mapping[str, Any]],
    operations: Iterable[str],
    nodes: int = 1,
    network: TcpNetwork | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield each operation and size that the checks of a job measure on GPUs, in the format of ``bench.algorithms``.

    The sizes of an operation are in descending order.
    """
    for name in operations:
        if f"collectives.{name}" not in options_by_check:
            continue
        options = CollectiveOptions.model_validate(options_by_check[f"collectives.{name}"])
        gpu_sizes = default_gpu_sizes(name, nodes, network)
        sizes = (mode_sizes(mode, options, gpu_sizes, gpu=True) for mode in options.modes)
        for size in sorted(set(chain.from_iterable(sizes)), reverse=True):
            yield {"operation": name, "dtype": options.dtype, "buffers": options.buffers, "size": size}


def choices_by_operation(requested: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> dict[str, Any]:
    """Operation → ``dtype``, ``buffers`` and ``by_size``: size → NCCL's choice, in ascending order of the size.

    ``requested``: the requests in descending order of the size. ``result``: the result of ``bench.algorithms``. Its
    ``log_ranges`` has a list for each request: the exact size and, if the operation ran, start and end of the operation
    in NCCL's log.
    """
    from seatrial.bench.buffers import ALLOCATORS

    choices: dict[str, Any] = {
        request["operation"]: {"dtype": request["dtype"], "buffers": ALLOCATORS[request["buffers"]], "by_size": {}}
        for request in requested
    }
    ascending = zip(reversed(requested), reversed(result["log_ranges"]), strict=True)
    for request, (exact_size, *log_range) in ascending:
        choice = _choice(Path(result["log"]), request["operation"], log_range)
        choices[request["operation"]]["by_size"][size_label(request["size"])] = {"bytes": exact_size, **choice}
    return choices


def _choice(log: Path, operation: str, log_range: Sequence[int]) -> dict[str, object]:
    """NCCL's choice for one operation.

    ``log_range``: start and end of the operation in NCCL's log; empty if the operation did not run.
    """
    from seatrial.discover import nccl_log

    if not log_range:
        return {"algorithm": "not measured: no memory"}
    start, end = log_range
    choices = nccl_log.read(log, end - start, start).choices
    if not choices:
        return {"algorithm": POINT_TO_POINT if operation in ("all_to_all", "send_receive") else NOT_LOGGED}
    last = choices[-1]
    return {"algorithm": last.algorithm, "protocol": last.protocol or NOT_LOGGED, "channels": last.channels}
