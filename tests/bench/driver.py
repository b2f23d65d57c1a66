"""Runs a check's ``measure`` in a real process group, once per scenario, with an injected fault.

``main`` runs on each rank; a scenario has ``options`` and ``fault`` (a name in FAULTS, or None).
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
from seatrial.checks.check import Context
from seatrial.model import Absent, Fact, Metric, Series

Fault = Callable[[], AbstractContextManager[Any]]
FAULTY_RANK = 1
WRONG_OFFSET = 7
FLIPPED_BIT = 3
LATE_S = 0.004
MAX_ELEMENTS = 2**20


def _all_reduce_with(before: Callable[[torch.Tensor], object], after: Callable[[torch.Tensor], object]) -> Fault:
    """Replace all-reduce by one that also calls ``before`` and ``after`` with the buffer."""
    real = OPERATIONS["all_reduce"]

    def prepare(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
        prepared = real.prepare_with(sent, received)

        def run() -> None:
            before(prepared.sent)
            prepared.run()
            after(prepared.received)

        return replace(prepared, run=run)

    return lambda: patch.dict(OPERATIONS, all_reduce=replace(real, prepare_with=prepare))


def _limit_memory() -> AbstractContextManager[Any]:
    real = torch.empty

    def limited_empty(count: int, **options: Any) -> torch.Tensor:
        if count > MAX_ELEMENTS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more\nand a second line")
        return real(count, **options)

    return patch.object(torch, "empty", limited_empty)


def _do_nothing(tensor: torch.Tensor) -> None:
    del tensor


def _sleep(tensor: torch.Tensor) -> None:
    del tensor
    time.sleep(LATE_S)


def _add_one(tensor: torch.Tensor) -> None:
    tensor[WRONG_OFFSET] += 1


def _flip_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[WRONG_OFFSET] ^= 1 << FLIPPED_BIT


def _limit_memory_of_check() -> AbstractContextManager[Any]:
    """The buffers fit into memory, but the scratch memory of the data check does not."""
    real = verify

    def limited_verify(buffer: torch.Tensor, *rest: Any) -> Any:
        if buffer.numel() > MAX_ELEMENTS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to compare")
        return real(buffer, *rest)

    return patch.object(collectives, "verify", limited_verify)


FAULTS: dict[str, Fault] = {
    "wrong_contribution": _all_reduce_with(_add_one, _do_nothing),
    "flipped_bit": _all_reduce_with(_do_nothing, _flip_bit),
    "late": _all_reduce_with(_sleep, _do_nothing),
    "no_memory": _limit_memory,
    "no_memory_for_check": _limit_memory_of_check,
}


def run(check: str, options: dict[str, Any], context: Context) -> dict[str, Any]:
    record: dict[str, Any] = {"metrics": [], "absent": [], "facts": {}, "series": [], "error": None}
    definition, started = catalog()[check], time.monotonic()
    try:
        for observation in definition.observe(context, definition.options.model_validate(options)):
            if isinstance(observation, Metric):
                record["metrics"].append(asdict(observation))
            elif isinstance(observation, Absent):
                record["absent"].append(asdict(observation))
            elif isinstance(observation, Fact):
                record["facts"][observation.name] = observation.value
            elif isinstance(observation, Series):
                record["series"].append(observation.model_dump(mode="json"))
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
    return {**record, "seconds": time.monotonic() - started}


def main(check: str, scenarios: dict[str, Any], out: Path) -> str:
    """On one rank: run every scenario; the records as JSON."""
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
        fault = FAULTS[scenario["fault"]] if scenario["fault"] and rank == FAULTY_RANK else nullcontext
        with fault():
            records[name] = run(check, scenario["options"], context)
        records[name]["notes"] = notes.copy()
        notes.clear()
    close_group()
    return json.dumps(records, allow_nan=False)
