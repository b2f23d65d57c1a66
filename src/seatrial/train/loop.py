"""The native training loop, from settings to metrics.json.

The CPU queues a step before it reads the results of the previous one, so that the GPU does not wait for the CPU. The
device therefore checks whether loss and gradient norm are finite; from the first non-finite step on, the optimizer
skips its updates.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seatrial.model import SeatrialError
from seatrial.train import (
    checkpoint,
    data,
    exposed_communication,
    failure,
    lora,
    memory,
    metrics,
    parallel,
    ranks,
    restarts,
)
from seatrial.train.blocks import IGNORE_INDEX
from seatrial.train.parallel import BuiltModel, World
from seatrial.train.progress import (
    StartupPhases,
    Step,
    StepLog,
    create_run_folder,
    require_steps_left,
    require_tensorboard,
)
from seatrial.train.step_timer import ForwardTimer, StepTimer
from seatrial.train.train_config import Schedule, TrainConfig
from seatrial.util.gc_pause import gc_paused

# Steps between Python garbage collections. All ranks collect at the same step, since a collection on one delays all
GC_INTERVAL = 50


class NonFiniteError(SeatrialError):
    """A loss or gradient norm is not finite; ``ranks``: those whose own loss or gradient is not."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


@failure.propagate_failure()
def train(settings: TrainConfig, folder: Path | None = None, started: float | None = None) -> dict[str, Any]:
    """Trains with ``settings``; writes config, steps.jsonl, metrics.json, checkpoints and final/ to ``folder``.

    Returns the content of metrics.json. ``folder``: by default a new one in seatrial-runs. ``started``: start of the
    process (Unix time), for the startup time. The first rank that fails raises its error, the others PeerFailed.
    """
    require_tensorboard(settings)
    phases = StartupPhases(started or time.time(), "imports")
    with parallel.process_group(settings.timeout_s) as world:
        phases.end_phase("init")
        parallel.prepare_kernels(settings)
        default = Path("seatrial-runs", f"{time.strftime('%Y%m%d-%H%M%S')}-train-{settings.run_name}")
        out = ranks.run_on_rank0(lambda: create_run_folder(settings, (folder or default).absolute()), default)
        cache = Path(settings.data.cache) if settings.data.cache else out / "data"
        blocks = data.prepare(settings, cache)
        phases.end_phase("data")
        with metrics.explain_out_of_memory(settings, world.device):
            built = parallel.build(settings, world)
            _check_model(settings, built, world)
            trainer = Trainer(settings, built, world, blocks)
            phases.end_phase("build")
            completed_steps = 0
            if settings.checkpoint.resume:
                completed_steps = trainer.checkpointer.restore(out, built, trainer.optimizer)
            if world.is_rank_0:
                restarts.record_start(settings, out, completed_steps)
            records = trainer.run(completed_steps, out, phases)
        report = metrics.report(settings, world, trainer.training_run(records), phases)
        report |= {"out": str(out), "final": None}
        if settings.data.cold:
            report["data_cached_share"] = blocks.cached_share
        if settings.use_lora and settings.export:
            adapters = lora.gather_adapters(built.model)
            if world.is_rank_0:
                report["final"] = lora.export(adapters, out / "final", settings)
        if world.size > 1 and settings.profile_steps:
            # after the export, since the additional steps change the weights
            replicated = settings.parallel.strategy == "ddp"
            report |= exposed_communication.measure(world, settings.profile_steps, trainer.extra_step, replicated)
        if world.is_rank_0:
            metrics.write(report, out)
    return report


def _check_model(settings: TrainConfig, built: BuiltModel, world: World) -> None:
    """Raises SeatrialError for an unsharded parameter; rank 0 prints the number of trained parameters."""
    tensors, sharded = parallel.tensor_counts(built.model).values()
    if settings.parallel.strategy == "fsdp2" and sharded < tensors:
        raise SeatrialError(f"rank {world.rank}: FSDP2 sharded {sharded} of {tensors} parameters, expected all")
    if world.is_rank_0:
        trained, total = metrics.parameter_counts(built.model)
        print(f"training {trained:,} of {total:,} parameters", file=sys.stderr)


@dataclass
class PendingStep:
    """A step that is queued on the device; its tensors are valid only when the device has completed the step."""

    step: int
    values: Tensor  # float64 [3] in host memory (pinned with a GPU): global mean loss, gradient norm, trained tokens
    rank_finite: Tensor  # bool [2]: whether this rank's loss, and its gradient at the first block's output, are finite
    learning_rate: float


class Trainer:
    """Model, optimizer and data of one run."""

    def __init__(self, settings: TrainConfig, built: BuiltModel, world: World, blocks: data.Blocks) -> None:
        self.settings, self.built, self.world, self.blocks = settings, built, world, blocks
        self.optimizer: Any = parallel.optimizer(settings, built.trained_parameters)
        self.checkpointer = checkpoint.Checkpointer(settings.checkpoint, world)
        # With FSDP2 each layer waits for weights from other ranks before its forward pass. Compute time is then the sum
        # of the layers' forward times, which contain no wait
        gathers_weights = settings.parallel.strategy == "fsdp2" and world.size > 1
        self.timer = StepTimer(world.device, ForwardTimer(built.model, world.device) if gathers_weights else None)
        self._extra_batches = self._batches(0)  # for extra_step
        self._gradient_bytes = 0
        self._communicate = True  # whether a step communicates gradients between ranks
        self._nonfinite = torch.zeros((), device=world.device)  # 1 after the first step that is not finite
        self._gradient_finite = torch.ones((), dtype=torch.bool, device=world.device)
        built.model.gradient_hook = self._check_gradient
        built.model.train()

    def _check_gradient(self, gradient: Tensor) -> None:
        self._gradient_finite &= gradient.isfinite().all()
        self.timer.end_compute()

    def run(self, completed_steps: int, out: Path, phases: StartupPhases) -> list[Step]:
        """Runs steps ``completed_steps`` + 1 to max_steps; appends each to ``out``/steps.jsonl when it has ended.

        Returns the records of these steps. Raises SeatrialError if no step is left, NonFiniteError at the first
        non-finite step.
        """
        settings = self.settings
        require_steps_left(settings, out, completed_steps)
        records: list[Step] = []
        batches = self._batches(completed_steps)
        self.timer.reset()
        gc.collect()
        with closing(StepLog(settings, self.world, out, completed_steps)) as log, gc_paused():
            previous: PendingStep | None = None

            def record(pending: PendingStep) -> None:
                records.append(log.write(self._read_finite_step(pending)))
                phases.end_first_step()

            for step in range(completed_steps + 1, settings.max_steps + 1):
                pending = self.step(step, batches)
                if previous is not None:
                    record(previous)
                previous = pending
                if self.checkpointer.should_save(step, settings.max_steps):
                    record(previous)
                    previous = None
                    self.checkpointer.save(out, step, self.built, self.optimizer)
                    self.timer.reset()
                if step % GC_INTERVAL == 0:
                    gc.collect(1)
            if previous is not None:
                record(previous)
        self.checkpointer.wait()
        return records

    def training_run(self, records: Sequence[Step]) -> metrics.TrainingRun:
        """The TrainingRun for metrics.report; ``records``: its steps."""
        settings = self.settings
        compute_dtype = "bf16" if settings.bf16 else "fp32"
        if settings.fp8:
            compute_dtype = f"fp8 in the linear layers (MFU relative to the bf16 peak), else {compute_dtype}"
        return metrics.TrainingRun(
            steps=records,
            model=self.built.model,
            optimizer=self.optimizer,
            strategy=settings.parallel.strategy,
            compute_dtype=compute_dtype,
            data=self.blocks.info,
            trained_tokens=sum(record.trained_tokens or 0 for record in records),
            checkpoints=self.checkpointer.results,
            gradient_bytes=self._gradient_bytes,
            compiled_graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        )

    def _batches(self, completed_steps: int) -> Iterator[Tensor]:
        """Endless batches of this rank, from step ``completed_steps`` + 1 on.

        A batch is int64 [grad_accum, bsz, seq_len + 1], on the device.
        """
        settings, world = self.settings, self.world
        per_step = settings.bsz * settings.grad_accum
        skip = completed_steps * per_step
        indices = data.block_order(len(self.blocks), world.rank, world.size, settings.seed, skip)
        while True:
            batch = self.blocks.batch(list(islice(indices, per_step)))
            if world.device.type == "cuda":
                batch = batch.pin_memory().to(world.device, non_blocking=True)
            yield batch.view(settings.grad_accum, settings.bsz, -1)

    def run_steps(self, steps: int) -> list[Step]:
        """Queues ``steps`` steps for a check without a StepLog, then reads all. A non-finite step raises no error."""
        self.timer.reset()
        pending_steps = [self.extra_step(communicate=True) for _ in range(steps)]
        return [self.read_step(pending) for pending in pending_steps]

    def extra_step(self, communicate: bool) -> PendingStep:
        """Queues a step that is not part of ``run``. ``communicate``: ranks communicate gradients (False needs DDP)."""
        self._communicate = communicate
        return self.step(self.settings.max_steps, self._extra_batches)

    def step(self, number: int, batches: Iterator[Tensor]) -> PendingStep:
        """Queues optimizer step ``number`` over ``grad_accum`` micro-batches on the device."""
        settings, optimizer = self.settings, self.optimizer
        # dropout masks differ by rank and step, and repeat when a step is repeated after a resume
        torch.manual_seed((settings.seed * settings.max_steps + number) * self.world.size + self.world.rank)
        with self.timer.data_wait():
            batch = next(batches)
        inputs, targets = batch[..., :-1].clamp(min=0), batch[..., 1:].contiguous()  # IGNORE_INDEX is not a token id
        # The loss is averaged over the trained tokens of all ranks, since ranks may have different numbers of them
        tokens = self.world.all_reduce_sum((targets != IGNORE_INDEX).sum())
        self.timer.begin()
        loss_scale = self.world.size / tokens  # times world.size, since DDP and FSDP divide gradients by it
        total_loss = torch.zeros((), device=self.world.device)
        self._gradient_finite.fill_(True)
        for index in range(settings.grad_accum):
            sync = self._communicate and index == settings.grad_accum - 1
            with parallel.gradient_sync(self.built.train_module, sync):
                loss = self.built.train_module(inputs[index], targets[index], settings.loss_chunks)
                (loss * loss_scale).backward()
            total_loss += loss.detach()
        rank_finite = torch.stack([total_loss.isfinite(), self._gradient_finite])
        gradients = [p.grad for p in self.built.trained_parameters if p.grad is not None]
        norm = parallel.gradient_norm(gradients).to(total_loss.device, torch.float)
        mean_loss = self.world.all_reduce_sum(total_loss) / tokens
        # _nonfinite stays 1 after a non-finite step, so that no later step changes the weights
        self._nonfinite = torch.maximum(self._nonfinite, (~(mean_loss.isfinite() & norm.isfinite())).float())
        # fused AdamW divides gradients by grad_scale, and skips its update if found_inf is 1
        parameter_device = self.built.trained_parameters[0].device  # the CPU with cpu_offload
        optimizer.grad_scale = (norm / settings.optimizer.max_grad_norm).clamp(min=1.0).to(parameter_device)
        optimizer.found_inf = self._nonfinite.to(parameter_device)
        learning_rate = scheduled_learning_rate(settings.learning_rate, number, settings.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        self._gradient_bytes = self._gradient_bytes or memory.gradient_bytes(self.built.model)
        optimizer.zero_grad()
        values = _copy_to_host(torch.stack([mean_loss.double(), norm.double(), tokens.double()]))
        self.timer.end()
        return PendingStep(number, values, rank_finite, learning_rate)

    def _read_finite_step(self, pending: PendingStep) -> Step:
        """As ``read_step``. Raises NonFiniteError on all ranks if the step is not finite.

        The error has the ranks with a non-finite loss or gradient, which are checked before communication.
        """
        record = self.read_step(pending)
        if record.finite:
            return record
        finite_by_rank = self.world.gather((self.world.host, *pending.rank_finite.tolist()))
        sources = {
            rank: f"rank {rank} ({host}): its {'gradient' if loss_finite else 'loss'} is not finite"
            for rank, (host, loss_finite, gradient_finite) in enumerate(finite_by_rank)
            if not (loss_finite and gradient_finite)
        }
        cause = "; ".join(sources.values()) or (
            "loss and first-block output gradient were finite on all ranks: the error is in a weight gradient or in "
            "NCCL's reduction"
        )
        raise NonFiniteError(
            f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}. {cause}. "
            "The weights are unchanged; repeat the run: an error that does not recur suggests a hardware fault",
            tuple(sources),
        )

    def read_step(self, pending: PendingStep) -> Step:
        """Waits for ``pending``, the oldest step that has not been read, and returns its Step."""
        times = self.timer.read()
        loss, norm, tokens = pending.values.tolist()
        settings = self.settings
        per_step = settings.bsz * settings.grad_accum
        blocks_per_epoch = max(1, len(self.blocks) // self.world.size)
        return Step(
            step=pending.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=pending.learning_rate,
            epoch=pending.step * per_step / blocks_per_epoch,
            tokens=per_step * settings.seq_len * self.world.size,
            trained_tokens=int(tokens),
            seconds=times.seconds,
            compute_s=times.compute,
            data_wait_s=times.data_wait,
        )


def _copy_to_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values
    pinned = torch.empty_like(values, device="cpu", pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


def scheduled_learning_rate(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of ``step`` of ``steps``; see Schedule."""
    if step <= schedule.warmup_steps:
        return schedule.peak * step / schedule.warmup_steps
    if schedule.schedule == "constant":
        return schedule.peak
    progress = (step - 1 - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    factor = 1 - progress if schedule.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return schedule.peak * (schedule.min_ratio + (1 - schedule.min_ratio) * factor)
