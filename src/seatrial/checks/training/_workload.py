"""Runs ``seatrial train run CONFIG`` in child processes of the ranks and collects the results.

A failed training run is a measured result (metric ``exit_code``). It is an ERROR of the check only if the config is
invalid, a library is missing or the disk is full.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.bench.child_result import EXIT_DISK_FULL, EXIT_USAGE_ERROR
from seatrial.checks.check import Context, Options, Seconds
from seatrial.model import SeatrialError
from seatrial.train import step_speed
from seatrial.util.failures import killed

if TYPE_CHECKING:
    from seatrial.bench.child_ranks import ChildResult
    from seatrial.bench.spare_children import Gpus
    from seatrial.train.train_config import TrainConfig

LIMIT_S = 600.0  # a training run with random weights and generated data takes less than 120 s
_CHECK_ERRORS = {  # exit code of a rank → the error of the check
    EXIT_USAGE_ERROR: "training did not start",
    EXIT_DISK_FULL: "training stopped, disk full",
}


class WorkloadOptions(Options):
    """Options of checks that train. ``overrides`` come after the check's own, and the last value of a key wins."""

    config: str = Field(default="", description="another training config: name of a shipped config, or a .yaml file")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE, as for seatrial train run --set")
    limit_s: Seconds = Field(default=LIMIT_S, description="time limit per training, seconds")


@dataclass(frozen=True)
class TrainingResult:
    """Result of one training run.

    metrics: content of metrics.json; None if the training failed.
    out: output folder, with metrics.json and steps.jsonl.
    problem: how the training failed, with the end of its log; empty if it succeeded.
    exit_code: that of the rank that failed first; 0 if the training succeeded.
    steps: the lines of steps.jsonl.
    ranks: the check's ranks that trained.
    max_steps: number of steps in the config.
    seconds: from the start of the child processes to their end.
    failed_rank, failed_node: the rank that failed first, and its node; None and "" if the training succeeded.
    log_prefix: standard error of rank N is in ``log_prefix``.rankN.err.
    """

    metrics: dict[str, Any] | None
    out: Path
    problem: str
    exit_code: int = 0
    steps: tuple[dict[str, Any], ...] = ()
    ranks: tuple[int, ...] = ()
    max_steps: int = 0
    seconds: float = 0.0
    failed_rank: int | None = None
    failed_node: str = ""
    log_prefix: Path | None = None

    def value(self, name: str) -> Any:
        """The value of ``name`` in metrics.json, or None."""
        return (self.metrics or {}).get(name)

    @property
    def export_loads(self) -> bool:
        """Whether the exported weights were loaded and equal the trained weights."""
        return str(self.value("final")).startswith("loaded")


def config_for_device(context: Context, name: str) -> str:
    """``name`` on a GPU; on a CPU ``tiny/name`` if that config exists."""
    from seatrial.train import train_config

    tiny = f"tiny/{name}"
    return tiny if not context.on_gpu and tiny in train_config.shipped_configs() else name


def config_and_overrides(
    context: Context, options: WorkloadOptions, name: str, overrides: Sequence[str] = (), *gpu_overrides: str
) -> tuple[str, tuple[str, ...]]:
    """The config and its overrides: ``overrides``, ``gpu_overrides`` for the shipped config on a GPU, and the options'.

    The config is ``options.config``; by default the shipped config ``name`` for this device.
    """
    shipped_on_gpu = gpu_overrides if context.on_gpu and not options.config else ()
    return options.config or config_for_device(context, name), (*overrides, *shipped_on_gpu, *options.overrides)


def train(
    context: Context,
    name: str,
    config: str,
    overrides: Sequence[str] = (),
    groups: Sequence[Sequence[int]] | None = None,
    limit_s: float = LIMIT_S,
    *,
    generate_tokens: int = 0,
) -> list[TrainingResult]:
    """Train ``config`` once per group of ranks, all groups concurrently, and return one result per group on every rank.

    All ranks must call this. ``groups`` defaults to one group of all ranks. ``name`` is the prefix of the new output
    folders. After the export, the model generates ``generate_tokens`` tokens. Raises SeatrialError if a training
    could not start or the disk is full.
    """
    from seatrial.bench import child_ranks, rank
    from seatrial.train import train_config

    groups = [tuple(ranks) for ranks in groups or [range(context.world_size)]]
    # number of this rank's group; None if this rank does not train
    group_number = next((number for number, ranks in enumerate(groups) if context.rank in ranks), None)
    out_folders = rank.gather(_new_folders(context.artifacts_dir, name, len(groups)))[0]
    settings = train_config.load(config, overrides)
    task = {"config": str(train_config.config_path(config)), "overrides": list(overrides), "generate": generate_tokens}
    context.progress(f"{name}: starting")

    def report_progress() -> None:
        """Report the training of rank 0, if its files are readable on this node."""
        trains = context.rank == 0 and group_number is not None
        if progress := trains and training_progress(out_folders[group_number or 0], settings.max_steps):
            context.progress(f"{name}: {progress}")

    started = time.monotonic()
    children = child_ranks.run_child_ranks(
        "seatrial.train.child",
        {**task, "out": str(out_folders[group_number or 0])},
        {"NCCL_DEBUG_FILE": str(context.artifacts_dir / f"nccl.{name}.%h.%p.log")},
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / out_folders[0].name,
        limit_s=limit_s,
        groups=groups,
        spare_gpus=_gpus(settings, groups),
        on_poll=report_progress,
    )
    seconds = rank.gather(time.monotonic() - started)[0]
    # the first rank of a group writes its steps
    writes_steps = group_number is not None and context.rank == groups[group_number][0]
    steps_by_rank = rank.gather(step_speed.read_steps(out_folders[group_number or 0]) if writes_steps else [])
    return [
        replace(
            _result_of_ranks(name, out, {member: children[member] for member in ranks}),
            steps=tuple(steps_by_rank[ranks[0]]),
            max_steps=settings.max_steps,
            seconds=seconds,
            log_prefix=context.artifacts_dir / out_folders[0].name,
        )
        for ranks, out in zip(groups, out_folders, strict=True)
    ]


def _gpus(settings: TrainConfig, groups: Sequence[Sequence[int]]) -> Gpus | None:
    """The GPUs that a child process sees: "own" (one) or "all" of the node; None if this differs between groups."""
    gpus: set[Gpus] = {"own" if len(ranks) == 1 and not settings.needs_group else "all" for ranks in groups}
    return gpus.pop() if len(gpus) == 1 else None


def _result_of_ranks(name: str, out: Path, children: Mapping[int, ChildResult]) -> TrainingResult:
    """The result of one training from the results of its ranks. Raises SeatrialError for codes in _CHECK_ERRORS."""
    from seatrial.bench import child_ranks

    ranks = tuple(children)
    failed = {rank: child for rank, child in children.items() if child.error}
    if not failed:
        metrics = children[ranks[0]].value
        if not isinstance(metrics, dict):
            raise SeatrialError(f"{name}: rank {ranks[0]} returned {str(metrics)[:80]!r}; expected a dict of metrics")
        return TrainingResult(metrics, out, "", ranks=ranks)
    first_failed = child_ranks.first_failed_rank(failed)
    if not killed(failed[first_failed].exit_code):
        for code, event in _CHECK_ERRORS.items():
            texts = [child_ranks.failure_text(rank, child) for rank, child in failed.items() if child.exit_code == code]
            if texts:
                raise SeatrialError(f"{name}: {event}: {texts[0]}")
    child = failed[first_failed]
    return TrainingResult(
        None,
        out,
        child_ranks.failure_text(first_failed, child),
        child.exit_code or 1,
        ranks=ranks,
        failed_rank=first_failed,
        failed_node=child.host,
    )


def _new_folders(parent: Path, name: str, count: int) -> list[Path]:
    """``count`` paths in ``parent`` that do not exist yet; folders of earlier attempts are kept."""
    attempt = 1
    while True:
        stem = name if attempt == 1 else f"{name}.{attempt}"
        folders = [parent / (stem if count == 1 else f"{stem}-{number}") for number in range(count)]
        if not any(folder.exists() for folder in folders):
            return folders
        attempt += 1


def training_progress(out: Path, max_steps: int) -> str:
    """The current phase of the training in ``out``, from the files it has written; "" if there are none."""
    with suppress(OSError, ValueError):
        if speed := step_speed.training_speed(out):
            return f"step {speed.step} of {max_steps}" if speed.step < max_steps else "steps finished; saving"
    if (out / step_speed.STEPS_FILE).exists():
        return "model built; first step"
    if any(".incomplete-" not in path.name for path in out.glob("data/*")):
        return "data prepared; building the model"
    return "preparing data" if (out / "config.json").exists() else ""
