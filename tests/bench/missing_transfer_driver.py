"""Real gloo groups of two and three ranks: data checks of every operation, after it ran and without running it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from seatrial.bench import operations, pairs
from seatrial.bench.collectives import DTYPES, _check_result
from seatrial.bench.group import close_group, open_group
from seatrial.bench.operations import OPERATIONS, Operation
from seatrial.bench.torch_api import TorchApi

WORLD_SIZES = (2, 3)
COUNT = 600  # elements: whole blocks for two and three ranks


class OutOfPlaceApi(TorchApi):
    """gloo with out-of-place variants, which only NCCL has: copies the input, then runs in place."""

    def prepare(self, name: str, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        if name not in ("all_reduce", "broadcast", "reduce"):
            return super().prepare(name, sent, received)
        run = super().prepare(name, received, received)

        def copy_and_run() -> None:
            received.copy_(sent)
            run()

        return copy_and_run


def check(operation: Operation, dtype: torch.dtype) -> dict[str, Any]:
    """Mismatches by rank after the operation, and after doing nothing instead."""
    prepared = operation.prepare(COUNT, lambda count: torch.empty(count, dtype=dtype))
    results = {"run": _check_result(prepared, prepared.run), "skipped": _check_result(prepared, lambda: None)}
    mismatches = {
        name: {rank: asdict(mismatch) for rank, mismatch in by_rank.items()} for name, by_rank in results.items()
    }
    return {**mismatches, "received": prepared.received.numel()}


def check_pairs() -> dict[int, bool]:
    """Whether each of two partners detects that no data was sent, by rank."""
    with patch.object(dist, "batch_isend_irecv", lambda _: []):
        timings = pairs.measure_pairs({0: 1, 1: 0}, 4 * COUNT, "cpu", 0.01)
    return {timing.rank: bool(timing.mismatch and timing.mismatch.wrong == COUNT) for timing in timings}


def main() -> str:
    """On one rank: the results of all operations, as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    open_group("cpu", 60)
    results: dict[str, Any] = {"pairs": check_pairs()}
    with patch.object(operations, "collective_api", OutOfPlaceApi):
        for name, default in OPERATIONS.items():
            for operation in filter(None, (default, default.opposite_variant())):
                placement = "in place" if operation.in_place else "out of place"
                for dtype, torch_dtype in DTYPES.items():
                    results[f"{name} {placement} {dtype}"] = check(operation, torch_dtype)
    close_group()
    return json.dumps(results)
