"""The training loop, from settings to metrics.json: read it from top to bottom.

Nothing in a step waits for the device. A step's figures are read while the next one runs; until then the optimizer
itself looks, on the device, whether loss and gradients are numbers, and does nothing from the first step on in which
they are not.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seatrial.model import SeatrialError
from seatrial.train import checkpoint, data, exposed_communication, failure, lora, metrics, parallel
from seatrial.train.decoder import parameter_count
from seatrial.train.loss import IGNORE_INDEX
from seatrial.train.parallel import BuiltModel, World
from seatrial.train.progress import StartupPhases, Step, StepLog, create_run_folder, require_tensorboard
from seatrial.train.step_timer import StepTimer
from seatrial.train.train_config import Schedule, TrainConfig

COLLECT_EVERY = 50  # steps: Python's garbage collector stops a rank when it likes, and with it all others


class NonFiniteError(SeatrialError):
    """A loss or gradient is no number: training was stopped before the step that would have taken it in."""


def train(settings: TrainConfig, folder: Path | None = None, started: float | None = None) -> dict[str, Any]:
    """Train as ``settings`` say; keep config.json, steps.jsonl, metrics.json, checkpoints in ``folder`` or a new one.

    Returns what metrics.json holds. ``started`` is when the process began (Unix time), to say what the start cost.
    Raises SeatrialError for what went wrong: the first rank that fails says what, and the others end with it.
    """
    with failure.propagate_failure():
        return train_with_rank_errors(settings, folder, started)


def train_with_rank_errors(settings: TrainConfig, folder: Path | None, started: float | None = None) -> dict[str, Any]:
    """As train; but each rank raises its own error, and its process may train again where all had the same."""
    require_tensorboard(settings)
    phases = StartupPhases(started or time.time(), "imports")
    with parallel.process_group(settings.timeout_s) as world:
        phases.end_phase("init")
        parallel.prepare_kernels(settings)
        out = _announce(settings, world, folder)
        cache = Path(settings.data.cache) if settings.data.cache else out / "data"
        blocks = data.prepare(settings, cache, world.is_rank0, world.gather)
        phases.end_phase("data")
        with metrics.explain_out_of_memory(settings, world.device):
            built = parallel.build(settings, world)
            _refuse_faults(settings, built, world)
            trainer = Trainer(settings, built, world, blocks)
            phases.end_phase("build")
            done = trainer.resume(out) if settings.checkpoint.resume else 0
            records = trainer.run(done, out, phases)
        report = metrics.report(settings, world, trainer.run_record(records), phases)
        report |= {"out": str(out), "final": None}
        if settings.use_lora and settings.export:
            adapters = lora.gather_adapters(built.model)
            if world.is_rank0:
                lora.export(adapters, out / "final", built.model, settings.model.name)
                report["final"] = lora.verify_export(adapters, out / "final")
        if world.size > 1 and settings.profile_steps:
            # last: these steps change weights, and nothing that is kept
            replicated = settings.parallel.strategy == "ddp"
            report |= exposed_communication.measure(world, settings.profile_steps, trainer.step_function(), replicated)
        if world.is_rank0:
            metrics.write(report, out)
    return report


def _announce(settings: TrainConfig, world: World, folder: Path | None) -> Path:
    """The folder to write to, which the first rank chooses and makes, with the resolved config in it."""
    new = f"{time.strftime('%Y%m%d-%H%M%S')}-train-{settings.run_name}"
    out = Path(world.gather(str((folder or Path("seatrial-runs", new)).absolute()))[0])
    if world.is_rank0:
        create_run_folder(settings, out)
    world.barrier()
    return out


def _refuse_faults(settings: TrainConfig, built: BuiltModel, world: World) -> None:
    ranks, replicas = world.size, settings.parallel.replicas
    if settings.parallel.strategy == "fsdp2" and (faults := parallel.sharding_errors(built.model, ranks, replicas)):
        raise SeatrialError(
            f"rank {world.rank}: {len(faults)} parameters are not sharded as they should be: {faults[0]}"
        )
    if world.is_rank0:
        parameters = list(built.model.parameters())
        print(
            f"{parameter_count(built.trained_parameters):,} of {parameter_count(parameters):,} parameters train",
            file=sys.stderr,
        )


def _compute(settings: TrainConfig) -> str:
    if settings.fp8:
        return "fp8 products in blocks (MFU is of bf16's peak), else bf16"
    return "bf16" if settings.bf16 else "fp32"


@dataclass
class PendingStep:
    """A step that may still be running: its figures on the device, and what the host knows already."""

    number: int
    figures: Tensor  # float64 [3], pinned on the host: global mean loss, gradient norm, counted tokens
    rank_finite: Tensor  # bool [2]: this rank's loss is a number; so is the gradient it computed
    lr: float
    data_wait_s: float


class Trainer:
    """Model, optimizer and data of one run, a step at a time."""

    def __init__(self, settings: TrainConfig, built: BuiltModel, world: World, blocks: data.Blocks) -> None:
        self.settings, self.built, self.world, self.blocks = settings, built, world, blocks
        self.optimizer: Any = parallel.optimizer(settings, built.trained_parameters)
        self.checkpointer = checkpoint.Checkpointer(settings.checkpoint, world)
        self.timer = StepTimer(world.device)
        self._more = self._batches(0)  # for take
        self._exchange = True  # gradients, over ranks
        self._broken = torch.zeros((), device=world.device)  # 1 from the first step on that is not finite
        self._own_gradient = torch.ones((), dtype=torch.bool, device=world.device)
        built.model.gradient_hook = self._look
        built.model.train()

    def _look(self, gradient: Tensor) -> None:
        self._own_gradient &= gradient.isfinite().all()

    def resume(self, out: Path) -> int:
        """Put back the newest whole checkpoint; the number of steps that had been taken. 0 where there is none."""
        return self.checkpointer.restore(out, self.built, self.optimizer)

    def run(self, done: int, out: Path, phases: StartupPhases) -> list[Step]:
        """Take the steps from ``done`` on. One JSON line for each is in ``out``/steps.jsonl as soon as it is known."""
        settings = self.settings
        if done >= settings.max_steps:
            raise SeatrialError(f"{out} has taken all of its {settings.max_steps} steps: nothing is left to resume")
        records: list[Step] = []
        batches = self._batches(done)
        self.timer.reset()
        with closing(StepLog(settings, self.world, out, done)) as progress, _garbage_kept():
            waiting: PendingStep | None = None

            def known(taken: PendingStep) -> None:
                records.append(progress.write(self._read(taken)))
                phases.end_first_step()

            for number in range(done + 1, settings.max_steps + 1):
                taken = self.step(number, batches)
                if waiting is not None:
                    known(waiting)
                waiting = taken
                if self.checkpointer.should_save(number, settings.max_steps):
                    known(waiting)
                    waiting = None
                    self.checkpointer.save(out, number, self.built, self.optimizer)
                    self.timer.reset()
                if number % COLLECT_EVERY == 0:
                    gc.collect(1)
            if waiting is not None:
                known(waiting)
        self.checkpointer.wait()
        return records

    def run_record(self, records: Sequence[Step]) -> metrics.TrainingRun:
        """What these steps were, for the report."""
        settings = self.settings
        return metrics.TrainingRun(
            steps=records,
            model=self.built.model,
            optimizer=self.optimizer,
            strategy=settings.parallel.strategy,
            compute_dtype=_compute(settings),
            data=self.blocks.info,
            trained_tokens=sum(record.trained_tokens or 0 for record in records),
            checkpoints=self.checkpointer.results,
            compiled_graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        )

    def _batches(self, done: int) -> Iterator[Tensor]:
        """int64 [grad_accum, bsz, seq_len + 1] on the device, for ever."""
        settings, world = self.settings, self.world
        each = settings.bsz * settings.grad_accum
        places = data.block_order(len(self.blocks), world.rank, world.size, settings.seed, skip=done * each)
        while True:
            batch = self.blocks.batch(list(islice(places, each)))
            if world.device.type == "cuda":
                batch = batch.pin_memory().to(world.device, non_blocking=True)
            yield batch.view(settings.grad_accum, settings.bsz, -1)

    def run_steps(self, steps: int) -> list[Step]:
        """So many steps more, outside of ``run``: queued back to back, then read, those that are not finite as well."""
        self.timer.reset()
        taken = [self.step(self.settings.max_steps, self._more) for _ in range(steps)]
        return [self.read_step(one) for one in taken]

    def step_function(self) -> Callable[[bool], PendingStep]:
        """Takes a step more, as the last was, with the exchange of gradients or (under DDP) without."""
        batches = self._batches(0)

        def take(exchange: bool) -> PendingStep:
            self._exchange = exchange
            return self.step(self.settings.max_steps, batches)

        return take

    def step(self, number: int, batches: Iterator[Tensor]) -> PendingStep:
        """One optimizer step over ``grad_accum`` micro-batches, queued on the device."""
        settings, optimizer = self.settings, self.optimizer
        # dropout's masks: others on each rank and in each step, the same when the step is repeated after a resume
        torch.manual_seed((settings.seed * settings.max_steps + number) * self.world.size + self.world.rank)
        before = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - before
        inputs, targets = batch[..., :-1].clamp(min=0), batch[..., 1:].contiguous()  # padding is no word
        # every rank has another number of counted tokens; a mean of means would favour those who have few
        tokens = self.world.all_reduce_sum((targets != IGNORE_INDEX).sum())
        self.timer.begin()
        share = self.world.size / tokens  # DDP and FSDP divide by the ranks
        total = torch.zeros((), device=self.world.device)
        self._own_gradient.fill_(True)
        for place in range(settings.grad_accum):
            last = self._exchange and place == settings.grad_accum - 1
            with parallel.gradient_sync(self.built.train_module, last):
                loss = self.built.train_module(inputs[place], targets[place], settings.loss_chunks)
                self.timer.end_forward()
                (loss * share).backward()
            total += loss.detach()
        own = torch.stack([total.isfinite(), self._own_gradient])
        norm = parallel.unshard(
            nn.utils.get_total_norm([p.grad for p in self.built.trained_parameters if p.grad is not None])
        )
        norm = norm.to(total.device, torch.float)
        mean = self.world.all_reduce_sum(total) / tokens
        # sticky: no step is taken on the weights that a broken one would have made
        self._broken = torch.maximum(self._broken, (~(mean.isfinite() & norm.isfinite())).float())
        # AdamW divides gradients by the one and does nothing where the other is 1, in its own kernel
        where = self.built.trained_parameters[0].device  # the CPU, where weights are offloaded to it
        optimizer.grad_scale = (norm / settings.optimizer.max_grad_norm).clamp(min=1.0).to(where)
        optimizer.found_inf = self._broken.to(where)
        lr = scheduled_learning_rate(settings.learning_rate, number, settings.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        figures = _to_host(torch.stack([mean.double(), norm.double(), tokens.double()]))
        self.timer.end()
        return PendingStep(number, figures, own, lr, waited)

    def _read(self, taken: PendingStep) -> Step:
        """As read. Raises NotFinite, on all ranks, where the step was not."""
        record = self.read_step(taken)
        if not record.finite:
            raise NonFiniteError(_who(taken, record, self.world))
        return record

    def read_step(self, taken: PendingStep) -> Step:
        """Wait for a step and say what it was."""
        seconds, forward = self.timer.read()
        loss, norm, tokens = taken.figures.tolist()
        settings = self.settings
        each = settings.bsz * settings.grad_accum
        return Step(
            step=taken.number,
            loss=loss,
            grad_norm=norm,
            learning_rate=taken.lr,
            epoch=data.epochs_completed(taken.number, each, len(self.blocks), self.world.size),
            tokens=each * settings.seq_len * self.world.size,
            trained_tokens=int(tokens),
            seconds=seconds,
            forward_s=forward,
            data_wait_s=taken.data_wait_s,
        )


def _who(taken: PendingStep, record: Step, world: World) -> str:
    """Names the ranks on which it began: beyond the exchange of gradients every rank has it."""
    said = world.gather((world.host, *taken.rank_finite.tolist()))
    began = [
        f"rank {rank} ({host}): its {'gradient' if good_loss else 'loss'} is no number"
        for rank, (host, good_loss, good_gradient) in enumerate(said)
        if not (good_loss and good_gradient)
    ]
    where = "; ".join(began) or "on no rank before gradients were exchanged: a weight's gradient, or the exchange"
    return (
        f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}. {where}. "
        f"No weight was changed; repeat the run: what does not come again was a fault of hardware"
    )


def _to_host(figures: Tensor) -> Tensor:
    if figures.device.type == "cpu":
        return figures
    pinned = torch.empty_like(figures, device="cpu", pin_memory=True)
    return pinned.copy_(figures, non_blocking=True)


def scheduled_learning_rate(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of ``step``, counted from 1: the peak at the end of the warm-up, the floor after the last."""
    if step <= schedule.warmup_steps:
        return schedule.peak * step / schedule.warmup_steps
    if schedule.schedule == "constant":
        return schedule.peak
    done = (step - 1 - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    left = 1 - done if schedule.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.peak * (schedule.min_ratio + (1 - schedule.min_ratio) * left)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Python's collector runs when it is called, and not when it likes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
