"""Several short training runs (variants) in one child process per rank, optionally with an injected fault.

A child process is ``python -m seatrial.train.variants TASK``. Correctness checks make many runs of a few steps, and
starting torch and NCCL takes longer than all these runs. No config key injects a fault; only a check does,
in a child process.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Unpack
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from seatrial.bench import child_ranks, child_result
from seatrial.bench.rank import gather
from seatrial.model import Frozen, SeatrialError
from seatrial.train import checkpoint, disk, loop, parallel
from seatrial.train.train_config import TrainConfig


class InjectedFault(Frozen):
    """A fault of one rank at one step.

    ``kill_in_save``: SIGKILL after the rank has written its files of the checkpoint, before the checkpoint is complete.
    ``nan``: the rank's gradient is NaN.
    """

    kind: Literal["kill_in_save", "nan"]
    rank: int
    step: int


class Variant(Frozen):
    """A training run with results in ``out``. ``expect_error``: a SeatrialError on all ranks is expected."""

    settings: TrainConfig
    out: Path
    fault: InjectedFault | None = None
    expect_error: bool = False


class VariantError(Frozen):
    """The error that ended a variant; empty fields if another kind of error ended it."""

    message: str
    damaged_files: tuple[str, ...] = ()  # of the checkpoint that was to be loaded
    nonfinite_ranks: tuple[int, ...] = ()  # ranks whose own loss or gradient was not finite


RunVariants = Callable[[], list[VariantError | None]]


@contextmanager
def start_variants(
    variants: Sequence[Variant], *, killed_rank: int | None = None, **options: Unpack[child_ranks.ChildOptions]
) -> Iterator[RunVariants]:
    """Context manager: starts one child process per rank, which imports torch and waits for the yielded function.

    The function runs the variants in order and returns the error of each, None without one. All ranks call both, and
    get the same list. ``killed_rank``: the rank that an injected fault kills; the list is then empty. The function
    raises SeatrialError on any other failure, and if ``killed_rank`` survives.
    """
    file_prefix, groups = options["file_prefix"], options.get("groups")
    options["spare_gpus"] = "all"

    def run_variants() -> list[VariantError | None]:
        results = children.results()
        if killed_rank is not None and results[killed_rank].exit_code == -signal.SIGKILL:
            return []
        if failure := child_ranks.first_failure_text(results):
            raise SeatrialError(f"{file_prefix.name}: {failure}")
        if killed_rank is not None:
            raise SeatrialError(f"{file_prefix.name}: rank {killed_rank} was not killed in its save; expected SIGKILL")
        errors = results[groups[0][0] if groups else 0].value  # of the first rank that has a child
        return [error and VariantError.model_validate(error) for error in errors]

    with child_ranks.start_child_ranks(
        "seatrial.train.variants",
        {"variants": [variant.model_dump(mode="json") for variant in variants]},
        {"NCCL_DEBUG_FILE": str(file_prefix.with_name(f"nccl.{file_prefix.name}.%h.%p.log"))},
        **options,
    ) as children:
        yield run_variants


def create_folder(parent: Path, shared: bool = False) -> Path:
    """Creates ``parent``/attemptN and returns its path, the same on all ranks; all ranks call this.

    A node that does not share rank 0's filesystem creates its own folder; with ``shared`` this raises SeatrialError.
    """
    rank0_folder, creating_host = None, ""
    if dist.get_rank() == 0:
        number = 1 + sum(1 for _ in parent.glob("attempt*"))
        rank0_folder = parent / f"attempt{number}"
        rank0_folder.mkdir()
    path = gather(rank0_folder)[0]
    assert path is not None
    if dist.get_rank():
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)  # a pod has no run directory with the name of another pod
            creating_host = socket.gethostname()
    unshared = sorted({host for host in gather(creating_host) if host})
    if shared and unshared:
        hosts = ", ".join(unshared)
        raise SeatrialError(f"{parent} is not shared between rank 0 and {hosts}: set --out to a shared directory")
    return path


def run_variant(variant: Variant) -> VariantError | None:
    """Runs ``variant``; returns its error. Without ``expect_error``, raises an error instead."""
    result = None
    # On an error, loop.train ends all ranks, which then cannot run the later variants. Without its error propagation, a
    # process can train again after an error that all ranks raise
    train = inspect.unwrap(loop.train) if variant.expect_error else loop.train
    try:
        with injected_fault(variant.fault):
            train(variant.settings, variant.out)
    except SeatrialError as error:
        if not variant.expect_error:
            raise
        result = VariantError(
            message=str(error),
            damaged_files=error.files if isinstance(error, checkpoint.DamagedCheckpointError) else (),
            nonfinite_ranks=error.ranks if isinstance(error, loop.NonFiniteError) else (),
        )
    gc.collect()  # wrapped models contain reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def injected_fault(fault: InjectedFault | None) -> AbstractContextManager[Any]:
    """Context manager: training in this process has ``fault``."""
    faults = {"kill_in_save": _kill_in_save, "nan": _nan_gradient}
    return contextlib.nullcontext() if fault is None else faults[fault.kind](fault)


@contextmanager
def _kill_in_save(fault: InjectedFault) -> Iterator[None]:
    """Context manager: the rank kills itself after writing its files of the checkpoint of ``fault.step``."""
    original = checkpoint.Checkpointer._finalize

    def finalize(
        self: checkpoint.Checkpointer, kind: str, incomplete: Path, folder: Path, step: int, *arguments: Any
    ) -> checkpoint.CheckpointTiming:
        if (self._world.rank, step) == (fault.rank, fault.step):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, kind, incomplete, folder, step, *arguments)

    with patch.object(checkpoint.Checkpointer, "_finalize", finalize):
        yield


@contextmanager
def _nan_gradient(fault: InjectedFault) -> Iterator[None]:
    """Context manager: the rank's gradient is NaN in step ``fault.step``."""
    original = loop.Trainer.step

    def step(self: loop.Trainer, number: int, batches: Iterator[Tensor]) -> loop.PendingStep:
        def nan_hook(gradient: Tensor) -> Tensor:
            self._check_gradient(gradient * math.nan)
            return gradient * math.nan

        if (self.world.rank, number) != (fault.rank, fault.step):
            return original(self, number, batches)
        with patch.object(self.built.model, "gradient_hook", nan_hook):
            return original(self, number, batches)

    with patch.object(loop.Trainer, "step", step):
        yield


def run(task: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    """Runs the task's variants on this rank; returns the fields of each variant's VariantError, None without one."""
    variants = [Variant.model_validate(fields) for fields in task["variants"]]
    with disk.convert_disk_full(variants[0].out):
        child_ranks.open_child_group(task, "gloo" if task["device"] == "cpu" else parallel.BACKEND)
        return [error.model_dump() if error else None for error in map(run_variant, variants)]


if __name__ == "__main__":
    child_result.child_main(run)
