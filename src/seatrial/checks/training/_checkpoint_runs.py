"""The training runs of train.checkpoint: configs, folders, and the child processes that run them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.model import UsageError

if TYPE_CHECKING:
    from seatrial.train.train_config import TrainConfig
    from seatrial.train.variants import RunVariants, Variant

STRATEGIES = ("fsdp2", "ddp")
TIMED, TIMED_RESUMED = "timed", "timed-resumed"  # the runs of rate_config
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class CheckpointPlan:
    """The uninterrupted run takes ``steps`` steps and saves after ``saved_step`` (half of them) and at the end.

    ``rate_config``: the config whose saves and loads are timed; it saves after every step. ``folder``: holds a folder
    for each run. ``ranks``: number of ranks.
    """

    config: TrainConfig
    rate_config: TrainConfig
    folder: Path
    ranks: int

    @property
    def steps(self) -> int:
        return self.config.max_steps

    @property
    def saved_step(self) -> int:
        return self.config.checkpoint.every

    @property
    def fewer_ranks(self) -> int:
        """The largest proper divisor of the number of ranks; 0 with one rank."""
        return max((count for count in range(1, self.ranks) if self.ranks % count == 0), default=0)

    @property
    def handover_step(self) -> int:
        """The last step of the run on fewer ranks; all ranks resume from its checkpoint."""
        return self.saved_step + 1

    def run_config(
        self, steps: int, every: int, *, ranks: int = 0, strategy: str = "fsdp2", **checkpoint: bool
    ) -> TrainConfig:
        """The config of a run that ends at step ``steps``, and saves every ``every`` steps and at the end (0: never).

        The run has ``ranks`` ranks (0: all) and the global batch of ``config`` on all ranks.
        ``checkpoint``: values for further fields of the config's ``checkpoint``.
        """
        config = self.config
        changes = {
            "max_steps": steps,
            "checkpoint": config.checkpoint.model_copy(update={"every": every, "keep": self.steps, **checkpoint}),
            "parallel": config.parallel.model_copy(update={"strategy": strategy}),
            "grad_accum": config.grad_accum * self.ranks // (ranks or self.ranks),
        }
        return config.model_copy(update=changes)


def checkpoint_plan(config: TrainConfig, rate_config: TrainConfig, folder: Path, ranks: int) -> CheckpointPlan:
    """The plan for the two configs. Runs and data are in ``folder``.

    Raises UsageError if a config does not meet its conditions. Both need the stack ``native``. ``config`` needs at
    least 6 steps and a save after half of them; ``rate_config`` needs an even number of steps and a save after each.
    """
    if config.stack != "native" or 2 * config.checkpoint.every != config.max_steps or config.max_steps < 6:
        raise UsageError(
            f"train.checkpoint: stack {config.stack}, max_steps {config.max_steps}, "
            f"checkpoint.every {config.checkpoint.every}; "
            "expected stack native, max_steps >= 6, checkpoint.every = max_steps / 2"
        )
    if rate_config.stack != "native" or rate_config.checkpoint.every != 1 or rate_config.max_steps % 2:
        raise UsageError(
            f"train.checkpoint, rate_config: stack {rate_config.stack}, max_steps {rate_config.max_steps}, "
            f"checkpoint.every {rate_config.checkpoint.every}; "
            "expected stack native, an even max_steps, checkpoint.every = 1"
        )
    return CheckpointPlan(
        _with_data(config, ranks, folder / "data"), _with_data(rate_config, ranks, folder / "data-rate"), folder, ranks
    )


def _with_data(config: TrainConfig, ranks: int, cache: Path) -> TrainConfig:
    """``config`` with its data in ``cache``. Without ``data.samples``, as many sequences are generated as are read."""
    samples = config.data.samples or config.max_steps * config.bsz * config.grad_accum * ranks
    data = config.data.model_copy(update={"samples": samples, "cache": str(cache)})
    return config.model_copy(update={"data": data})


def first_runs(plan: CheckpointPlan) -> list[Variant]:
    """The uninterrupted run, and the same run with its last rank killed while it saves the last checkpoint."""
    from seatrial.train.variants import InjectedFault, Variant

    config = plan.run_config(plan.steps, plan.saved_step)
    kill = InjectedFault(kind="kill_in_save", rank=plan.ranks - 1, step=plan.steps)
    return [
        Variant(settings=config, out=plan.folder / "uninterrupted"),
        Variant(settings=config, out=plan.folder / "killed", fault=kill),
    ]


def run_on_fewer_ranks(
    plan: CheckpointPlan, start: Callable[..., AbstractContextManager[RunVariants]]
) -> AbstractContextManager[RunVariants | None]:
    """Context manager: starts the run on fewer ranks by ``start``; yields None with one rank."""
    from seatrial.train.variants import Variant

    if not plan.fewer_ranks:
        return nullcontext()
    config = plan.run_config(plan.handover_step, plan.handover_step, ranks=plan.fewer_ranks, resume=True)
    fewer = [Variant(settings=config, out=plan.folder / "fewer")]
    return start(fewer, file_prefix=plan.folder / "start2", groups=[range(plan.fewer_ranks)])


def resumed_runs(plan: CheckpointPlan) -> list[Variant]:
    """The killed run, resumed from its checkpoint; and per strategy a run that resumes from the run on fewer ranks."""
    from seatrial.train.variants import Variant

    resumed = plan.run_config(plan.steps, plan.handover_step, resume=True, asynchronous=True)
    resharded = [
        plan.run_config(plan.steps, 0, strategy=strategy, resume=True) for strategy in STRATEGIES if plan.fewer_ranks
    ]
    return [
        Variant(settings=resumed, out=plan.folder / "killed"),
        *(Variant(settings=config, out=plan.folder / config.parallel.strategy) for config in resharded),
    ]


def faulty_runs(plan: CheckpointPlan) -> tuple[Variant, Variant]:
    """A run that resumes from the checkpoint with a flipped bit, and a run with a NaN gradient."""
    from seatrial.train.variants import InjectedFault, Variant

    from_flipped_file = plan.run_config(plan.steps + 1, 0, resume=True)
    nan = InjectedFault(kind="nan", rank=plan.ranks - 1, step=plan.saved_step)
    return (
        Variant(settings=from_flipped_file, out=plan.folder / "uninterrupted", expect_error=True),
        Variant(settings=plan.run_config(plan.steps, 0), out=plan.folder / "nan", fault=nan, expect_error=True),
    )


def timed_runs(plan: CheckpointPlan) -> list[Variant]:
    """A run that saves after every step, and its continuation, which loads once and saves asynchronously."""
    from seatrial.train.variants import Variant

    config = plan.rate_config
    resumed = config.checkpoint.model_copy(update={"resume": True, "asynchronous": True})
    configs = {
        TIMED: config.model_copy(update={"max_steps": config.max_steps // 2}),
        TIMED_RESUMED: config.model_copy(update={"checkpoint": resumed}),
    }
    return [Variant(settings=settings, out=plan.folder / name) for name, settings in configs.items()]


def link_checkpoints(plan: CheckpointPlan) -> None:
    """Link into the folder of each run the checkpoints from which it resumes.

    Each run has a folder of its own, since it writes metrics.json there.
    The run on fewer ranks resumes from the uninterrupted run. The run of each strategy resumes from the run on fewer
    ranks, and the second timed run from the first.
    """
    from seatrial.train.checkpoint import step_folder

    uninterrupted, fewer = (step_folder(plan.folder / name, plan.saved_step) for name in ("uninterrupted", "fewer"))
    links = {
        fewer: uninterrupted,
        plan.folder / TIMED_RESUMED / CHECKPOINTS: plan.folder / TIMED / CHECKPOINTS,
    }
    links |= {plan.folder / strategy / CHECKPOINTS: plan.folder / "fewer" / CHECKPOINTS for strategy in STRATEGIES}
    for link, target in links.items():
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
