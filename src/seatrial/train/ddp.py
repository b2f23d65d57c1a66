"""Training runs with DDP, in a single process on the same batches, and on independent ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean
from time import monotonic

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from seatrial.train import compare, data, invariants, parallel, train_config
from seatrial.train.loop import Trainer
from seatrial.train.parallel import World
from seatrial.train.progress import Step
from seatrial.train.rank_times import RankTimes
from seatrial.train.train_config import TrainConfig

# The model is small on GPUs too, so that a single process can repeat the work of all ranks in seconds.
SMALL_CONFIG = "tiny/ddp"
BATCH_OVERRIDES: tuple[str, ...] = ("bsz=4",)  # sequences per rank and step, for the single-process comparison
TINY_OVERRIDES = ("model.layers=1", "model.width=64", "seq_len=32")  # for ``endless_training``

# DDP rebuilds its buckets after the first step; allocator and clocks stabilize in the following steps.
UNTIMED_STEPS = 5
UNTIMED_STEPS_PER_WINDOW = 1  # not timed, since the previous window may have trained the other model
WINDOW_PAIRS = 6  # the smallest number of values whose median has a 95 % confidence interval
MIN_SEQUENCES = 256  # generated for ``measure_speed``; more if ranks would get fewer than four. Does not affect speed

Windows = list[list[float]]  # seconds of one rank, [window][timed step]


def create_trainer(settings: TrainConfig, world: World) -> Trainer:
    """A Trainer of the native loop on Markov data, which each rank generates in memory."""
    parallel.prepare_kernels(settings)
    return Trainer(settings, parallel.build(settings, world), world, data.generate_blocks(settings))


@dataclass(frozen=True)
class DdpComparison:
    """A DDP training run and, on rank 0, the equivalent single-process run; their losses and gradient norms must agree.

    If a run has non-finite steps, the list of its steps ends with the first of them.
    """

    samples: int  # number of samples in the dataset
    sample_counts: invariants.SampleCounts  # of the first epoch
    order_errors: int  # ranks with another order in a repeated epoch, plus ranks with the same order in epochs 0 and 1
    ddp_steps: list[Step]
    single_process_steps: list[Step] | None
    model: nn.Module

    @property
    def max_relative_difference(self) -> float | None:
        """The largest relative difference of losses and gradient norms.

        None on ranks above 0, and if no step is finite in both runs. AdamW is invariant to the gradient's scale, so
        only the gradient norm shows that gradients were summed instead of averaged.
        """
        pairs = zip(self.ddp_steps, self.single_process_steps or [], strict=False)
        finite = [(asdict(step), asdict(reference)) for step, reference in pairs if step.finite and reference.finite]
        if not finite:
            return None
        steps, references = zip(*finite, strict=True)
        return max(compare.max_relative_difference(steps, references, each).value for each in ("loss", "grad_norm"))


def compare_with_single_process(world: World, steps: int, progress: Callable[[str], None]) -> DdpComparison:
    """Trains ``steps`` steps with DDP, then the same steps in a single process on rank 0 while the other ranks wait."""
    config = train_config.load(SMALL_CONFIG, [*BATCH_OVERRIDES, f"max_steps={steps}"])
    # not a multiple of the number of ranks (if there are several), so that samples must be dropped
    samples = world.size * config.bsz * steps + world.size // 2
    settings = config.model_copy(update={"data": config.data.model_copy(update={"samples": samples})})
    epoch0, epoch0_repeated, epoch1 = (rank_samples(world, samples, settings.seed, epoch) for epoch in (0, 0, 1))

    progress(f"{steps} steps with DDP on {world.size} ranks")
    ddp_trainer, single_process_steps = create_trainer(settings, world), None
    ddp_steps = until_nonfinite(ddp_trainer.run_steps(steps))
    if world.is_rank_0:
        progress(f"the same {steps} steps in a single process")
        accumulating = settings.model_copy(update={"grad_accum": world.size})
        single_trainer = create_trainer(accumulating, single_rank_world(world))
        single_process_steps = until_nonfinite(single_trainer.run_steps(steps))
    world.barrier()
    return DdpComparison(
        samples=samples,
        sample_counts=invariants.count_samples(world.gather(epoch0), samples),
        order_errors=sum(world.gather((epoch0 != epoch0_repeated) + (epoch0 == epoch1))),
        ddp_steps=ddp_steps,
        single_process_steps=single_process_steps,
        model=ddp_trainer.built.model,
    )


def single_rank_world(world: World) -> World:
    """A World of this process only."""
    return World(0, 1, world.device, world.host)


def rank_samples(world: World, samples: int, seed: int, epoch: int) -> list[int]:
    """The sample indices of this rank in ``epoch``, in the order in which the native loop reads them."""
    per_rank = samples // world.size
    return list(islice(data.block_order(samples, world.rank, world.size, seed, skip=epoch * per_rank), per_rank))


def until_nonfinite(steps: list[Step]) -> list[Step]:
    """The steps up to and including the first whose loss or gradient norm is not finite."""
    return steps[: next((number for number, step in enumerate(steps, 1) if not step.finite), len(steps))]


@dataclass(frozen=True)
class Speed:
    """Step times by rank and window; window i of ``independent_windows`` and of ``ddp_windows`` form a pair.

    ``nonfinite_steps``: number of non-finite steps, summed over all ranks. ``rank_times``: one entry per rank, for the
    timed steps of the DDP windows.
    """

    settings: TrainConfig
    independent_windows: list[Windows]
    ddp_windows: list[Windows]
    nonfinite_steps: int
    model: nn.Module
    rank_times: list[RankTimes]

    def tokens_per_second(self) -> list[float]:
        """Tokens/s of all ranks in each DDP window."""
        tokens_per_rank = self.settings.bsz * self.settings.seq_len
        return [tokens_per_rank * steps_per_second for steps_per_second in _steps_per_second(self.ddp_windows)]

    def scaling_efficiency(self) -> list[float]:
        """Percent, for each pair of windows: steps/s with DDP ÷ steps/s of independent ranks."""
        pairs = zip(_steps_per_second(self.ddp_windows), _steps_per_second(self.independent_windows), strict=True)
        return [100 * ddp / independent for ddp, independent in pairs]


def _steps_per_second(windows_by_rank: list[Windows]) -> list[float]:
    """Steps/s in each window, summed over the ranks."""
    return [sum(1 / fmean(steps) for steps in window) for window in zip(*windows_by_rank, strict=True)]


def measure_speed(world: World, settings: TrainConfig, min_seconds: float, progress: Callable[[str], None]) -> Speed:
    """Times independent training (all ranks concurrently) and DDP training in alternating windows of a few steps.

    Warm-up, clocks and other load affect both trainings equally, and all ranks are busy in both: the difference is the
    cost of communication. A single process on an idle machine would run faster and make scaling look worse. Each round
    splits ``max_steps`` steps into windows; rounds are repeated until ``min_seconds`` have passed.
    """
    samples = max(MIN_SEQUENCES, 4 * world.size)
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"samples": samples})})
    independent, ddp = create_trainer(settings, single_rank_world(world)), create_trainer(settings, world)
    for trainer in (independent, ddp):
        trainer.run_steps(UNTIMED_STEPS)
    windows: dict[Trainer, Windows] = {independent: [], ddp: []}
    nonfinite = 0
    timed_ddp_steps: list[Step] = []
    earliest_end = monotonic() + min_seconds
    while not windows[ddp] or any(world.gather(monotonic() < earliest_end)):  # the same decision on all ranks
        for number, steps in enumerate(window_lengths(settings.max_steps)):
            progress(f"speed with DDP and without communication, measurement {len(windows[ddp]) + 1}")
            # alternating order cancels drift
            for trainer in (independent, ddp) if number % 2 == 0 else (ddp, independent):
                world.barrier()
                window = trainer.run_steps(UNTIMED_STEPS_PER_WINDOW + steps)
                windows[trainer].append([step.seconds for step in window[UNTIMED_STEPS_PER_WINDOW:]])
                nonfinite += sum(not step.finite for step in window)
                if trainer is ddp:
                    timed_ddp_steps += window[UNTIMED_STEPS_PER_WINDOW:]
    return Speed(
        settings=settings,
        independent_windows=world.gather(windows[independent]),
        ddp_windows=world.gather(windows[ddp]),
        nonfinite_steps=sum(world.gather(nonfinite)),
        model=ddp.built.model,
        rank_times=world.gather(RankTimes.of_steps(world.device_name, timed_ddp_steps)),
    )


def window_lengths(steps: int) -> list[int]:
    """``steps`` split into at most WINDOW_PAIRS windows whose lengths differ by at most one."""
    count = min(WINDOW_PAIRS, steps)
    return [steps // count + (number < steps % count) for number in range(count)]


@dataclass(frozen=True)
class LocalTraining:
    """The steps of a training without communication, and the tokens of all steps."""

    steps: list[Step]
    tokens: int


def train_alone(device: str, on_gpu: bool, seconds: float, steps: int) -> LocalTraining:
    """Trains this rank alone from the same weights on the same batches, with kernels that repeat every bit.

    ``steps``: 0 for as many as fit into ``seconds``.
    """
    settings = train_config.load("ddp" if on_gpu else SMALL_CONFIG, [f"data.samples={MIN_SEQUENCES}"])
    trainer = create_trainer(settings, single_rank_world(parallel.current_world(device)))
    # warn_only: torch wants CUBLAS_WORKSPACE_CONFIG from the start of the process; cuBLAS repeats on a stream without.
    # With warn_only, flash and memory-efficient attention add in any order in the backward pass; MATH does not
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            done = trainer.run_steps(min(steps, UNTIMED_STEPS) or UNTIMED_STEPS)
            total = steps or UNTIMED_STEPS + max(1, int(seconds / done[-1].seconds))
            done += trainer.run_steps(total - len(done))
    finally:
        torch.use_deterministic_algorithms(False)
    return LocalTraining(done, settings.bsz * settings.seq_len * len(done))


def endless_training(device: str) -> Iterator[float]:
    """Trains a tiny model with DDP, one step per iteration, and yields the loss in nats per token.

    Each step needs all ranks: a yielded loss proves that every rank took part in the step.
    """
    trainer = create_trainer(train_config.load(SMALL_CONFIG, TINY_OVERRIDES), parallel.current_world(device))
    while True:
        yield trainer.run_steps(1)[0].loss
