"""metrics.json of a training run, native or Hugging Face: configuration, speed, loss and memory."""

from __future__ import annotations

import math
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
from seatrial.train.blocks import DatasetInfo
from seatrial.train.memory import GIB, group_bytes, state_metrics
from seatrial.train.parallel import World, tensor_counts
from seatrial.train.progress import StartupPhases, Step
from seatrial.train.rank_times import RankTimes, slowdowns
from seatrial.train.step_timer import gemm_tflops
from seatrial.train.train_config import TrainConfig
from seatrial.util import data_files
from seatrial.util.files import atomic_write, write_json

_DTYPE_BYTES = {"fp32": 4, "bf16": 2}
_DTYPE_NAMES = {torch.float: "fp32", torch.bfloat16: "bf16", torch.half: "fp16", torch.double: "fp64"}


@dataclass(frozen=True)
class TrainingRun:
    """A finished training run, as input of ``report``. None: the stack does not measure this value."""

    steps: Sequence[Step]
    model: nn.Module
    optimizer: Any
    strategy: str  # the strategy in use; differs from the configured zero3 if DeepSpeed is not installed
    compute_dtype: str  # dtype of matrix products
    data: DatasetInfo
    trained_tokens: int  # number of tokens with a loss, summed over all ranks
    checkpoints: Sequence[checkpoint.CheckpointTiming]
    compiled_graphs: int = 0
    gradient_bytes: int | None = None  # bytes of this rank's gradients, measured before zero_grad() frees them
    versions: Mapping[str, str] = field(default_factory=dict)


def report(settings: TrainConfig, world: World, run: TrainingRun, phases: StartupPhases) -> dict[str, Any]:
    """The content of metrics.json. All ranks call this right after the last step, which ends train_runtime_s.

    Step times, tokens_per_second_per_gpu and MFU are those of the steps after ``untimed_steps`` (of the last step if
    no steps come after them), without checkpoint saves. The rates of ``_script_metrics`` include all steps and saves.
    """
    script_metrics = _script_metrics(settings, world, run.steps, phases)
    measured = run.steps[settings.untimed_steps :] or run.steps[-1:]
    state = state_metrics(run.model, run.optimizer, run.gradient_bytes)
    ranks = world.gather(_rank_metrics(world, measured) | state)
    trained, total = parameter_counts(run.model)
    group_sizes = group_bytes(run.model, _DTYPE_BYTES["bf16" if settings.bf16 else "fp32"])
    return script_metrics | {
        "run_name": settings.run_name,
        "stack": settings.stack,
        "strategy": run.strategy if world.size > 1 or run.strategy == "fsdp2" else "single",
        "replicas": _replicas(settings, world, run),
        "precision": describe_precision(run),
        "weights": settings.model.weights,
        "gpu0": ranks[0]["device"],
        "hosts": len({rank["host"] for rank in ranks}),
        "parameters": total,
        "trained_parameters": trained,
        **tensor_counts(run.model),
        "trained_tokens": run.trained_tokens,
        **_speed(settings, world, measured, ranks),
        "slowest_rank": slowest_rank(ranks),
        **exposed_communication.NOT_MEASURED,
        "phases_s": phases.seconds,
        "compile_s": max(0.0, run.steps[0].seconds - _median_seconds(measured)) if run.compiled_graphs else 0.0,
        "compiled_graphs": run.compiled_graphs,
        "loss_first": run.steps[0].loss,
        "loss_last": run.steps[-1].loss,
        "loss_entropy_bound": run.data.entropy_bound,
        "memory_peak_gib": _max_over_ranks(ranks, "memory_peak_gib"),
        "allocation_retries": _max_over_ranks(ranks, "allocation_retries"),
        "params_and_optimizer_gib": _max_over_ranks(ranks, "memory_allocated_gib"),
        "params_and_optimizer_expected_gib": _expected_state_gib(settings, world, run),
        "fsdp_groups": len(group_sizes),
        "fsdp_largest_group_gib": max(group_sizes) / GIB if group_sizes else None,
        "checkpoints": [asdict(timing) for timing in run.checkpoints],
        "data": asdict(run.data),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), **run.versions},
        "ranks": ranks,
    }


def _script_metrics(
    settings: TrainConfig, world: World, steps: Sequence[Step], phases: StartupPhases
) -> dict[str, Any]:
    """The metrics that training scripts usually print at the end; times include untimed steps and checkpoint saves.

    wall_time_s starts after data preparation; train_runtime_s starts later, after the model is built.
    approx_tokens counts all positions, including padding: samples × seq_len. approx_tokens_per_second divides by
    train_runtime_s, approx_tokens_per_s_per_rank by wall_time_s.
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
    """Speed, MFU and step times of the ``measured`` steps by this rank's clock: all ranks end each step together."""
    architecture = settings.model.architecture()
    seconds = sorted(step.seconds for step in measured)
    tokens_per_second = sum(step.tokens for step in measured) / sum(seconds) / world.size
    flops_per_token = architecture.flops_per_token(settings.seq_len, weight_gradients=not settings.use_lora)
    tflops = tokens_per_second * flops_per_token / 1e12
    peak = peak_tflops(ranks[0]["device"])
    gemm = min((rank["gemm_tflops"] for rank in ranks if rank["gemm_tflops"] is not None), default=None)
    waits = [step.data_wait_s for step in measured if step.data_wait_s is not None]
    flops_factor = 4 if settings.use_lora else 6  # as in Architecture.flops_per_token
    return {
        "steps_measured": len(measured),
        "tokens_per_second_per_gpu": tokens_per_second,
        "flops_per_token": flops_per_token,
        "tflops_per_gpu": tflops,
        "mfu_percent": None if peak is None else 100 * tflops / peak,
        "mfu_formula": f"({flops_factor}·N + 12·layers·heads·head_dim·seq_len) · tokens/s/GPU / peak FLOP/s; "
        f"N = {architecture.parameters:,} parameters",
        "peak_tflops": peak,
        "gemm_percent": None if gemm is None else 100 * tflops / gemm,
        "gemm_tflops": gemm,
        "step_p50_s": median(seconds),
        "step_p99_s": seconds[math.ceil(0.99 * len(seconds)) - 1],
        "data_wait_percent": 100 * sum(waits) / sum(seconds) if waits else None,
    }


def _median_seconds(steps: Sequence[Step]) -> float:
    return median(step.seconds for step in steps)


def _rank_metrics(world: World, measured: Sequence[Step]) -> dict[str, Any]:
    """This rank's entry of ``ranks`` in metrics.json, without the fields of ``state_metrics``."""
    on_gpu = world.device.type == "cuda"
    return {
        "rank": world.rank,
        "host": world.host,
        "step_p50_s": _median_seconds(measured),
        **asdict(RankTimes.of_steps(world.device_name, measured)),
        "memory_peak_gib": torch.cuda.max_memory_allocated(world.device) / GIB if on_gpu else None,
        "memory_allocated_gib": torch.cuda.memory_allocated(world.device) / GIB if on_gpu else None,
        "allocation_retries": torch.cuda.memory_stats(world.device).get("num_alloc_retries") if on_gpu else None,
        "gemm_tflops": gemm_tflops(world.device),  # after the memory metrics, since it allocates memory
    }


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """The numbers of trained and of all parameters; a parameter that FSDP2 or ZeRO-3 has sharded counts in full."""
    sizes = [(_unsharded_size(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def _unsharded_size(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3: the tensor is empty, ds_numel is its size


def describe_precision(run: TrainingRun) -> str:
    """The dtypes of computation, weights and Adam state, such as "bf16 compute, fp32 trained weights, fp32 Adam"."""
    parameters = list(run.model.parameters())
    frozen = _dtypes(p for p in parameters if not p.requires_grad)
    trained = _dtypes(p for p in parameters if p.requires_grad)
    master = _dtypes(run.optimizer.state)
    adam = _dtypes(state["exp_avg"] for state in run.optimizer.state.values() if "exp_avg" in state)
    parts = [
        f"{run.compute_dtype} compute",
        *([f"{frozen} frozen weights"] if frozen else []),
        f"{trained} trained weights",
    ]
    parts += [f"{master} master weights"] if master and master != trained else []
    return ", ".join([*parts, f"{adam or 'unknown'} Adam"])


def _dtypes(tensors: Iterable[Any]) -> str:
    """The distinct dtypes of ``tensors``, such as "bf16 and fp32"."""
    return " and ".join(sorted({dtype_name(tensor.dtype) for tensor in tensors}))


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of ``dtype``, such as fp32 for torch.float32."""
    return _DTYPE_NAMES.get(dtype, str(dtype))


def _max_over_ranks(ranks: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The largest value over the ranks; None if no rank has a value (memory metrics exist for GPUs only)."""
    return max((rank[name] for rank in ranks if rank[name] is not None), default=None)


def slowest_rank(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The rank with the longest compute time, its host, and the ratio of this time to the median of the other ranks.

    Step times cannot show the slowest rank, since all ranks end a step together. ``interval``: the 95 % confidence
    interval of the ratio. None if compute time was not separated from waiting (as with ZeRO-3), if there are
    fewer than rank_times.MIN_STEPS steps, or if no two ranks have the same device model. ``ranks``: as in metrics.json.
    """
    slowdown_by_index = slowdowns([RankTimes.from_metrics(rank) for rank in ranks])
    if not slowdown_by_index:
        return None
    index, slowdown = max(slowdown_by_index.items(), key=lambda item: item[1].ratio)
    return {
        "rank": ranks[index]["rank"],
        "host": ranks[index]["host"],
        "ratio_to_median": slowdown.ratio,
        "interval": [slowdown.low, slowdown.high],
    }


def _expected_state_gib(settings: TrainConfig, world: World, run: TrainingRun) -> float | None:
    """The computed size of weights and Adam's two moments on one device.

    Gradients do not count, since they are freed after each step. 0 with cpu_offload. None with ZeRO-3, where
    DeepSpeed's config file determines the placement.
    """
    if run.strategy == "zero3":
        return None
    if settings.parallel.cpu_offload:
        return 0.0
    total_bytes = sum(
        _unsharded_size(p) * p.element_size() * (3 if p.requires_grad else 1)  # weight and two moments, or weight only
        for p in run.model.parameters()
    )
    return total_bytes / (world.size / _replicas(settings, world, run)) / GIB


def _replicas(settings: TrainConfig, world: World, run: TrainingRun) -> int:
    """The number of copies of the model: one per rank with DDP, otherwise parallel.replicas (more than 1: HSDP)."""
    return world.size if run.strategy == "ddp" else settings.parallel.replicas


@cache
def peak_tflops(device: str) -> float | None:
    """The vendor's dense bf16 peak in TFLOP/s; None if no file of data/skus has it for this exact device name."""
    for sku in data_files.read_all("skus"):
        if device in sku["nvml_names"] and "bf16" in sku.get("spec", {}):
            return float(sku["spec"]["bf16"]["value"])
    return None


def write(report: Mapping[str, Any], out: Path) -> None:
    """Writes metrics.json and summary.txt to ``out`` and prints the summary to stderr. Called on rank 0 only."""
    write_json(out / "metrics.json", report)
    atomic_write(out / "summary.txt", summary_text(report).encode())
    sys.stderr.write(summary_text(report))


def summary_text(report: Mapping[str, Any]) -> str:
    """A summary of metrics.json: five lines, or six if exposed communication was measured."""
    mfu, exposed = report["mfu_percent"], report["exposed_communication_percent"]
    mfu_text = "no MFU: peak unknown" if mfu is None else f"MFU {mfu:.1f} % of {report['peak_tflops']:g} TFLOP/s"
    bound = report["loss_entropy_bound"]
    entropy_bound = "" if bound is None else f" (entropy bound {bound:.4f})"
    memory = f"; peak memory {report['memory_peak_gib']:.1f} GiB" if report["memory_peak_gib"] is not None else ""
    if retries := report["allocation_retries"]:
        memory += f"; memory was full, {retries} allocator retries slowed training"
    method = report["exposed_communication_method"]
    communication = f"\nexposed communication {exposed:.1f} % of a step ({method})" if exposed is not None else ""
    hsdp = report["strategy"] == "fsdp2" and report["replicas"] > 1
    parallelism = f"fsdp2 with {report['replicas']} replicas (HSDP)" if hsdp else report["strategy"]
    lines = [
        f"{report['run_name']}: {report['model']}, stack {report['stack']}, {parallelism}, {report['precision']}",
        f"{report['tokens_per_second_per_gpu']:,.0f} tok/s/GPU on {report['world_size']} × {report['gpu0']}, "
        f"{mfu_text}",
        f"step p50 {report['step_p50_s']:.4f} s, p99 {report['step_p99_s']:.4f} s "
        f"over {report['steps_measured']} steps; compile {report['compile_s']:.1f} s{memory}{communication}",
        f"loss {report['loss_first']:.4f} → {report['loss_last']:.4f}{entropy_bound}; weights {report['weights']}, "
        f"data {report['data']['source']}",
        "startup: "
        + ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in report["phases_s"].items()),
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def explain_out_of_memory(settings: TrainConfig, device: torch.device) -> Iterator[None]:
    """Context manager: converts an out-of-memory error to a SeatrialError with memory usage and remedies."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise SeatrialError(_out_of_memory_message(settings, device, str(error) or "MemoryError")) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # torch has no exception class for the CPU
            raise
        reason = str(error).partition("DefaultCPUAllocator: ")[2]
        raise SeatrialError(_out_of_memory_message(settings, device, reason)) from error


def _out_of_memory_message(settings: TrainConfig, device: torch.device, reason: str) -> str:
    smaller_batch = f"seq_len={settings.seq_len // 2}"
    if settings.bsz > 1:
        smaller_batch = f"bsz={settings.bsz // 2} and grad_accum={settings.grad_accum * 2}, for the same global batch"
    remedies = [smaller_batch, *(text for text, applies in _remedies(settings).items() if applies)]
    where = "the CPU" if device.type == "cpu" else device
    return (
        f"{where} of {socket.gethostname()} is out of memory: {reason.splitlines()[0]}\n"
        f"  {_memory_usage(settings, device)}\n"
        + "\n".join(f"  {number}. {remedy}" for number, remedy in enumerate(remedies, 1))
    )


def _memory_usage(settings: TrainConfig, device: torch.device) -> str:
    """The calculated unsharded size of weights, gradients and Adam state; on a GPU also the allocator's sizes."""
    dtype = settings.master_dtype if not settings.use_lora else "bf16" if settings.bf16 else "fp32"
    gib = settings.model.architecture().parameters * _DTYPE_BYTES[dtype] / GIB
    state = "" if settings.use_lora else f", gradients {gib:.1f} GiB, Adam {2 * gib:.1f} GiB"
    sharding = "" if settings.parallel.strategy == "ddp" else " before sharding"
    allocated = ""
    if device.type == "cuda":
        (free, total), used = torch.cuda.mem_get_info(), torch.cuda.memory_allocated()
        sizes = (used, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved() - used, free, total)
        allocated = "; allocated {:.1f} GiB (peak {:.1f}), reserved but unused {:.1f}, free {:.1f} of {:.1f}".format(
            *(size / GIB for size in sizes)
        )
    activations = f"the rest is activations of {settings.bsz} × {settings.seq_len} tokens"
    return f"weights {gib:.1f} GiB{state}{sharding}{allocated}; {activations}"


def _remedies(settings: TrainConfig) -> dict[str, bool]:
    """Setting that needs less memory → whether it applies."""
    recomputes, strategy = settings.gradient_checkpointing, settings.parallel.strategy
    offloads, fsdp2 = settings.parallel.cpu_offload, strategy == "fsdp2"
    return {
        "gradient_checkpointing=true: a third more FLOPs, much smaller activations": not recomputes,
        f"loss_chunks={settings.loss_chunks * 4}: fewer logits at once": recomputes and settings.stack == "native",
        "stack=native: computes the logits in chunks": recomputes and settings.stack == "hf",
        "parallel.strategy=fsdp2, under torchrun: shards weights and Adam's state over the ranks": strategy == "ddp",
        f"offload_optimizer to the CPU in {settings.parallel.deepspeed}": strategy == "zero3",
        "parallel.cpu_offload=true: weights and Adam's state in the host's memory": fsdp2 and not offloads,
        "use_lora=true: no gradients and Adam state for most weights": offloads and not settings.use_lora,
        "more ranks": offloads and settings.use_lora,
    }
