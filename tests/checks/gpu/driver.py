"""Faults of devices for checks in three processes; see tests.bench.cluster."""

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


def _with_cpu_model(model: str) -> Any:
    return lambda device: {**_describe(device), "cpu": model}


def _different_models(process: int) -> AbstractContextManager[Any]:
    return patch.object(rank, "describe_device", _with_cpu_model(f"model {process}"))


def _different_digests(process: int) -> AbstractContextManager[Any]:
    return patch.object(compute, "chain_digest", lambda *arguments: f"digest {process}")


def _transient_mismatch(process: int) -> AbstractContextManager[Any] | None:
    """A wrong digest in the first round only."""
    calls = iter(("wrong",))
    return patch.object(compute, "chain_digest", lambda *a: next(calls, None) or _digest(*a)) if process == 2 else None


class FakePinnedBuffers:
    """Copies that take 1 ms (h2d) or 2 ms, or longer on a busy machine; start and end times are written to a file.

    ``nominal_s`` is the sum of the nominal times, which ``_nominal_time`` returns as measured time.
    """

    size = 1_000_000
    nominal_s = 0.0
    host_placement = "test placement"
    concurrent = staticmethod(nullcontext)

    def __init__(self, device: str) -> None:
        assert device == "cpu"

    def h2d(self) -> None:
        self._copy("h2d", 0.001)

    def d2h(self) -> None:
        self._copy("d2h", 0.002)

    def bidirectional(self) -> None:
        self._copy("bidirectional", 0.002)

    def _copy(self, direction: str, seconds: float) -> None:
        started = time.monotonic()
        time.sleep(seconds)
        FakePinnedBuffers.nominal_s += seconds
        with (Path(os.environ[cluster.FOLDER]) / f"copies{dist.get_rank()}").open("a") as log:
            log.write(f"{direction} {started} {time.monotonic()}\n")


def _nominal_time(operation: Any, count: int, **options: Any) -> float:
    before = FakePinnedBuffers.nominal_s
    for _ in range(count):
        operation()
    return (FakePinnedBuffers.nominal_s - before) / count


def _time_peer_copies(gpus: int, seconds: float, progress: Any) -> list[transfer.PeerCopy]:
    def timing_of(seconds: float) -> DeviceTiming:
        return DeviceTiming((seconds,) * 3, 1, 0.0, 0.0)

    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    return [
        transfer.PeerCopy(a, b, a < b, timing_of(UNIDIRECTIONAL_S * (1 + a)), timing_of(BIDIRECTIONAL_S))
        for a, b in pairs
    ]


FAULTS: dict[str, cluster.Fault] = {
    "wrong_rank_2": cluster.on(2, compute, "chain_digest", lambda *arguments: "wrong"),
    "wrong_rank_1": cluster.on(1, compute, "chain_digest", lambda *arguments: "wrong"),
    "transient": _transient_mismatch,
    "different_digests": _different_digests,
    "unique_model": cluster.on(2, rank, "describe_device", _with_cpu_model("another model")),
    "different_models": _different_models,
    "other_libraries": cluster.on(0, compute, "describe_arithmetic", lambda device: "older torch"),
    "pinned": cluster.everywhere(transfer, "PinnedBuffers", FakePinnedBuffers),
    "nominal_time": cluster.everywhere(timing, "_time_window", _nominal_time),
    "peers": cluster.everywhere(transfer, "time_peer_copies", _time_peer_copies),
}
