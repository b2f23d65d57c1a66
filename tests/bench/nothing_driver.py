"""Real gloo groups of two and three ranks in which every operation is checked, as it is and when it does nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from seatrial.bench import operations, pairs
from seatrial.bench.collectives import DTYPES, _check
from seatrial.bench.group import close_group, end_process, open_group
from seatrial.bench.operations import OPERATIONS, Operation
from seatrial.bench.torchcalls import TorchCalls
from tests.bench.cluster import _free_port

SIZES = (2, 3)
COUNT = 600  # elements, in whole blocks for two ranks and three


class TwoBuffers(TorchCalls):
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
    told = {"done": _check(made, made.run), "nothing": _check(made, lambda: None)}
    wrong = {word: {rank: asdict(one) for rank, one in found.items()} for word, found in told.items()}
    return {**wrong, "received": made.received.numel()}


def exchanged() -> dict[int, bool]:
    """Who of two partners sees that nothing was exchanged."""
    with patch.object(dist, "batch_isend_irecv", lambda _: []):
        lines = pairs.exchange({0: 1, 1: 0}, 4 * COUNT, "cpu", 0.01)
    return {line.rank: bool(line.mismatch and line.mismatch.wrong == COUNT) for line in lines}


def rank(number: int, ranks: int, port: int, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    open_group("cpu", 60)
    found: dict[str, Any] = {"pairs": exchanged()}
    with patch.object(operations, "calls_on", TwoBuffers):
        for name, usual in OPERATIONS.items():
            for one in filter(None, (usual, usual.elsewhere())):
                place = "in place" if one.in_place else "out of place"
                for dtype, kind in DTYPES.items():
                    found[f"{name} {place} {dtype}"] = checked(one, kind)
    if number == 0:
        out.write_text(json.dumps(found))
    close_group()
    end_process()


def main(folder: Path) -> None:
    """Processes that share what is imported by now, which takes longest at a start."""
    fork = multiprocessing.get_context("fork")
    for ranks in SIZES:
        port = _free_port()
        group = [fork.Process(target=rank, args=(one, ranks, port, folder / f"{ranks}.json")) for one in range(ranks)]
        for process in group:
            process.start()
        for process in group:
            process.join()
        if any(process.exitcode for process in group):
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
