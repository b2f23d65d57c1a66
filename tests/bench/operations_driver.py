"""One rank of a real gloo group: every operation in every type, correct, and with one flipped bit in the result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from seatrial.bench import collectives
from seatrial.bench.group import close_group, open_group
from seatrial.bench.operations import OPERATIONS, Operation, PreparedOperation
from seatrial.bench.rank import gather

SIZE = 1003 * 4  # bytes: not a whole number of blocks for three ranks


def corrupted(operation: Operation) -> Operation:
    """The operation, flipping a bit of the data that rank 0 received after each run."""

    def prepare(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
        prepared = operation.prepare_with(sent, received)

        def run() -> None:
            prepared.run()
            if dist.get_rank() == 0:
                prepared.received.view(torch.int32)[5] ^= 1 << 9

        return replace(prepared, run=run)

    return replace(operation, prepare_with=prepare)


@contextmanager
def fake_graph(operation: Callable[[], object], count: int) -> Iterator[Callable[[], object]]:
    """Stands for a CUDA graph of ``count`` operations on a machine without a GPU."""

    def replay() -> None:
        for _ in range(count):
            operation()

    yield replay


def main() -> str:
    """On one rank: the results of every operation, as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    open_group("cpu", 60)
    results: dict[str, Any] = {}

    def measure(key: str, function: Callable[..., Any], operation: Operation, dtype: str = "float32") -> None:
        results[key] = asdict(function(operation, SIZE, dtype, "cpu", 0.01))

    for name, operation in OPERATIONS.items():
        for dtype in collectives.DTYPES:
            measure(f"{name} {dtype}", collectives.measure_back_to_back, operation, dtype)
        if (variant := operation.opposite_variant()) and variant.in_place:
            prepared = variant.prepare(12, torch.empty)
            results[f"{name} offsets"] = gather(abs(prepared.sent.data_ptr() - prepared.received.data_ptr()))
            measure(f"{name} in place", collectives.measure_back_to_back, variant)
        measure(f"{name} each operation", collectives.measure_each_operation, operation)
        with (
            patch.object(collectives, "_captured", fake_graph),
            patch.object(collectives, "OPERATIONS_PER_GRAPH", 2),
        ):
            measure(f"{name} graph", collectives.measure_cuda_graph, operation)
            measure(f"{name} corrupted graph", collectives.measure_cuda_graph, corrupted(operation))
        measure(f"{name} corrupted", collectives.measure_back_to_back, corrupted(operation))
    close_group()
    return json.dumps(results)
