"""Faults of a fabric, put in for real among four processes; see tests.bench.cluster."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.bench import cluster

RANKS = 4
LATE_S = 0.05  # far more than an exchange of 64 KiB takes on a busy machine
WRONG_OFFSET = 7

_exchange = dist.batch_isend_irecv


def _late(operations: list[Any]) -> Any:
    time.sleep(LATE_S)
    return _exchange(operations)


def _late_with_two(operations: list[Any]) -> Any:
    return _late(operations) if operations[0].peer == 2 else _exchange(operations)


def _corrupt(operations: list[Any]) -> Any:
    operations[0].tensor.view(torch.int32)[WRONG_OFFSET] += 1
    return _exchange(operations)


FAULTS = {
    "late": cluster.on(2, dist, "batch_isend_irecv", _late),
    "late_between_one_and_two": cluster.on(1, dist, "batch_isend_irecv", _late_with_two),
    "corrupt": cluster.on(3, dist, "batch_isend_irecv", _corrupt),
}
