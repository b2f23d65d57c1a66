"""How fast the processes train together, against how fast each trains by itself at the same time.

The two are measured in turn, window after window, so that warm-up, clocks and other load fall on both alike. The
baseline is every process at once without communication, not one process on an idle machine: processes share power,
cooling and CPU in both cases, so that what is left between the two is the cost of communication alone. One process on
an idle machine would be faster than any of them can be, and make scaling look worse than it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from time import monotonic, perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seatrial.bench.rank import gather
from seatrial.train import markov
from seatrial.train.ddp import SEED, wait_for_all, wrap
from seatrial.train.transformer import Shape, build, count_parameters

# Steps that are not counted: DDP lays out its buckets anew after the first, allocator and clocks settle in the next.
WARMUP = 5
SETTLE = 1  # steps at the start of a window that are not counted: the other model ran before it
PAIRS = 6  # windows of each kind; six are the fewest of which a median has a 95 % interval
LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one process trains on in each step: ``batch`` sequences of ``seq_len`` tokens."""

    seq_len: int
    dim: int
    layers: int
    batch: int
    steps: int  # timed ones of each kind, together and alone

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


Windows = list[list[float]]  # of one rank: seconds of each timed step, window by window


@dataclass(frozen=True)
class Speed:
    """Windows by rank, without and with the others, in pairs; the last losses of both here; the model."""

    load: Load
    alone: list[Windows]
    together: list[Windows]
    last_losses: tuple[float, float]
    model: nn.Module
    parameters: int
    precision: str

    def tokens_per_second(self) -> list[float]:
        """Tokens of all ranks together, by window."""
        return [self.load.tokens * _rate(ranks) for ranks in zip(*self.together, strict=True)]

    def flops_per_token(self) -> float:
        """6N + 12·L·d·s of a training step; see train.architecture."""
        return 6 * self.parameters + 12 * self.load.layers * self.load.dim * self.load.seq_len

    def scaling_efficiency(self) -> list[float]:
        """Percent, by pair of windows: steps per second of all ranks together, of what they do alone."""
        pairs = zip(zip(*self.together, strict=True), zip(*self.alone, strict=True), strict=True)
        return [100 * _rate(together) / _rate(alone) for together, alone in pairs]


def _rate(ranks: Iterable[list[float]]) -> float:
    """Steps per second, added up over the ranks, in one window."""
    return sum(1 / fmean(steps) for steps in ranks)


def load_for(device: str, **wanted: int) -> Load:
    """What suits the device, with the sizes that somebody asked for in place of its own."""
    return replace(GPU_LOAD if torch.device(device).type == "cuda" else CPU_LOAD, **wanted)


def measure(device: str, load: Load, min_seconds: float, note: Callable[[str], None]) -> Speed:
    """Train without communication, every process at the same time, and together with DistributedDataParallel, in turn.

    The pairs of windows that ``load.steps`` fill are repeated until ``min_seconds`` have passed.
    """
    walks = markov.sequences(load.batch, load.seq_len + 1, SEED + dist.get_rank()).to(device)
    model = build(load.shape, SEED, device)
    alone = Runner(build(load.shape, SEED, device), walks)
    together = Runner(wrap(model, device), walks)
    for runner in (alone, together):
        runner.window(WARMUP)
    alone_times, together_times = list[list[float]](), list[list[float]]()
    end = monotonic() + min_seconds
    while not alone_times or _any_before(end):
        for number, steps in enumerate(windows(load.steps)):
            note(f"speed: alone and together, pair {len(alone_times) + 1}")
            pair = [(alone, alone_times), (together, together_times)]
            for runner, times in pair if number % 2 == 0 else reversed(pair):  # so that a drift favours neither
                wait_for_all(device)
                times.append(runner.window(SETTLE + steps)[SETTLE:])
    return Speed(
        load=load,
        alone=gather(alone_times),
        together=gather(together_times),
        last_losses=(alone.loss, together.loss),
        model=model,
        parameters=count_parameters(model),
        precision="bf16 autocast over fp32 weights" if walks.device.type == "cuda" else "fp32",
    )


def windows(steps: int) -> list[int]:
    """``steps`` in PAIRS windows of about the same length, none of them empty."""
    count = min(PAIRS, steps)
    return [steps // count + (number < steps % count) for number in range(count)]


def _any_before(end: float) -> bool:
    """Whether some rank's clock has not reached its ``end``: the same answer on all ranks, so that none goes alone."""
    return any(gather(monotonic() < end))


class Runner:
    """Trains one model on the same batch in every step: this times computing and exchanging, not reading data.

    bf16 autocast over fp32 weights on a GPU, fp32 on a CPU.
    """

    def __init__(self, model: nn.Module, walks: Tensor) -> None:
        self._model, self._walks = model, walks
        self._on_gpu = walks.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=self._on_gpu)
        self.loss = math.nan

    def window(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` training steps, back to back; ``loss`` is then that of the last."""
        watch = Stopwatch(self._walks.device)
        for _ in range(steps):
            with torch.autocast(self._walks.device.type, torch.bfloat16, enabled=self._on_gpu):
                loss = self._model(self._walks)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            watch.lap()
        seconds = watch.seconds()
        self.loss = loss.item()
        return seconds


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
