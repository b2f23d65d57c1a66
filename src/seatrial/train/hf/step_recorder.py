"""What transformers' Trainer does not report: step times, checkpoint times, and the ranks with a non-finite loss."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from seatrial.model import SeatrialError
from seatrial.train import memory
from seatrial.train.blocks import IGNORE_INDEX
from seatrial.train.checkpoint import CheckpointTiming
from seatrial.train.hf import checkpoints
from seatrial.train.parallel import World
from seatrial.train.progress import StartupPhases, Step, StepLog
from seatrial.train.step_timer import ForwardTimer
from seatrial.train.train_config import TrainConfig


class CountingTrainer(Trainer):
    """A Trainer that keeps this rank's last loss and counts this rank's tokens, without synchronizing with the device.

    Filesystem errors while a checkpoint is written become SeatrialErrors: see checkpoints.convert_write_errors.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.local_loss: Tensor | None = None
        self.tokens = 0
        self.trained_tokens: Tensor | int = 0

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Tensor:
        self.tokens += inputs["input_ids"].numel()
        self.trained_tokens = self.trained_tokens + (inputs["labels"] != IGNORE_INDEX).sum()
        self.local_loss = super().training_step(model, inputs, *arguments, **options)
        return self.local_loss

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        with checkpoints.convert_write_errors(
            folder, self.accelerator.unwrap_model(model), applied_strategy(self.model_wrapped)
        ):
            super()._save_checkpoint(model, trial)


class StepRecorder(TrainerCallback):
    """Callback that records each step and ends the run when loss or gradient norm is not finite.

    A step starts when the previous step, or the checkpoint after the previous step, has ended. It ends when its loss
    has been read from the device. It includes waiting for data, and excludes saving.
    """

    def __init__(
        self,
        trainer: CountingTrainer,
        config: TrainConfig,
        strategy: str,
        world: World,
        step_log: StepLog,
        phases: StartupPhases,
    ) -> None:
        self.steps: list[Step] = []
        self.saves: list[CheckpointTiming] = []
        self.gradient_bytes: int | None = None
        self._trainer, self._config, self._strategy, self._world = trainer, config, strategy, world
        self._step_log, self._phases = step_log, phases
        self._step_start = 0.0
        self._tokens_at_step_start = 0
        self._forward_timer: ForwardTimer | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        del args, state, control
        wrapped = self._trainer.model_wrapped
        strategy = applied_strategy(wrapped)
        # startswith, since arguments.NO_DEEPSPEED has a reason after the strategy
        if self._world.size > 1 and not self._strategy.startswith(strategy):
            raise SeatrialError(f"the model runs with strategy {strategy}, expected {self._strategy}")
        if strategy != "zero3":  # with zero3, forward times would include waits for weights
            # The timer starts inside of DDP's wrapper, which may broadcast buffers before the model runs
            replica: Any = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
            self._forward_timer = ForwardTimer(replica, self._world.device)
        self._phases.end_phase("build")
        self._step_start = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        del args, state, control
        if self.gradient_bytes is None and self._strategy != "zero3":  # DeepSpeed keeps gradients outside parameters
            self.gradient_bytes = memory.gradient_bytes(self._trainer.model_wrapped)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        del args, control
        if not logs or "loss" not in logs:  # the summary after the last step
            return
        now = time.perf_counter()
        self._require_finite(state.global_step, logs)
        timer = self._forward_timer
        step = Step(
            step=state.global_step,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            epoch=state.epoch,
            tokens=(self._trainer.tokens - self._tokens_at_step_start) * self._world.size,
            trained_tokens=None,  # known only per rank; gathering would slow each step
            seconds=now - self._step_start,
            compute_s=timer.seconds(timer.take()) if timer else None,  # its passes have ended: the loss has been read
        )
        self.steps.append(self._step_log.write(step))
        self._phases.end_first_step()
        self._step_start, self._tokens_at_step_start = now, self._trainer.tokens

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        del control
        now = time.perf_counter()
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        seconds = now - self._step_start
        self.saves.append(CheckpointTiming("save", state.global_step, size, seconds, seconds))
        self._step_start = time.perf_counter()

    def _require_finite(self, step: int, logs: dict[str, float]) -> None:
        """Raise SeatrialError on all ranks, which have the same ``logs``, if loss or gradient norm is not finite."""
        nonfinite_names = [name for name in ("loss", "grad_norm") if not math.isfinite(logs.get(name, 0.0))]
        if not nonfinite_names:
            return
        local_loss = self._trainer.local_loss
        is_finite = local_loss is None or bool(torch.isfinite(local_loss).all())
        all_ranks = self._world.gather((self._world.rank, self._world.host, is_finite))
        nonfinite_ranks = [f"rank {rank} on {host}" for rank, host, rank_is_finite in all_ranks if not rank_is_finite]
        earlier = "an earlier micro-batch or " if self._config.grad_accum > 1 else ""
        source = (
            f"the loss is not finite on {', '.join(nonfinite_ranks)}"
            if nonfinite_ranks
            else f"the last micro-batch's loss is finite on all ranks: the cause is in {earlier}the gradients"
        )
        values = ", ".join(f"{name} is {logs[name]}" for name in nonfinite_names)
        raise SeatrialError(f"step {step}: {values}; {source}. No checkpoint of step {step} was written")


def applied_strategy(model: nn.Module) -> str:
    """ddp, fsdp2 or zero3, by the parameters' types, since accelerate may silently ignore the configured strategy."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "fsdp2"
    return "zero3" if any(hasattr(parameter, "ds_id") for parameter in model.parameters()) else "ddp"
