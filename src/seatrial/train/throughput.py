"""How fast the processes train together, against how fast each trains alone at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seatrial.train import markov
from seatrial.train.ddp import SEED, gather, wait_for_all, wrap
from seatrial.train.transformer import Shape, build, count_parameters

# Steps that are not counted: DDP lays out its buckets anew after the first, allocator and clocks settle in the next.
WARMUP = 5
LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one process trains on in each step: ``batch`` sequences of ``seq_len`` tokens."""

    seq_len: int
    dim: int
    layers: int
    batch: int
    steps: int  # timed ones

    @property
    def shape(self) -> Shape:
        return Shape(seq_len=self.seq_len, dim=self.dim, layers=self.layers)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


# 85 M parameters and 16 Ki tokens: about 9 TFLOP a step, long against the launch of its kernels and the exchange of
# 0.34 GB of gradients, so that a slow link or GPU shows and the interpreter does not.
GPU_LOAD = Load(seq_len=512, dim=768, layers=12, batch=32, steps=30)
# 1.2 M parameters: a rehearsal of the procedure, kept to a few seconds on two cores.
CPU_LOAD = Load(seq_len=128, dim=128, layers=6, batch=8, steps=20)


@dataclass(frozen=True)
class Speed:
    """Seconds of each timed step by rank, without and with the others; the last losses of both here; the model."""

    load: Load
    alone: list[list[float]]
    together: list[list[float]]
    last_losses: tuple[float, float]
    model: nn.Module
    parameters: int
    precision: str

    def tokens_per_second(self) -> list[float]:
        """Tokens of all ranks together, by timed step."""
        return [sum(self.load.tokens / seconds for seconds in step) for step in zip(*self.together, strict=True)]

    def scaling_efficiency(self) -> float:
        """Percent: tokens per second together, of what the same processes do alone, by their median steps."""
        together, alone = (sum(1 / median(own) for own in ranks) for ranks in (self.together, self.alone))
        return 100 * together / alone


def load_for(device: str, **wanted: int) -> Load:
    """What suits the device, with the sizes that somebody asked for in place of its own."""
    return replace(GPU_LOAD if torch.device(device).type == "cuda" else CPU_LOAD, **wanted)


def measure(device: str, load: Load, note: Callable[[str], None]) -> Speed:
    """Train without communication, every process at the same time, then together with DistributedDataParallel.

    Both at once, because a machine shares power, cooling and CPU among its processes: one process on an idle machine
    would be faster than any of them can be, and make scaling look worse than it is.
    """
    walks = markov.sequences(load.batch, load.seq_len + 1, SEED + dist.get_rank()).to(device)
    wait_for_all(device)
    note(f"speed: {load.steps} steps alone")
    alone, alone_loss = pace(build(load.shape, SEED, device), walks, load.steps)
    model = build(load.shape, SEED, device)
    wait_for_all(device)
    note(f"speed: {load.steps} steps together")
    together, together_loss = pace(wrap(model, device), walks, load.steps)
    return Speed(
        load=load,
        alone=gather(alone),
        together=gather(together),
        last_losses=(alone_loss, together_loss),
        model=model,
        parameters=count_parameters(model),
        precision="bf16 autocast over fp32 weights" if walks.device.type == "cuda" else "fp32",
    )


def pace(model: nn.Module, walks: Tensor, steps: int) -> tuple[list[float], float]:
    """Seconds of each of ``steps`` training steps after WARMUP, and the last loss.

    bf16 autocast over fp32 weights on a GPU, fp32 on a CPU. The same batch in every step: this times computing and
    exchanging, not reading data.
    """
    on_gpu = walks.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=on_gpu)
    watch = Stopwatch(walks.device)
    for _ in range(WARMUP + steps):
        with torch.autocast(walks.device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(walks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.lap()
    return watch.seconds()[WARMUP:], loss.item()


class Stopwatch:
    """Times laps as the device sees them: by CUDA events, for which the CPU need not wait, or by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.lap()

    def lap(self) -> None:
        if self._device.type != "cuda":
            self._times.append(perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Each lap's length; waits for the device to finish the last."""
        if self._device.type != "cuda":
            return [end - start for start, end in pairwise(self._times)]
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._events)]  # it counts milliseconds
