"""What the Trainer does not tell: each step's own time, who saw a NaN first, and when it will be done."""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from seatrial.model import SeatrialError
from seatrial.train.hf import checkpoints, ranks
from seatrial.train.settings import TrainConfig

STEPS = "steps.jsonl"


class CountingTrainer(Trainer):
    """A Trainer that keeps this rank's last loss and counts its tokens, without waiting for the device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.local_loss: Tensor | None = None
        self.tokens = 0
        self.trained_tokens: Tensor | int = 0

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any, **options: Any) -> Tensor:
        self.tokens += inputs["input_ids"].numel()
        self.trained_tokens = self.trained_tokens + (inputs["labels"] != -100).sum()
        self.local_loss = super().training_step(model, inputs, *others, **options)
        return self.local_loss

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        place = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        with checkpoints.written(place, self.accelerator.unwrap_model(model), sharding(self.model_wrapped)):
            super()._save_checkpoint(model, trial)


class Watch(TrainerCallback):
    """Writes a line a step to ``out``/steps.jsonl on rank 0, and ends the run at a number that is not finite.

    ``seconds`` holds the duration of each step: from the end of the one before, or of its checkpoint, until its loss
    has come back from the device, so that waiting for data is in it and saving is not.
    """

    def __init__(self, config: TrainConfig, strategy: str, out: Path) -> None:
        self._strategy = strategy
        self.trainer: CountingTrainer | None = None
        self.steps: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.save_seconds: list[float] = []
        self._config = config
        self._log = (out / STEPS).open("a", encoding="utf-8") if ranks.rank() == 0 else None
        self._since = self._said = time.perf_counter()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        del args, state, control
        assert self.trainer is not None
        found = sharding(self.trainer.model_wrapped)
        if ranks.world_size() > 1 and not self._strategy.startswith(found):
            raise SeatrialError(f"the model runs as {found}, and not as {self._strategy}")
        self._since = self._said = time.perf_counter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        del args, control
        if not logs or "loss" not in logs:  # the summary at the end
            return
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now
        values = {name: _number(logs.get(name)) for name in ("loss", "grad_norm", "learning_rate")}
        step = {"step": state.global_step, **values, "epoch": state.epoch, "seconds": self.seconds[-1]}
        self.steps.append(step)
        if self._log:
            self._log.write(json.dumps(step) + "\n")
            self._log.flush()
        self._refuse(state.global_step, logs)
        self._say(state, now)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        del args, state, control
        now = time.perf_counter()
        self.save_seconds.append(now - self._since)
        self._since = now

    def _refuse(self, step: int, logs: dict[str, float]) -> None:
        """Raises SeatrialError on all ranks: what is logged is the same on each."""
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(logs.get(name, 0.0))]
        if not wrong:
            return
        assert self.trainer is not None
        mine = self.trainer.local_loss
        finite = mine is None or bool(torch.isfinite(mine).all())
        told = ranks.gather((ranks.rank(), socket.gethostname(), finite))
        first = [f"rank {rank} on {host}" for rank, host, fine in told if not fine]
        where = ", ".join(first) or "no rank's own loss: it came with the gradients"
        values = ", ".join(f"{name} is {logs[name]}" for name in wrong)
        raise SeatrialError(f"step {step}: {values}; not finite in {where}. Nothing was saved after step {step - 1}")

    def _say(self, state: TrainerState, now: float) -> None:
        if not self._log or (now - self._said < self._config.log_every_s and state.global_step < state.max_steps):
            return
        self._said = now
        config, last, seconds = self._config, self.steps[-1], self.seconds[-1]
        speed = config.bsz * config.grad_accum * config.seq_len / seconds
        left = (state.max_steps - state.global_step) * seconds
        print(
            f"step {state.global_step}/{state.max_steps}  loss {last['loss']:.4f}  "
            f"grad norm {last['grad_norm'] or 0:.3f}  {speed:.0f} tok/s/GPU  {left:.0f} s left",
            file=sys.stderr,
        )


def sharding(model: nn.Module) -> str:
    """How the ranks really share ``model``, by its parameters: accelerate can leave out a strategy without a word."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "fsdp2"
    return "zero3" if any(hasattr(parameter, "ds_id") for parameter in model.parameters()) else "ddp"


def _number(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
