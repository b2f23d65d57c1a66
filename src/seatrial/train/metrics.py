"""What a training run says of itself: a line a step, a line an interval, metrics.json; and where memory went."""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from statistics import fmean, median
from typing import Any, TextIO

import torch
import yaml

from seatrial.model import SeatrialError
from seatrial.train import checkpoint
from seatrial.train.clock import gemm_tflops
from seatrial.train.data import Facts
from seatrial.train.decoder import count
from seatrial.train.parallel import Built, World
from seatrial.train.settings import TrainConfig

GIB = 2**30
_WIDTH = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Step:
    """One step, of all ranks together but for the times, which are this rank's. ``loss`` in nats a counted token."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    epoch: float
    tokens: int
    seconds: float
    forward_s: float
    data_wait_s: float


class Phases:
    """Where the time went before the first step was done: seconds by phase, from the start of the process."""

    def __init__(self, started: float, phase: str) -> None:
        self._started = self._since = started
        self.seconds: dict[str, float] = {}
        self.next(phase)

    def next(self, phase: str) -> None:
        """``phase`` has just ended."""
        now = time.time()
        self.seconds[phase] = now - self._since
        self._since = now

    def first_step(self) -> None:
        """A step has been seen to be done; only the first counts, and holds what had to be compiled for it."""
        if "first_step" not in self.seconds:
            self.next("first_step")
            self.seconds["until_first_step"] = time.time() - self._started


class Progress:
    """Steps as they become known: each a JSON line in the file, and now and then a line for a person."""

    def __init__(self, settings: TrainConfig, world: World, file: TextIO | None) -> None:
        self._settings, self._world, self._file = settings, world, file
        self._said = self._began = time.monotonic()
        self._first: int | None = None

    def note(self, record: Step) -> Step:
        if self._file is not None:
            self._file.write(json.dumps(asdict(record)) + "\n")
            self._tell(record)
        return record

    def _tell(self, record: Step) -> None:
        now = time.monotonic()
        self._first = self._first or record.step
        last = record.step == self._settings.max_steps
        if now - self._said < self._settings.log_every_s and not last:
            return
        self._said = now
        left = (now - self._began) / (record.step - self._first + 1) * (self._settings.max_steps - record.step)
        end = "\r" if sys.stderr.isatty() and not last else "\n"
        print(self._line(record, left), end=end, file=sys.stderr, flush=True)

    def _line(self, record: Step, left: float) -> str:
        speed = record.tokens / record.seconds / self._world.size
        return (
            f"step {record.step}/{self._settings.max_steps}  loss {record.loss:.4f}  grad norm {record.grad_norm:.3f}  "
            f"lr {record.learning_rate:.2e}  {speed:,.0f} tok/s/GPU  data {record.data_wait_s / record.seconds:.1%}  "
            f"{left:.0f} s left"
        )


def report(
    settings: TrainConfig,
    world: World,
    built: Built,
    facts: Facts,
    records: Sequence[Step],
    phases: Phases,
    saves: Sequence[checkpoint.Result],
) -> dict[str, Any]:
    """metrics.json. All ranks must call this. Speeds are of the steps after ``settle_steps``, saving excluded."""
    measured = records[settings.settle_steps :] or records[-1:]
    ranks = world.gather(_this_rank(world, measured))
    shape = settings.model.architecture()
    device = ranks[0]["device"]
    seconds = sorted(record.seconds for record in measured)
    speed = sum(record.tokens for record in measured) / sum(seconds) / world.size
    peak = peak_tflops(device)
    gemm = min((rank["gemm_tflops"] for rank in ranks if rank["gemm_tflops"] is not None), default=None)
    flops = shape.flops_per_token(settings.seq_len, weight_gradients=not settings.use_lora)
    common = _common(settings, world, records, device)
    state = _state_bytes(settings, world, built)
    return common | {
        "run_name": settings.run_name,
        "stack": settings.stack,
        "strategy": settings.parallel.strategy if world.size > 1 or settings.parallel.strategy == "fsdp2" else "single",
        "precision": f"{'bf16' if settings.bf16 else 'fp32'} compute, {settings.master_dtype} trained weights and Adam",
        "weights": settings.model.weights,
        "hosts": len({rank["host"] for rank in ranks}),
        "parameters": count(list(built.model.parameters())),
        "trained_parameters": count(built.trained),
        "steps_measured": len(measured),
        "tokens_per_second_per_gpu": speed,
        "tflops_per_gpu": speed * flops / 1e12,
        "mfu_percent": None if peak is None else 100 * speed * flops / (peak * 1e12),
        "mfu_formula": f"({4 if settings.use_lora else 6}·N + 12·L·h·d·s) · tok/s/GPU / peak; N = {shape.parameters:,}",
        "peak_tflops": "unknown" if peak is None else peak,
        "gemm_percent": None if gemm is None else 100 * speed * flops / (gemm * 1e12),
        "gemm_tflops": gemm,
        "step_p50_s": median(seconds),
        "step_p99_s": seconds[math.ceil(0.99 * len(seconds)) - 1],
        "data_wait_percent": 100 * sum(record.data_wait_s for record in measured) / sum(seconds),
        "slowest_rank": slowest(ranks),
        "phases_s": phases.seconds,
        "compile_s": max(0.0, records[0].seconds - median(seconds)),
        "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "loss_first": records[0].loss,
        "loss_last": records[-1].loss,
        "loss_floor": facts.floor,
        "memory_peak_gib": _most(ranks, "memory_peak_gib"),
        "memory_state_gib": _most(ranks, "memory_held_gib"),
        "memory_state_expected_gib": state / GIB,
        "checkpoints": [asdict(save) for save in saves],
        "data": asdict(facts),
        "ranks": ranks,
    }


def _common(settings: TrainConfig, world: World, records: Sequence[Step], device: str) -> dict[str, Any]:
    """What training scripts print at their end, under the names they give it; warm-up included."""
    runtime = sum(record.seconds for record in records)
    samples = len(records) * settings.bsz * settings.grad_accum * world.size
    tokens = samples * settings.seq_len
    return {
        "train_runtime_s": runtime,
        "train_loss": fmean(record.loss for record in records),
        "train_samples_per_second": samples / runtime,
        "train_steps_per_second": len(records) / runtime,
        "approx_tokens": tokens,
        "approx_tokens_per_second": tokens / runtime,
        "wall_time_s": runtime,
        "approx_tokens_per_rank": tokens // world.size,
        "approx_tokens_per_s_per_rank": tokens / world.size / runtime,
        "world_size": world.size,
        "gpu0": device,
        "torch": str(torch.__version__),
        "model": settings.model.name,
        "dataset": settings.data.path or "generated",
        "use_lora": settings.use_lora,
        "bf16": settings.bf16,
        "gradient_checkpointing": settings.gradient_checkpointing,
    }


def _this_rank(world: World, measured: Sequence[Step]) -> dict[str, Any]:
    gpu = world.device.type == "cuda"
    return {
        "rank": world.rank,
        "host": world.host,
        "device": torch.cuda.get_device_name(world.device) if gpu else "CPU",
        "step_p50_s": median(record.seconds for record in measured),
        "forward_p50_s": median(record.forward_s for record in measured),
        "memory_peak_gib": torch.cuda.max_memory_allocated(world.device) / GIB if gpu else None,
        "memory_held_gib": torch.cuda.memory_allocated(world.device) / GIB if gpu else None,
        "gemm_tflops": gemm_tflops(world.device),  # last: it needs memory of its own
    }


def _most(ranks: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The largest of what ranks measured; None where none could: memory is known of GPUs only."""
    return max((rank[name] for rank in ranks if rank[name] is not None), default=None)


def slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who takes longest for a forward pass, and how much longer than the median of all: all steps end together.

    Under FSDP2 a forward pass waits for the others' weights, so that there the figure says less.
    """
    worst = max(ranks, key=lambda rank: rank["forward_p50_s"])
    middle = median(rank["forward_p50_s"] for rank in ranks)
    return {"rank": worst["rank"], "host": worst["host"], "times_median": worst["forward_p50_s"] / middle}


def _state_bytes(settings: TrainConfig, world: World, built: Built) -> float:
    """Weights and Adam's two moments on one device, by arithmetic: gradients are freed after each step."""
    if settings.parallel.cpu_offload:
        return 0.0
    trained = count(built.trained)
    frozen = count(list(built.model.parameters())) - trained
    held = 3 * trained * _WIDTH[settings.master_dtype] + frozen * _WIDTH["bf16" if settings.bf16 else "fp32"]
    return held / (world.size if settings.parallel.strategy == "fsdp2" else 1)


@cache
def peak_tflops(device: str) -> float | None:
    """The vendor's dense bf16 peak in TFLOP/s (data/skus/*.yaml); None for hardware that no file names exactly."""
    files = (resources.files("seatrial") / "data" / "skus").iterdir()
    for entry in (one for one in files if one.name.endswith(".yaml")):
        sku = yaml.safe_load(entry.read_text(encoding="utf-8"))
        if device in sku["nvml_names"] and "bf16" in sku.get("spec", {}):
            return float(sku["spec"]["bf16"]["value"])
    return None


def say(found: Mapping[str, Any], file: TextIO) -> None:
    """The report in three lines."""
    mfu = found["mfu_percent"]
    share = f"MFU {mfu:.1f} % of {found['peak_tflops']:g} TFLOP/s" if mfu is not None else "MFU unknown: peak unknown"
    floor = f" (floor {found['loss_floor']:.4f})" if found["loss_floor"] is not None else ""
    memory = f"; peak memory {found['memory_peak_gib']:.1f} GiB" if found["memory_peak_gib"] is not None else ""
    print(
        f"{found['tokens_per_second_per_gpu']:,.0f} tok/s/GPU on {found['world_size']} × {found['gpu0']}, {share}\n"
        f"step p50 {found['step_p50_s']:.4f} s, p99 {found['step_p99_s']:.4f} s over {found['steps_measured']} steps; "
        f"compile {found['compile_s']:.1f} s{memory}\n"
        f"loss {found['loss_first']:.4f} → {found['loss_last']:.4f}{floor}",
        file=file,
    )


@contextmanager
def explained_memory(settings: TrainConfig, device: torch.device) -> Iterator[None]:
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
