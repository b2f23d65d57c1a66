"""Real gloo groups of two and three ranks in which every operation is checked, as it is and when it does nothing."""

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

SIZES = (2, 3)
COUNT = 600  # elements, in whole blocks for two ranks and three


class TwoBuffers(TorchApi):
    """gloo with the operations out of place that only NCCL has: copied, then in place."""

    def all_reduce(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        return _after_copying(sent, received, super().all_reduce(received, received))

    def broadcast(self, sent: torch.Tensor, received: torch.Tensor, root: int) -> Callable[[], None]:
        return _after_copying(sent, received, super().broadcast(received, received, root))

    def reduce(self, sent: torch.Tensor, received: torch.Tensor, root: int) -> Callable[[], None]:
        return _after_copying(sent, received, super().reduce(received, received, root))


def _after_copying(sent: torch.Tensor, received: torch.Tensor, run: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        received.copy_(sent)
        run()

    return both


def checked(operation: Operation, dtype: torch.dtype) -> dict[str, Any]:
    """What is wrong after it ran, and what is wrong when then nothing runs, by rank."""
    made = operation.prepare(COUNT, lambda count: torch.empty(count, dtype=dtype))
    told = {"done": _check_result(made, made.run), "nothing": _check_result(made, lambda: None)}
    wrong = {word: {rank: asdict(one) for rank, one in found.items()} for word, found in told.items()}
    return {**wrong, "received": made.received.numel()}


def exchanged() -> dict[int, bool]:
    """Who of two partners sees that nothing was exchanged."""
    with patch.object(dist, "batch_isend_irecv", lambda _: []):
        lines = pairs.measure_pairs({0: 1, 1: 0}, 4 * COUNT, "cpu", 0.01)
    return {line.rank: bool(line.mismatch and line.mismatch.wrong == COUNT) for line in lines}


def main() -> str:
    """On one rank: what it saw of every operation, as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    open_group("cpu", 60)
    found: dict[str, Any] = {"pairs": exchanged()}
    with patch.object(operations, "collective_api", TwoBuffers):
        for name, usual in OPERATIONS.items():
            for one in filter(None, (usual, usual.in_place_variant())):
                place = "in place" if one.in_place else "out of place"
                for dtype, kind in DTYPES.items():
                    found[f"{name} {place} {dtype}"] = checked(one, kind)
    close_group()
    return json.dumps(found)
