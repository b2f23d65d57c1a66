"""Runs the checks of devices in three processes, with faults in what they compute or are."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from seatrial.bench import compute, rank, timing, transfer
from seatrial.bench.timing import DeviceTiming
from tests.bench import cluster

_describe, _digest = rank.describe_device, compute.chain_digest
UNIDIRECTIONAL_S, BIDIRECTIONAL_S = 0.002, 0.005


def _another(model: str) -> Any:
    return lambda device: {**_describe(device), "cpu": model}


def _own_models(me: int) -> AbstractContextManager[Any]:
    return patch.object(rank, "describe_device", _another(f"model {me}"))


def _own_digests(me: int) -> AbstractContextManager[Any]:
    return patch.object(compute, "chain_digest", lambda *arguments: f"digest {me}")


def _upset(me: int) -> AbstractContextManager[Any] | None:
    """Once wrong, right when repeated."""
    calls = iter(("wrong",))
    return patch.object(compute, "chain_digest", lambda *a: next(calls, None) or _digest(*a)) if me == 2 else None


class Pinned:
    """Copies take 1 ms (2 ms back), and longer on a busy machine; when each was is written beside the record.

    ``declared_s`` counts what they take by themselves: ``_as_declared`` times them by it.
    """

    size = 1_000_000
    declared_s = 0.0
    placement = "asked for beside the CPU"
    side_by_side = staticmethod(nullcontext)

    def __init__(self, device: str) -> None:
        assert device == "cpu"

    def h2d(self) -> None:
        self._take("h2d", 0.001)

    def d2h(self) -> None:
        self._take("d2h", 0.002)

    def both(self) -> None:
        self._take("both", 0.002)

    def _take(self, way: str, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        Pinned.declared_s += seconds
        with (Path(os.environ[cluster.FOLDER]) / f"copies{dist.get_rank()}").open("a") as log:
            log.write(f"{way} {began} {time.monotonic()}\n")


def _as_declared(operation: Any, count: int, **how: Any) -> float:
    before = Pinned.declared_s
    for _ in range(count):
        operation()
    return (Pinned.declared_s - before) / count


def _time_peers(gpus: int, seconds: float, note: Any) -> list[transfer.PeerCopy]:
    def timed(taken: float) -> DeviceTiming:
        return DeviceTiming((taken,) * 3, 1, 0.0, 0.0)

    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    return [transfer.PeerCopy(a, b, a < b, timed(UNIDIRECTIONAL_S * (1 + a)), timed(BIDIRECTIONAL_S)) for a, b in pairs]


FAULTS: dict[str, cluster.Fault] = {
    "odd_one": cluster.on(2, compute, "chain_digest", lambda *arguments: "wrong"),
    "odd_second": cluster.on(1, compute, "chain_digest", lambda *arguments: "wrong"),
    "upset": _upset,
    "own_digests": _own_digests,
    "stranger": cluster.on(2, rank, "describe_device", _another("another model")),
    "own_models": _own_models,
    "other_libraries": cluster.on(0, compute, "describe_arithmetic", lambda device: "torch of last year"),
    "pinned": cluster.everywhere(transfer, "Pinned", Pinned),
    "as_declared": cluster.everywhere(timing, "_window", _as_declared),
    "peers": cluster.everywhere(transfer, "time_peers", _time_peers),
}
