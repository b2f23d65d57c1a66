"""metrics.json, the same of both stacks: what a training run was, how fast, and where memory went."""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from seatrial.model import SeatrialError
from seatrial.train import checkpoint, exposed_communication
from seatrial.train.data import DatasetInfo
from seatrial.train.parallel import World, tensor_counts
from seatrial.train.progress import StartupPhases, Step
from seatrial.train.step_timer import gemm_tflops
from seatrial.train.train_config import TrainConfig
from seatrial.util import data_files
from seatrial.util.files import atomic_write, write_json

GIB = 2**30
_WIDTH = {"fp32": 4, "bf16": 2}
_SHORT = {torch.float: "fp32", torch.bfloat16: "bf16", torch.half: "fp16", torch.double: "fp64"}


@dataclass(frozen=True)
class TrainingRun:
    """A training that is over, as its stack knows it. What it cannot know is None, and null in metrics.json."""

    steps: Sequence[Step]
    model: nn.Module
    optimizer: Any
    strategy: str  # as it was really spread, were there several ranks
    compute_dtype: str  # what matrices are multiplied in
    data: DatasetInfo
    trained_tokens: int  # of all ranks, those that the loss was taken of
    checkpoints: Sequence[checkpoint.CheckpointTiming]
    compiled_graphs: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)


def report(settings: TrainConfig, world: World, run: TrainingRun, phases: StartupPhases) -> dict[str, Any]:
    """metrics.json. All ranks must call this when the last step is done: train_runtime_s ends now.

    Speeds are of the steps after ``untimed_steps``, saving excluded.
    """
    common = _common(settings, world, run.steps, phases)
    measured = run.steps[settings.untimed_steps :] or run.steps[-1:]
    ranks = world.gather(_this_rank(world, measured))
    trained, every = parameter_counts(run.model)
    return common | {
        "run_name": settings.run_name,
        "stack": settings.stack,
        "strategy": run.strategy if world.size > 1 or run.strategy == "fsdp2" else "single",
        "replicas": _replicas(settings, world, run),
        "precision": describe_precision(run),
        "weights": settings.model.weights,
        "gpu0": ranks[0]["device"],
        "hosts": len({rank["host"] for rank in ranks}),
        "parameters": every,
        "trained_parameters": trained,
        **tensor_counts(run.model),
        "trained_tokens": run.trained_tokens,
        **_speed(settings, world, measured, ranks),
        "slowest_rank": slowest_rank(ranks),
        **exposed_communication.NOT_MEASURED,
        "phases_s": phases.seconds,
        "compile_s": max(0.0, run.steps[0].seconds - _middle(measured)) if run.compiled_graphs else 0.0,
        "compiled_graphs": run.compiled_graphs,
        "loss_first": run.steps[0].loss,
        "loss_last": run.steps[-1].loss,
        "loss_entropy_bound": run.data.entropy_bound,
        "memory_peak_gib": _most(ranks, "memory_peak_gib"),
        "allocation_retries": _most(ranks, "allocation_retries"),
        "allocator": _allocator(),
        "params_and_optimizer_gib": _most(ranks, "memory_allocated_gib"),
        "params_and_optimizer_expected_gib": _state_gib(settings, world, run),
        "checkpoints": [asdict(save) for save in run.checkpoints],
        "data": asdict(run.data),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), **run.versions},
        "ranks": ranks,
    }


def _common(settings: TrainConfig, world: World, steps: Sequence[Step], phases: StartupPhases) -> dict[str, Any]:
    """What training scripts print at their end, under the names they give it; warm-up and saving included.

    wall_time_s begins when the data is prepared, so that building the model is in it, and train_runtime_s with the
    first step. approx_tokens are the positions of all sequences, padding among them: samples × seq_len.
    """
    runtime, wall = phases.since("build"), phases.since("data")
    tokens = sum(step.tokens for step in steps)
    return {
        "train_runtime_s": runtime,
        "train_loss": fmean(step.loss for step in steps),
        "train_samples_per_second": tokens / settings.seq_len / runtime,
        "train_steps_per_second": len(steps) / runtime,
        "steps": len(steps),
        "approx_tokens": tokens,
        "approx_tokens_per_second": tokens / runtime,
        "wall_time_s": wall,
        "approx_tokens_per_rank": tokens // world.size,
        "approx_tokens_per_s_per_rank": tokens / world.size / wall,
        "world_size": world.size,
        "torch": str(torch.__version__),
        "model": settings.model.name,
        "dataset": settings.data.path or f"generated {settings.data.layout}",
        "use_lora": settings.use_lora,
        "bf16": settings.bf16,
        "gradient_checkpointing": settings.gradient_checkpointing,
    }


def _speed(
    settings: TrainConfig, world: World, measured: Sequence[Step], ranks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Of the ``measured`` steps, by this rank's clock: all ranks step together."""
    shape = settings.model.architecture()
    seconds = sorted(step.seconds for step in measured)
    speed = sum(step.tokens for step in measured) / sum(seconds) / world.size
    flops = shape.flops_per_token(settings.seq_len, weight_gradients=not settings.use_lora)
    tflops = speed * flops / 1e12
    peak = peak_tflops(ranks[0]["device"])
    gemm = min((rank["gemm_tflops"] for rank in ranks if rank["gemm_tflops"] is not None), default=None)
    waits = [step.data_wait_s for step in measured if step.data_wait_s is not None]
    return {
        "steps_measured": len(measured),
        "tokens_per_second_per_gpu": speed,
        "flops_per_token": flops,
        "tflops_per_gpu": tflops,
        "mfu_percent": None if peak is None else 100 * tflops / peak,
        "mfu_formula": f"({4 if settings.use_lora else 6}·N + 12·L·h·d·s) · tok/s/GPU / peak; N = {shape.parameters:,}",
        "peak_tflops": peak,
        "gemm_percent": None if gemm is None else 100 * tflops / gemm,
        "gemm_tflops": gemm,
        "step_p50_s": median(seconds),
        "step_p99_s": seconds[math.ceil(0.99 * len(seconds)) - 1],
        "data_wait_percent": 100 * sum(waits) / sum(seconds) if waits else None,
    }


def _middle(steps: Sequence[Step]) -> float:
    return median(step.seconds for step in steps)


def _this_rank(world: World, measured: Sequence[Step]) -> dict[str, Any]:
    gpu = world.device.type == "cuda"
    forward = [step.forward_s for step in measured if step.forward_s is not None]
    return {
        "rank": world.rank,
        "host": world.host,
        "device": torch.cuda.get_device_name(world.device) if gpu else "CPU",
        "step_p50_s": _middle(measured),
        "forward_p50_s": median(forward) if forward else None,
        "memory_peak_gib": torch.cuda.max_memory_allocated(world.device) / GIB if gpu else None,
        "memory_allocated_gib": torch.cuda.memory_allocated(world.device) / GIB if gpu else None,
        "allocation_retries": torch.cuda.memory_stats(world.device).get("num_alloc_retries") if gpu else None,
        "gemm_tflops": gemm_tflops(world.device),  # last: it needs memory of its own
    }


def _allocator() -> str:
    """The variables that set up torch's allocator, as they stand; an older torch reads the second alone."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "as it is by default"


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Parameters that are trained, and all of them; whole ones, also where a rank holds a share (FSDP2, ZeRO-3)."""
    sizes = [(_numbers(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def _numbers(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3 leaves an empty tensor; a DTensor is whole


def describe_precision(run: TrainingRun) -> str:
    """What is kept in which type, by the tensors themselves; of Adam, whose state lies beside its master weights."""
    parameters = list(run.model.parameters())
    frozen = _types(p for p in parameters if not p.requires_grad)
    trained = _types(p for p in parameters if p.requires_grad)
    master = _types(run.optimizer.state)
    adam = _types(state["exp_avg"] for state in run.optimizer.state.values() if "exp_avg" in state)
    said = [
        f"{run.compute_dtype} compute",
        *([f"{frozen} frozen weights"] if frozen else []),
        f"{trained} trained weights",
    ]
    said += [f"{master} master weights"] if master and master != trained else []
    return ", ".join([*said, f"{adam or 'unknown'} Adam"])


def _types(tensors: Iterable[Any]) -> str:
    return " and ".join(sorted({dtype_name(tensor.dtype) for tensor in tensors}))


def dtype_name(dtype: torch.dtype) -> str:
    """fp32 for torch.float32, and so on."""
    return _SHORT.get(dtype, str(dtype))


def _most(ranks: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The largest of what ranks measured; None where none could: memory is known of GPUs only."""
    return max((rank[name] for rank in ranks if rank[name] is not None), default=None)


def slowest_rank(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Who takes longest for a forward pass, and how much longer than the median of all: all steps end together.

    Under FSDP2 a forward pass waits for the others' weights, so that there the figure says less. None where forward
    passes were not timed.
    """
    if any(rank["forward_p50_s"] is None for rank in ranks):
        return None
    worst = max(ranks, key=lambda rank: rank["forward_p50_s"])
    middle = median(rank["forward_p50_s"] for rank in ranks)
    return {"rank": worst["rank"], "host": worst["host"], "ratio_to_median": worst["forward_p50_s"] / middle}


def _state_gib(settings: TrainConfig, world: World, run: TrainingRun) -> float | None:
    """Weights and Adam's two moments on one device, by arithmetic: gradients are freed after each step.

    None under ZeRO-3, whose own config file says what lies where.
    """
    if run.strategy == "zero3":
        return None
    if settings.parallel.cpu_offload:
        return 0.0
    held = sum(_numbers(p) * p.element_size() * (3 if p.requires_grad else 1) for p in run.model.parameters())
    return held / (world.size / _replicas(settings, world, run)) / GIB


def _replicas(settings: TrainConfig, world: World, run: TrainingRun) -> int:
    """How many ranks, or groups of ranks, have the whole model (HSDP: several, each spread over a group)."""
    return world.size if run.strategy == "ddp" else settings.parallel.replicas


@cache
def peak_tflops(device: str) -> float | None:
    """The vendor's dense bf16 peak in TFLOP/s (data/skus/*.yaml); None for hardware that no file names exactly."""
    for sku in data_files.read_all("skus"):
        if device in sku["nvml_names"] and "bf16" in sku.get("spec", {}):
            return float(sku["spec"]["bf16"]["value"])
    return None


def write(found: Mapping[str, Any], out: Path) -> None:
    """metrics.json in ``out``, and the same for a person: summary.txt, also to standard error. The first rank's."""
    write_json(out / "metrics.json", found)
    atomic_write(out / "summary.txt", summary_text(found).encode())
    sys.stderr.write(summary_text(found))


def summary_text(found: Mapping[str, Any]) -> str:
    """metrics.json in a few lines."""
    mfu, shown = found["mfu_percent"], found["exposed_communication_percent"]
    share = f"MFU {mfu:.1f} % of {found['peak_tflops']:g} TFLOP/s" if mfu is not None else "MFU unknown: peak unknown"
    floor = f" (floor {found['loss_entropy_bound']:.4f})" if found["loss_entropy_bound"] is not None else ""
    memory = f"; peak memory {found['memory_peak_gib']:.1f} GiB" if found["memory_peak_gib"] is not None else ""
    if retries := found["allocation_retries"]:
        memory += f"; it was so full that the allocator gave unused blocks back {retries} times, which takes time"
    how = found["exposed_communication_method"]
    exchange = f"\nexposed communication {shown:.1f} % of a step ({how})" if shown is not None else ""
    hsdp = found["strategy"] == "fsdp2" and found["replicas"] > 1
    spread = f"fsdp2 of {found['replicas']} replicas (HSDP)" if hsdp else found["strategy"]
    lines = [
        f"{found['run_name']}: {found['model']}, stack {found['stack']}, {spread}, {found['precision']}",
        f"{found['tokens_per_second_per_gpu']:,.0f} tok/s/GPU on {found['world_size']} × {found['gpu0']}, {share}",
        f"step p50 {found['step_p50_s']:.4f} s, p99 {found['step_p99_s']:.4f} s over {found['steps_measured']} steps; "
        f"compile {found['compile_s']:.1f} s{memory}{exchange}",
        f"loss {found['loss_first']:.4f} → {found['loss_last']:.4f}{floor}; weights {found['weights']}, "
        f"data {found['data']['source']}",
        "until the first step "
        + ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in found["phases_s"].items()),
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def explain_out_of_memory(settings: TrainConfig, device: torch.device) -> Iterator[None]:
    """Turns an out-of-memory error of the device into one that says where memory went, and what would help."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise SeatrialError(_explain(settings, device, str(error) or "MemoryError")) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # torch has no class for the CPU's
            raise
        raise SeatrialError(_explain(settings, device, str(error).partition("DefaultCPUAllocator: ")[2])) from error


def _explain(settings: TrainConfig, device: torch.device, said: str) -> str:
    remedies = (_smaller_batch(settings), _fewer_activations(settings), _less_state(settings))
    where = "the CPU" if device.type == "cpu" else device
    return (
        f"{where} of {socket.gethostname()} is out of memory: {said.splitlines()[0]}\n"
        f"  {_where_it_went(settings, device)}\n"
        + "\n".join(f"  {number}. {remedy}" for number, remedy in enumerate(remedies, 1))
    )


def _where_it_went(settings: TrainConfig, device: torch.device) -> str:
    parameters = settings.model.architecture().parameters
    if settings.use_lora:
        width = _WIDTH["bf16" if settings.bf16 else "fp32"]
        state = f"frozen weights {parameters * width / GIB:.1f} GiB; adapters, their gradients and Adam are small"
    else:
        each = parameters * _WIDTH[settings.master_dtype] / GIB
        state = f"weights {each:.1f} GiB, gradients {each:.1f}, Adam {2 * each:.1f}"
    shared = "" if settings.parallel.strategy == "ddp" else ", shared by all ranks"
    held = ""
    if device.type == "cuda":
        (free, total), used = torch.cuda.mem_get_info(), torch.cuda.memory_allocated()
        sizes = (used, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved() - used, free, total)
        held = "; held now {:.1f} GiB, at most {:.1f}, kept unused {:.1f}, free {:.1f} of {:.1f}".format(
            *(size / GIB for size in sizes)
        )
    return f"{state}{shared}{held}; the rest is activations, of {settings.bsz} × {settings.seq_len} tokens"


def _smaller_batch(settings: TrainConfig) -> str:
    if settings.bsz == 1:
        return f"seq_len={settings.seq_len // 2}"
    return f"bsz={settings.bsz // 2} and grad_accum={settings.grad_accum * 2}, which train the same batch"


def _fewer_activations(settings: TrainConfig) -> str:
    if not settings.gradient_checkpointing:
        return "gradient_checkpointing=true: a third more arithmetic, a fraction of the activations"
    if settings.stack == "native":
        return f"loss_chunks={settings.loss_chunks * 4}: fewer logits at once"
    return "stack=native: never all logits at once"


def _less_state(settings: TrainConfig) -> str:
    if settings.parallel.strategy == "ddp":
        return "parallel.strategy=fsdp2, under torchrun: weights and Adam's state are spread over the ranks"
    if settings.parallel.strategy == "zero3":
        return f"offload_optimizer to the cpu, in {settings.parallel.deepspeed}"
    if settings.parallel.cpu_offload:
        return "use_lora=true: no gradients and no Adam for most weights" if not settings.use_lora else "more ranks"
    return "parallel.cpu_offload=true: weights and Adam's state in the host's memory"
