"""Runs a check's ``measure`` under torchrun as the worker does, scenario after scenario, with a fault put in.

``python -m torch.distributed.run … driver.py CHECK SCENARIOS.json OUT``: SCENARIOS maps a name to ``options``
and ``fault`` (a name in FAULTS, or null); each rank writes OUT/rank<N>.json.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from seatrial.bench import collectives
from seatrial.bench.data_check import verify
from seatrial.bench.group import close_group, open_group
from seatrial.bench.operations import OPERATIONS, PreparedOperation
from seatrial.checks import catalog
from seatrial.checks.base import Context
from seatrial.model import Fact, Metric, Series

Fault = Callable[[], AbstractContextManager[Any]]
VICTIM = 1
WRONG_OFFSET = 7
FLIPPED_BIT = 3
LATE_S = 0.004
STARVED_ABOVE = 2**20  # elements


def _all_reduce_with(before: Callable[[torch.Tensor], object], after: Callable[[torch.Tensor], object]) -> Fault:
    """Replace all-reduce by the real one with something done to the buffer before and after it."""
    real = OPERATIONS["all_reduce"]

    def prepare_on(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
        made = real.prepare_with(sent, received)

        def run() -> None:
            before(made.sent)
            made.run()
            after(made.received)

        return replace(made, run=run)

    return lambda: patch.dict(OPERATIONS, all_reduce=replace(real, prepare_with=prepare_on))


def _starve() -> AbstractContextManager[Any]:
    real = torch.empty

    def stingy(count: int, **options: Any) -> torch.Tensor:
        if count > STARVED_ABOVE:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more\nand a second line")
        return real(count, **options)

    return patch.object(torch, "empty", stingy)


def _nothing(tensor: torch.Tensor) -> None:
    del tensor


def _dawdle(tensor: torch.Tensor) -> None:
    del tensor
    time.sleep(LATE_S)


def _add_one(tensor: torch.Tensor) -> None:
    tensor[WRONG_OFFSET] += 1


def _flip_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[WRONG_OFFSET] ^= 1 << FLIPPED_BIT


def _starve_check() -> AbstractContextManager[Any]:
    """The buffers fit, and what comparing them takes does not."""
    real = verify

    def stingy(buffer: torch.Tensor, *rest: Any) -> Any:
        if buffer.numel() > STARVED_ABOVE:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to compare")
        return real(buffer, *rest)

    return patch.object(collectives, "verify", stingy)


FAULTS: dict[str, Fault] = {
    "wrong_contribution": _all_reduce_with(_add_one, _nothing),
    "flipped_bit": _all_reduce_with(_nothing, _flip_bit),
    "late": _all_reduce_with(_dawdle, _nothing),
    "starved": _starve,
    "starved_check": _starve_check,
}


def run(check: str, options: dict[str, Any], context: Context) -> dict[str, Any]:
    record: dict[str, Any] = {"metrics": [], "facts": {}, "series": [], "error": None}
    declared, began = catalog()[check], time.monotonic()
    try:
        for seen in declared.measure(context, declared.options.model_validate(options)):
            if isinstance(seen, Metric):
                record["metrics"].append(asdict(seen))
            elif isinstance(seen, Fact):
                record["facts"][seen.name] = seen.value
            elif isinstance(seen, Series):
                record["series"].append(seen.model_dump(mode="json"))
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
    return {**record, "seconds": time.monotonic() - began}


def main(check: str, scenarios: dict[str, Any], out: Path) -> str:
    """On one rank: every scenario. Its records, as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, notes = int(os.environ["RANK"]), list[str]()
    context = Context(
        node=f"node{rank}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        device="cpu",
        expected_gpus=None,
        artifacts_dir=out,
        run_dir=out,
        progress=notes.append,
    )
    open_group("cpu", timeout_s=60)
    records = {}
    for name, scenario in scenarios.items():
        fault = FAULTS[scenario["fault"]] if scenario["fault"] and rank == VICTIM else nullcontext
        with fault():
            records[name] = run(check, scenario["options"], context)
        records[name]["notes"] = notes.copy()
        notes.clear()
    close_group()
    return json.dumps(records, allow_nan=False)
