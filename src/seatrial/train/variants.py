"""Several trainings in one process, and faults put into them on purpose: ``python -m seatrial.train.variants TASK``.

The checks of correctness train a few steps at a time, over and over; a start of torch and NCCL takes longer than all of
them. No config and no option asks for a fault: only a check that wants to see what becomes of it does, in a process of
its own.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from seatrial.bench import child_ranks, child_result
from seatrial.bench.rank import gather
from seatrial.model import Frozen, SeatrialError
from seatrial.train import checkpoint, disk, loop, parallel
from seatrial.train.train_config import TrainConfig


class InjectedFault(Frozen):
    """``kill_in_save``: SIGKILL when this rank has written its files, and the checkpoint is not whole yet.

    ``nan``: what this rank computes as a gradient is no number.
    """

    kind: Literal["kill_in_save", "nan"]
    rank: int
    step: int


class Variant(Frozen):
    """A training into ``out``. ``refused``: it is to end in an error, and all ranks are to have it."""

    settings: TrainConfig
    out: Path
    fault: InjectedFault | None = None
    expect_error: bool = False


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank is, and how many seconds the acts of one start may take."""

    device: str
    local_rank: int
    limit_s: float


def run_variants(
    acts: Sequence[Variant],
    seat: RankPlacement,
    out: Path,
    groups: Sequence[Sequence[int]] | None = None,
    killed_rank: int | None = None,
) -> list[str]:
    """Carry out ``acts`` one after the other beside the ranks: the error of each, "" without one.

    The same on all ranks, which call this together; names of the start's files begin with ``out``. ``killed``: the rank
    whose fault it is to end all by; then there is no answer. Raises SeatrialError where it went otherwise.
    """
    answers = child_ranks.run_child_ranks(
        "seatrial.train.variants",
        {"acts": [act.model_dump(mode="json") for act in acts]},
        {"NCCL_DEBUG_FILE": str(out.with_name(f"nccl.{out.name}.%h.%p.log"))},
        device=seat.device,
        local_rank=seat.local_rank,
        file_prefix=out,
        limit_s=seat.limit_s,
        groups=groups,
    )
    if killed_rank is not None and answers[killed_rank].exit_code == -signal.SIGKILL:
        return []
    failed = {rank: answer for rank, answer in enumerate(answers) if answer.error}
    if failed:
        first = child_ranks.first_failed_rank(failed)
        raise SeatrialError(f"{out.name}: {child_ranks.failure_text(first, answers[first])}")
    if killed_rank is not None:
        raise SeatrialError(f"{out.name}: rank {killed_rank} was to be killed while it saved, and was not")
    told: list[str] = answers[groups[0][0] if groups else 0].value
    return told


def create_folder(parent: Path, shared: bool = False) -> Path:
    """An empty folder in ``parent``, the same for all ranks, which call this together: an earlier attempt's stays.

    A node that does not share the first rank's gets one of its own; ``shared``: raises SeatrialError there.
    """
    made, own = None, ""
    if dist.get_rank() == 0:
        number = 1 + sum(1 for _ in parent.glob("attempt*"))
        made = parent / f"attempt{number}"
        made.mkdir()
    (path, *_) = gather(made)
    assert path is not None
    if dist.get_rank():
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            own = socket.gethostname()
    apart = sorted({node for node in gather(own) if node})
    if shared and apart:
        raise SeatrialError(f"{', '.join(apart)} does not share {parent} with the first rank: --out on what all do")
    return path


def run_variant(act: Variant) -> str:
    """The error that ``act`` ended in; empty without one. Raises it where there was to be none."""
    said = ""
    # shared with the others, a failure is for good: one rank tells, and watchers end the rest, in the next act too
    train = loop.train_with_rank_errors if act.expect_error else loop.train
    try:
        with injected_fault(act.fault):
            train(act.settings, act.out)
    except SeatrialError as error:
        if not act.expect_error:
            raise
        said = str(error)
    gc.collect()  # a model that is wrapped refers to itself
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return said


def injected_fault(fault: InjectedFault | None) -> AbstractContextManager[Any]:
    """Within, the training of this process has ``fault``."""
    faults: dict[str, Callable[[InjectedFault], AbstractContextManager[Any]]] = {
        "kill_in_save": _killed_in_save,
        "nan": _no_number,
    }
    return contextlib.nullcontext() if fault is None else faults[fault.kind](fault)


@contextmanager
def _killed_in_save(fault: InjectedFault) -> Iterator[None]:
    real = checkpoint.Checkpointer._finalize

    def seal(
        self: checkpoint.Checkpointer, kind: str, beside: Path, place: Path, step: int, *more: Any
    ) -> checkpoint.CheckpointTiming:
        if (self._world.rank, step) == (fault.rank, fault.step):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, kind, beside, place, step, *more)

    with _in_place(checkpoint.Checkpointer, "_seal", seal):
        yield


@contextmanager
def _no_number(fault: InjectedFault) -> Iterator[None]:
    real = loop.Trainer.step

    def step(self: loop.Trainer, number: int, batches: Iterator[Tensor]) -> loop.PendingStep:
        look = self.built.model.gradient_hook

        def broken(gradient: Tensor) -> Tensor:
            wrong = gradient * math.nan
            if look is not None:
                look(wrong)
            return wrong

        if (self.world.rank, number) != (fault.rank, fault.step):
            return real(self, number, batches)
        self.built.model.gradient_hook = broken
        taken = real(self, number, batches)
        self.built.model.gradient_hook = look
        return taken

    with _in_place(loop.Trainer, "step", step):
        yield


@contextmanager
def _in_place(owner: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, real)


def run(task: Mapping[str, Any]) -> list[str]:
    acts = [Variant.model_validate(act) for act in task["acts"]]
    with disk.convert_disk_full(acts[0].out):
        child_ranks.open_child_group(task, "gloo" if task["device"] == "cpu" else parallel.BACKEND)
        return [run_variant(act) for act in acts]


if __name__ == "__main__":
    child_result.child_main(run)
