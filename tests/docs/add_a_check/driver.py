"""Adds the checks of the page to the catalog; see tests.bench.cluster for FAULTS."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from seatrial.checks import catalog
from tests.bench.cluster import Fault, on
from tests.docs.add_a_check import free_memory, messages


def added() -> AbstractContextManager[Any]:
    checks = {check.name: check for check in (free_memory.CHECK, messages.CHECK)}
    return patch.dict(vars(catalog())["_loaded"], checks)


_send = dist.batch_isend_irecv


def _send_other_data(operations: list[Any]) -> Any:
    operations[0].tensor.view(torch.int32)[0] += 1
    return _send(operations)


FAULTS: dict[str, Fault] = {
    "added": lambda _rank: added(),
    "wrong_on_rank_2": on(2, dist, "batch_isend_irecv", _send_other_data),
}
