"""What train.ddp trains, by the native loop: all ranks together, one process on the same batches, each rank alone."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from time import monotonic

import torch
import torch.distributed as dist
from torch import nn

from seatrial.train import data, parallel, proofs, train_config
from seatrial.train.loop import Trainer
from seatrial.train.parallel import World
from seatrial.train.progress import Step
from seatrial.train.train_config import TrainConfig

# Small, and the same on a CPU and on a GPU: one process must repeat the work of all ranks in seconds.
SMALL = "tiny/ddp"
BATCH: tuple[str, ...] = ("bsz=4",)  # sequences a rank and step, of what one process repeats
TINIEST = ("model.layers=1", "model.width=64", "seq_len=32")

# Steps that are not counted: DDP lays out its buckets anew after the first, allocator and clocks settle in the next.
WARMUP = 5
SETTLE = 1  # steps at the start of a window that are not counted: the other model ran before it
PAIRS = 6  # windows of each kind; six are the fewest of which a median has a 95 % interval
SEQUENCES = 256  # at least, and four a rank: made at once, and speed does not depend on them

Windows = list[list[float]]  # of one rank: seconds of each timed step, window by window


def all_ranks(device: str) -> World:
    """The ranks of the process group that is open."""
    return World(dist.get_rank(), dist.get_world_size(), torch.device(device), socket.gethostname())


def trainer(settings: TrainConfig, world: World) -> Trainer:
    """The native loop's, on generated data that each rank makes in memory."""
    parallel.prepare_kernels(settings)
    return Trainer(settings, parallel.build(settings, world), world, data.generated(settings))


@dataclass(frozen=True)
class Parity:
    """A training by all ranks, and on rank 0 the one by one process that it must equal.

    Only the last step may be one that is not finite: nothing is learned after it.
    """

    samples: int
    coverage: proofs.Coverage
    order_faults: int
    together: list[Step]
    alone: list[Step] | None
    model: nn.Module

    @property
    def difference(self) -> float | None:
        """The largest relative one of all losses and norms of gradients. AdamW divides the gradient's scale out, so
        that only its norm shows a sum that was taken for a mean.
        """
        pairs = [
            (getattr(step, figure), getattr(reference, figure))
            for step, reference in zip(self.together, self.alone or [], strict=False)
            for figure in ("loss", "grad_norm")
            if step.finite and reference.finite
        ]
        return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def parity(world: World, steps: int, note: Callable[[str], None]) -> Parity:
    """Train ``steps`` steps together, then again on rank 0 alone while the others wait."""
    wanted = train_config.load(SMALL, [*BATCH, f"max_steps={steps}"])
    # half a rank count more than fills all batches: from two ranks on, the last are left out
    samples = world.size * wanted.bsz * steps + world.size // 2
    settings = wanted.model_copy(update={"data": wanted.data.model_copy(update={"samples": samples})})
    first, again, second = (share(world, samples, settings.seed, epoch) for epoch in (0, 0, 1))

    note(f"{steps} steps by {world.size} processes together")
    together, alone = trainer(settings, world), None
    taken = to_first_nonfinite(together.take(steps))
    if world.first:
        note(f"the same {steps} steps by one process")
        one = trainer(settings.model_copy(update={"grad_accum": world.size}), by_itself(world))
        alone = to_first_nonfinite(one.take(steps))
    world.barrier()
    return Parity(
        samples=samples,
        coverage=proofs.coverage(world.gather(first), samples),
        order_faults=sum(world.gather((first != again) + (first == second))),
        together=taken,
        alone=alone,
        model=together.built.model,
    )


def by_itself(world: World) -> World:
    """This process, without the others."""
    return World(0, 1, world.device, world.host)


def share(world: World, samples: int, seed: int, epoch: int) -> list[int]:
    """The samples of this rank in an epoch, as the native loop reads them."""
    each = samples // world.size
    return list(islice(data.order(samples, world.rank, world.size, seed, skip=epoch * each), each))


def to_first_nonfinite(steps: list[Step]) -> list[Step]:
    """The steps up to the first of which loss or gradient is not finite, with it."""
    return steps[: next((number for number, step in enumerate(steps, 1) if not step.finite), len(steps))]


@dataclass(frozen=True)
class Speed:
    """Windows by rank, in pairs: without the other ranks and with them. ``nonfinite``: steps of any rank."""

    settings: TrainConfig
    alone: list[Windows]
    together: list[Windows]
    nonfinite: int
    model: nn.Module

    def tokens_per_second(self) -> list[float]:
        """Tokens of all ranks together, by window."""
        tokens = self.settings.bsz * self.settings.seq_len
        return [tokens * _rate(ranks) for ranks in zip(*self.together, strict=True)]

    def scaling_efficiency(self) -> list[float]:
        """Percent, by pair of windows: steps per second of all ranks together, of what they do alone."""
        pairs = zip(zip(*self.together, strict=True), zip(*self.alone, strict=True), strict=True)
        return [100 * _rate(together) / _rate(alone) for together, alone in pairs]


def _rate(ranks: Iterable[list[float]]) -> float:
    """Steps per second, added up over the ranks, in one window."""
    return sum(1 / fmean(steps) for steps in ranks)


def speed(world: World, settings: TrainConfig, min_seconds: float, note: Callable[[str], None]) -> Speed:
    """Train alone, every rank at the same time, and together, in turn, window after window.

    So warm-up, clocks and other load fall on both alike, and ranks share power, cooling and CPU in both cases: what is
    left between the two is the cost of communication. One process on an idle machine would be faster than any of them
    can be, and make scaling look worse than it is. The pairs of windows that ``max_steps`` fill are repeated until
    ``min_seconds`` have passed.
    """
    samples = max(SEQUENCES, 4 * world.size)
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"samples": samples})})
    alone, together = trainer(settings, by_itself(world)), trainer(settings, world)
    for one in (alone, together):
        one.take(WARMUP)
    times: dict[Trainer, Windows] = {alone: [], together: []}
    nonfinite = 0
    end = monotonic() + min_seconds
    while not times[together] or any(world.gather(monotonic() < end)):  # the same on all ranks, so that none goes alone
        for number, steps in enumerate(windows(settings.max_steps)):
            note(f"speed: alone and together, pair {len(times[together]) + 1}")
            for one in (alone, together) if number % 2 == 0 else (together, alone):  # so that a drift favours neither
                world.barrier()
                taken = one.take(SETTLE + steps)
                times[one].append([step.seconds for step in taken[SETTLE:]])
                nonfinite += sum(not step.finite for step in taken)
    return Speed(
        settings=settings,
        alone=world.gather(times[alone]),
        together=world.gather(times[together]),
        nonfinite=sum(world.gather(nonfinite)),
        model=together.built.model,
    )


def windows(steps: int) -> list[int]:
    """``steps`` in PAIRS windows of about the same length, none of them empty."""
    count = min(PAIRS, steps)
    return [steps // count + (number < steps % count) for number in range(count)]


def endless(device: str) -> Iterator[float]:
    """Train a tiny model together, a step each time; the loss in nats. All ranks must take each step.

    A loss that has arrived proves that every rank was in the loop.
    """
    tiny = trainer(train_config.load(SMALL, TINIEST), all_ranks(device))
    while True:
        yield tiny.take(1)[0].loss
