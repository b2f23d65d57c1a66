"""A training from start to metrics.json."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import torch.distributed as dist
import transformers
from transformers import TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import TrainOutput

from seatrial.model import SeatrialError, UsageError
from seatrial.train.files import write_json
from seatrial.train.hf import checkpoints, data, export, hub, models, ranks
from seatrial.train.hf.arguments import arguments, strategy
from seatrial.train.hf.watch import STEPS, CountingTrainer, Watch
from seatrial.train.metrics import explained_memory
from seatrial.train.settings import TrainConfig


def train(config: TrainConfig, out: Path) -> dict[str, Any]:
    """See seatrial.train.hf.train."""
    began = time.perf_counter()
    config.architecture()
    models.quiet()
    if os.environ.get("RANK", "0") == "0":
        _announce(config, out)
    base = _base_for_zero3(config, out)
    args = arguments(config, out)
    prepared = data.prepare(config, out)
    with explained_memory(config, args.device):
        trainer, watch = _trainer(config, out, args, prepared, base)
        found = checkpoints.newest(out) if config.checkpoint.resume else None
        if found:
            model = trainer.accelerator.unwrap_model(trainer.model)
            checkpoints.refuse_other(found, model, strategy(config).partition(",")[0])
        result = trainer.train(resume_from_checkpoint=str(found) if found else None)
    if not watch.steps:
        raise SeatrialError(f"{out} has taken all of its {config.max_steps} steps: nothing is left to resume")
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    exported = export.save(trainer, out / "final", strategy(config) != "ddp")
    metrics = {
        **_seed_metrics(config, trainer, result, time.perf_counter() - began),
        **_speed(config, watch),
        **_what_ran(config, trainer, prepared),
        "final": exported,
        "checkpoint_save_s": watch.save_seconds,
        "peak_memory_bytes": peak,
        "out": str(out),
        "first_loss": watch.steps[0]["loss"],
        "last_loss": watch.steps[-1]["loss"],
    }
    ranks.once(lambda: write_json(out / "metrics.json", metrics))
    if dist.is_initialized():
        dist.destroy_process_group()
    return metrics


def _announce(config: TrainConfig, out: Path) -> None:
    """Rank 0, before the ranks meet: take ``out`` for this run. Raises UsageError where it holds another."""
    if not config.checkpoint.resume and (out / STEPS).exists():
        raise UsageError(f"{out} holds a run: name another --out, or go on with --set checkpoint.resume=true")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", config.model_dump(mode="json"))
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; name another folder with --out") from error


def _base_for_zero3(config: TrainConfig, out: Path) -> Path | None:
    """Where to load random weights from, under ZeRO-3, which draws others when it shards while a model is built.

    Before the ranks join: from then on transformers shards whatever it builds. They meet again over the data.
    """
    if strategy(config) != "zero3" or config.model.weights != "random":
        return None
    if "RANK" not in os.environ:
        raise UsageError(
            "ZeRO-3 shards over ranks, and this process is alone: torchrun --standalone --nproc-per-node=N -m seatrial "
            "train CONFIG, or --set parallel.strategy=ddp"
        )
    if os.environ["RANK"] == "0":
        models.save_random(config, out / models.BASE)
    return out / models.BASE


def _trainer(
    config: TrainConfig, out: Path, args: TrainingArguments, prepared: data.Prepared, base: Path | None
) -> tuple[CountingTrainer, Watch]:
    model: Any = models.build(config, args.device, base)
    if config.use_lora:
        model = models.with_lora(model, config)
    watch = Watch(config, strategy(config), out)
    trainer = CountingTrainer(
        model=model,
        args=args,
        train_dataset=prepared.blocks,
        data_collator=default_data_collator,
        processing_class=prepared.tokenizer,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)  # prints every step to standard output
    watch.trainer = trainer
    return trainer, watch


def _seed_metrics(config: TrainConfig, trainer: CountingTrainer, result: TrainOutput, wall_s: float) -> dict[str, Any]:
    """Under the names that training scripts use. approx_tokens counts whole blocks, padding among them."""
    ours, world = trainer.tokens, ranks.world_size()
    runtime = result.metrics["train_runtime"]
    return {
        "run_name": config.run_name,
        "train_runtime_s": runtime,
        "train_loss": result.training_loss,
        "train_samples_per_second": result.metrics["train_samples_per_second"],
        "train_steps_per_second": result.metrics["train_steps_per_second"],
        "approx_tokens": ours * world,
        "approx_tokens_per_second": ours * world / runtime,
        "wall_time_s": wall_s,
        "approx_tokens_per_rank": ours,
        "approx_tokens_per_s_per_rank": ours / wall_s,
        "world_size": world,
        "gpu0": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "model": config.model.name,
        "dataset": config.data.path or f"generated {config.data.layout}",
        "use_lora": config.use_lora,
        "bf16": config.bf16,
        "gradient_checkpointing": config.gradient_checkpointing,
    }


def _speed(config: TrainConfig, watch: Watch) -> dict[str, Any]:
    """Of the steps after ``settle_steps``, by their median; this rank's, and all ranks step together."""
    seconds = watch.seconds[config.settle_steps :]  # none, where a resumed run had no more left
    tokens = config.bsz * config.grad_accum * config.seq_len
    median = statistics.median(seconds) if seconds else None
    return {
        "stack": "hf",
        "steps": len(watch.seconds),
        "settle_steps": config.settle_steps,
        "step_s_median": median,
        "step_s_slowest": max(seconds, default=None),
        "first_step_s": watch.seconds[0],
        "tokens_per_s_per_gpu": tokens / median if median else None,
    }


def _what_ran(config: TrainConfig, trainer: CountingTrainer, prepared: data.Prepared) -> dict[str, Any]:
    trained_model = trainer.accelerator.unwrap_model(trainer.model)
    trained, every = models.counts(trained_model)
    weights = hub.source_of(config.model.weights, "random")
    return {
        "strategy": strategy(config),
        "strategy_requested": config.parallel.strategy,
        "weights": weights,
        "data": prepared.report["data"],
        "data_report": prepared.report,
        "data_folder": str(prepared.folder),
        "parameters": every,
        "trained_parameters": trained,
        "weights_dtype": str(models.dtype(config)).removeprefix("torch."),
        "trained_dtypes": sorted({str(p.dtype) for p in trained_model.parameters() if p.requires_grad}),
        "compiled": False,
        "trained_tokens_rank0": int(trainer.trained_tokens),
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "peft": peft.__version__,
        "python": platform.python_version(),
    }
