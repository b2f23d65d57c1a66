"""One rank of a real gloo group: every operation in every type, right, and then with one bit flipped on its way."""

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

SIZE = 1003 * 4  # bytes: no whole number of blocks for three ranks


def broken(operation: Operation) -> Operation:
    """The same, with a bit of what rank 0 received flipped after each run."""

    def prepare_on(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
        made = operation.prepare_with(sent, received)

        def run() -> None:
            made.run()
            if dist.get_rank() == 0:
                made.received.view(torch.int32)[5] ^= 1 << 9

        return replace(made, run=run)

    return replace(operation, prepare_with=prepare_on)


@contextmanager
def as_a_graph(operation: Callable[[], object], count: int) -> Iterator[Callable[[], object]]:
    """Stands for a CUDA graph of so many operations where there is no GPU."""

    def replay() -> None:
        for _ in range(count):
            operation()

    yield replay


def main() -> str:
    """On one rank: what each operation brought, as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    open_group("cpu", 60)
    found: dict[str, Any] = {}
    for name, operation in OPERATIONS.items():
        for dtype in collectives.DTYPES:
            found[f"{name} {dtype}"] = asdict(collectives.measure_back_to_back(operation, SIZE, dtype, "cpu", 0.01))
        if (other := operation.in_place_variant()) and other.in_place:
            made = other.prepare(12, torch.empty)
            found[f"{name} offsets"] = gather(abs(made.sent.data_ptr() - made.received.data_ptr()))
            found[f"{name} elsewhere"] = asdict(collectives.measure_back_to_back(other, SIZE, "float32", "cpu", 0.01))
        found[f"{name} one by one"] = asdict(
            collectives.measure_each_operation(operation, SIZE, "float32", "cpu", 0.01)
        )
        with patch.object(collectives, "_captured", as_a_graph), patch.object(collectives, "OPERATIONS_PER_GRAPH", 2):
            for word, one in (("", operation), (" broken", broken(operation))):
                result = collectives.measure_cuda_graph(one, SIZE, "float32", "cpu", 0.01)
                found[f"{name}{word} replayed"] = asdict(result)
        found[f"{name} broken"] = asdict(
            collectives.measure_back_to_back(broken(operation), SIZE, "float32", "cpu", 0.01)
        )
    close_group()
    return json.dumps(found)
