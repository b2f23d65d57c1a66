"""A training run with the stack hf, from start to metrics.json."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch.distributed as dist
import transformers
from transformers import TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback

from seatrial.model import SeatrialError, UsageError
from seatrial.train import metrics, progress, ranks, restarts, safe_loading
from seatrial.train.blocks import DatasetInfo
from seatrial.train.hf import checkpoints, data, export, models
from seatrial.train.hf.arguments import effective_strategy, training_arguments
from seatrial.train.hf.step_recorder import CountingTrainer, StepRecorder
from seatrial.train.parallel import World, current_world
from seatrial.train.progress import StartupPhases, StepLog, create_run_folder, require_tensorboard
from seatrial.train.train_config import TrainConfig


def train(config: TrainConfig, out: Path, phases: StartupPhases) -> dict[str, Any]:
    """Train and write the results to ``out``; see seatrial.train.hf.train. ``phases``: the startup phases so far."""
    config.architecture()
    require_tensorboard(config)
    args, strategy = training_arguments(config, out), effective_strategy(config)
    world = current_world(args.device)
    # After joining the group: a rank that is still joining does not handle SIGTERM, and would wait for a failed rank 0
    ranks.run_on_rank0(lambda: create_run_folder(config, out), out)
    phases.end_phase("init")
    prepared = data.prepare(config, out)
    blocks, batch_size = len(prepared.blocks), config.bsz * world.size
    if blocks < batch_size:
        raise UsageError(f"{blocks} sequences are fewer than one batch of {batch_size}: use more rows or a smaller bsz")
    phases.end_phase("data")
    with metrics.explain_out_of_memory(config, args.device):
        trainer = _trainer(config, args, prepared)
        checkpoint = checkpoints.newest_complete(out) if config.checkpoint.resume else None
        if checkpoint:
            model = trainer.accelerator.unwrap_model(trainer.model)
            # NO_DEEPSPEED has a reason after the strategy
            checkpoints.check_compatible(checkpoint, model, strategy.partition(" ")[0])
        # Without this check, the Trainer would take one more step if the checkpoint is in the middle of an epoch
        completed_steps = checkpoints.saved_step(checkpoint) if checkpoint else 0
        progress.require_steps_left(config, out, completed_steps)
        if world.is_rank_0:
            restarts.record_start(config, out, completed_steps)
        try:
            with (
                closing(StepLog(config, world, out, completed_steps)) as step_log,
                safe_loading.weights_only(*_deepspeed_classes(strategy)),
            ):
                recorder = StepRecorder(trainer, config, strategy, world, step_log, phases)
                trainer.add_callback(recorder)
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except pickle.UnpicklingError as error:
            raise SeatrialError(f"refused to load {checkpoint}: {str(error).splitlines()[0]}") from error
    report = metrics.report(config, world, _training_run(config, trainer, recorder, world, prepared), phases)
    report["out"] = str(out)
    report["final"] = export.save(trainer, out / "final", strategy != "ddp") if config.export else None
    ranks.run_on_rank0(lambda: metrics.write(report, out), out)
    if dist.is_initialized():
        dist.destroy_process_group()
    return report


def _deepspeed_classes(strategy: str) -> list[type]:
    """The classes of DeepSpeed in a ZeRO-3 checkpoint (deepspeed 0.19); empty with another strategy."""
    if strategy != "zero3":
        return []
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return [LossScaler, ZeroStageEnum]


def _trainer(config: TrainConfig, args: TrainingArguments, prepared: data.PreparedData) -> CountingTrainer:
    model: Any = models.build(config, args.device)
    if config.use_lora:
        model = models.add_lora(model, config)
    trainer = CountingTrainer(
        model=model,
        args=args,
        train_dataset=prepared.blocks,
        data_collator=default_data_collator,
        processing_class=prepared.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)  # prints every step to standard output
    return trainer


def _training_run(
    config: TrainConfig, trainer: CountingTrainer, recorder: StepRecorder, world: World, prepared: data.PreparedData
) -> metrics.TrainingRun:
    report = prepared.report
    info = DatasetInfo(
        source=config.data.path or f"generated: {config.data.layout}",
        rows=report["rows"],
        tokens=report["blocks"] * config.seq_len,
        vocabulary=config.architecture().vocab_size,
        entropy_bound=report.get("entropy_bound"),
        details={**report, "folder": str(prepared.folder)},
    )
    return metrics.TrainingRun(
        steps=recorder.steps,
        model=trainer.accelerator.unwrap_model(trainer.model),
        optimizer=trainer.optimizer,
        strategy=effective_strategy(config),
        compute_dtype="bf16" if config.bf16 else metrics.dtype_name(models.weights_dtype(config)),
        data=info,
        trained_tokens=sum(world.gather(int(trainer.trained_tokens))),
        checkpoints=recorder.saves,
        gradient_bytes=recorder.gradient_bytes,
        versions={library.__name__: library.__version__ for library in (transformers, accelerate, peft)},
    )
