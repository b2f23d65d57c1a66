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

from seatrial.train import data, invariants, parallel, train_config
from seatrial.train.loop import Trainer
from seatrial.train.parallel import World
from seatrial.train.progress import Step
from seatrial.train.train_config import TrainConfig

# Small, and the same on a CPU and on a GPU: one process must repeat the work of all ranks in seconds.
SMALL_CONFIG = "tiny/ddp"
BATCH: tuple[str, ...] = ("bsz=4",)  # sequences a rank and step, of what one process repeats
TINIEST = ("model.layers=1", "model.width=64", "seq_len=32")

# Steps that are not counted: DDP lays out its buckets anew after the first, allocator and clocks settle in the next.
UNTIMED_STEPS = 5
UNTIMED_STEPS_PER_WINDOW = 1  # steps at the start of a window that are not counted: the other model ran before it
WINDOW_PAIRS = 6  # windows of each kind; six are the fewest of which a median has a 95 % interval
MIN_SEQUENCES = 256  # at least, and four a rank: made at once, and speed does not depend on them

Windows = list[list[float]]  # of one rank: seconds of each timed step, window by window


def current_world(device: str) -> World:
    """The ranks of the process group that is open."""
    return World(dist.get_rank(), dist.get_world_size(), torch.device(device), socket.gethostname())


def create_trainer(settings: TrainConfig, world: World) -> Trainer:
    """The native loop's, on generated data that each rank makes in memory."""
    parallel.prepare_kernels(settings)
    return Trainer(settings, parallel.build(settings, world), world, data.generate_blocks(settings))


@dataclass(frozen=True)
class DdpComparison:
    """A training by all ranks, and on rank 0 the one by one process that it must equal.

    Only the last step may be one that is not finite: nothing is learned after it.
    """

    samples: int
    coverage: invariants.Coverage
    order_errors: int
    ddp_steps: list[Step]
    single_process_steps: list[Step] | None
    model: nn.Module

    @property
    def max_relative_difference(self) -> float | None:
        """The largest relative one of all losses and norms of gradients. AdamW divides the gradient's scale out, so
        that only its norm shows a sum that was taken for a mean.
        """
        pairs = [
            (getattr(step, figure), getattr(reference, figure))
            for step, reference in zip(self.ddp_steps, self.single_process_steps or [], strict=False)
            for figure in ("loss", "grad_norm")
            if step.finite and reference.finite
        ]
        return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def compare_with_single_process(world: World, steps: int, note: Callable[[str], None]) -> DdpComparison:
    """Train ``steps`` steps together, then again on rank 0 alone while the others wait."""
    wanted = train_config.load(SMALL_CONFIG, [*BATCH, f"max_steps={steps}"])
    # half a rank count more than fills all batches: from two ranks on, the last are left out
    samples = world.size * wanted.bsz * steps + world.size // 2
    settings = wanted.model_copy(update={"data": wanted.data.model_copy(update={"samples": samples})})
    first, again, second = (rank_samples(world, samples, settings.seed, epoch) for epoch in (0, 0, 1))

    note(f"{steps} steps by {world.size} processes together")
    together, alone = create_trainer(settings, world), None
    taken = until_nonfinite(together.run_steps(steps))
    if world.is_rank0:
        note(f"the same {steps} steps by one process")
        one = create_trainer(settings.model_copy(update={"grad_accum": world.size}), single_rank_world(world))
        alone = until_nonfinite(one.run_steps(steps))
    world.barrier()
    return DdpComparison(
        samples=samples,
        coverage=invariants.coverage(world.gather(first), samples),
        order_errors=sum(world.gather((first != again) + (first == second))),
        ddp_steps=taken,
        single_process_steps=alone,
        model=together.built.model,
    )


def single_rank_world(world: World) -> World:
    """This process, without the others."""
    return World(0, 1, world.device, world.host)


def rank_samples(world: World, samples: int, seed: int, epoch: int) -> list[int]:
    """The samples of this rank in an epoch, as the native loop reads them."""
    each = samples // world.size
    return list(islice(data.block_order(samples, world.rank, world.size, seed, skip=epoch * each), each))


def until_nonfinite(steps: list[Step]) -> list[Step]:
    """The steps up to the first of which loss or gradient is not finite, with it."""
    return steps[: next((number for number, step in enumerate(steps, 1) if not step.finite), len(steps))]


@dataclass(frozen=True)
class Speed:
    """Windows by rank, in pairs: without the other ranks and with them. ``nonfinite``: steps of any rank."""

    settings: TrainConfig
    independent_windows: list[Windows]
    ddp_windows: list[Windows]
    nonfinite_steps: int
    model: nn.Module

    def tokens_per_second(self) -> list[float]:
        """Tokens of all ranks together, by window."""
        tokens = self.settings.bsz * self.settings.seq_len
        return [tokens * _rate(ranks) for ranks in zip(*self.ddp_windows, strict=True)]

    def scaling_efficiency(self) -> list[float]:
        """Percent, by pair of windows: steps per second of all ranks together, of what they do alone."""
        pairs = zip(zip(*self.ddp_windows, strict=True), zip(*self.independent_windows, strict=True), strict=True)
        return [100 * _rate(together) / _rate(alone) for together, alone in pairs]


def _rate(ranks: Iterable[list[float]]) -> float:
    """Steps per second, added up over the ranks, in one window."""
    return sum(1 / fmean(steps) for steps in ranks)


def measure_speed(world: World, settings: TrainConfig, min_seconds: float, note: Callable[[str], None]) -> Speed:
    """Train alone, every rank at the same time, and together, in turn, window after window.

    So warm-up, clocks and other load fall on both alike, and ranks share power, cooling and CPU in both cases: what is
    left between the two is the cost of communication. One process on an idle machine would be faster than any of them
    can be, and make scaling look worse than it is. The pairs of windows that ``max_steps`` fill are repeated until
    ``min_seconds`` have passed.
    """
    samples = max(MIN_SEQUENCES, 4 * world.size)
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"samples": samples})})
    alone, together = create_trainer(settings, single_rank_world(world)), create_trainer(settings, world)
    for one in (alone, together):
        one.run_steps(UNTIMED_STEPS)
    times: dict[Trainer, Windows] = {alone: [], together: []}
    nonfinite = 0
    end = monotonic() + min_seconds
    while not times[together] or any(world.gather(monotonic() < end)):  # the same on all ranks, so that none goes alone
        for number, steps in enumerate(window_lengths(settings.max_steps)):
            note(f"speed: alone and together, pair {len(times[together]) + 1}")
            for one in (alone, together) if number % 2 == 0 else (together, alone):  # so that a drift favours neither
                world.barrier()
                taken = one.run_steps(UNTIMED_STEPS_PER_WINDOW + steps)
                times[one].append([step.seconds for step in taken[UNTIMED_STEPS_PER_WINDOW:]])
                nonfinite += sum(not step.finite for step in taken)
    return Speed(
        settings=settings,
        independent_windows=world.gather(times[alone]),
        ddp_windows=world.gather(times[together]),
        nonfinite_steps=sum(world.gather(nonfinite)),
        model=together.built.model,
    )


def window_lengths(steps: int) -> list[int]:
    """``steps`` in PAIRS windows of about the same length, none of them empty."""
    count = min(WINDOW_PAIRS, steps)
    return [steps // count + (number < steps % count) for number in range(count)]


def endless_training(device: str) -> Iterator[float]:
    """Train a tiny model together, a step each time; the loss in nats. All ranks must take each step.

    A loss that has arrived proves that every rank was in the loop.
    """
    tiny = create_trainer(train_config.load(SMALL_CONFIG, TINIEST), current_world(device))
    while True:
        yield tiny.run_steps(1)[0].loss
