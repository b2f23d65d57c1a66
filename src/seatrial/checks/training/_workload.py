"""Trainings as checks: what ``seatrial train CONFIG`` does, in processes beside the ranks.

A training is judged like anything else that is measured: that it ends badly is a figure (``exit_code``), and no error
of the check. Nothing was measured only where a config cannot be trained here at all, a library is missing, or the disk
is full.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.bench.child_result import EXIT_DISK_FULL, EXIT_USAGE_ERROR
from seatrial.checks.base import Context, Options
from seatrial.model import SeatrialError
from seatrial.train import train_config
from seatrial.util.failures import killed

if TYPE_CHECKING:
    from seatrial.bench.child_ranks import ChildResult

LIMIT_S = 600.0  # generous: without weights or rows to fetch none takes two minutes
_NO_FINDING = {
    EXIT_USAGE_ERROR: "was not trained",
    EXIT_DISK_FULL: "was not trained to its end, for want of room on disk",
}
_TAIL = 4096  # bytes at the end of steps.jsonl, that hold a line


class WorkloadOptions(Options):
    """``overrides`` come after the check's own, in rising priority; ``limit_s`` is for each training, in seconds."""

    config: str = Field(default="", description="of another training: the name of one that ships, or a .yaml file")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE, as of seatrial train --set")
    limit_s: float = Field(default=LIMIT_S, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class TrainingResult:
    """What one training left. ``problem`` is empty where it ended well, else tells how it ended, with its last words.

    ``metrics`` is metrics.json, None after a problem; ``steps`` the lines of steps.jsonl, of ``max_steps``;
    ``ranks`` who took part, ``failed`` who explains the problem; ``seconds`` from the start of the processes to their
    end. What rank N said is in ``logs``.rankN.err.
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
    log_prefix: Path | None = None

    def value(self, name: str) -> Any:
        """Of metrics.json; None where that is not known."""
        return (self.metrics or {}).get(name)

    @property
    def export_loads(self) -> bool:
        """Whether what was exported was loaded again, and was what had been trained."""
        return str(self.value("final")).startswith("loaded")


def config_for_device(context: Context, name: str) -> str:
    """The config called ``name``; on a CPU its tiny twin, where it has one."""
    twin = f"tiny/{name}"
    return twin if not context.device.startswith("cuda") and twin in train_config.shipped_configs() else name


def config_and_overrides(
    context: Context, options: WorkloadOptions, name: str, *gpu: str
) -> tuple[str, tuple[str, ...]]:
    """The config of ``options``; else the one called ``name``, on GPUs with the overrides ``gpu``."""
    shipped = context.device.startswith("cuda") and not options.config
    return options.config or config_for_device(context, name), gpu if shipped else ()


def train(
    context: Context,
    name: str,
    config: str,
    overrides: Sequence[str] = (),
    groups: Sequence[Sequence[int]] | None = None,
    limit_s: float = LIMIT_S,
    *,
    into: Path | None = None,
    generate_tokens: int = 0,
) -> list[TrainingResult]:
    """Train ``config`` in each of ``groups`` of ranks at once, by default in one of all; the same answer on all ranks.

    ``name`` is what its folders in ``place.out`` begin with, which are new ones, unless one training is to go on
    ``into`` that of an earlier one. ``generate``: so many tokens with what was exported, see train.child. Called by all
    ranks together. Raises SeatrialError where nothing could be trained.
    """
    from seatrial.bench import child_ranks, rank

    every = [tuple(ranks) for ranks in groups or [range(context.world_size)]]
    own = next((number for number, ranks in enumerate(every) if context.rank in ranks), None)
    outs = rank.gather([into] if into else _new_folders(context.artifacts_dir, name, len(every)))[0]
    wanted = train_config.load(config, overrides)
    task = {"config": str(train_config.config_path(config)), "overrides": list(overrides), "generate": generate_tokens}
    context.progress(f"{name}: starting")
    began = time.monotonic()
    answers = child_ranks.run_child_ranks(
        "seatrial.train.child",
        {**task, "out": str(outs[own or 0])},
        {"NCCL_DEBUG_FILE": str(context.artifacts_dir / f"nccl.{name}.%h.%p.log")},
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / outs[0].name,
        limit_s=limit_s,
        groups=every,
        on_poll=_progress(context, name, outs[own], wanted.max_steps) if own is not None else lambda: None,
    )
    seconds = rank.gather(time.monotonic() - began)[0]
    leads = own is not None and context.rank == every[own][0]
    steps = rank.gather(_read_steps(outs[own]) if own is not None and leads else ())
    return [
        replace(
            _result_of_ranks(name, out, {one: answers[one] for one in ranks}),
            steps=steps[ranks[0]],
            max_steps=wanted.max_steps,
            seconds=seconds,
            log_prefix=context.artifacts_dir / outs[0].name,
        )
        for ranks, out in zip(every, outs, strict=True)
    ]


def _result_of_ranks(name: str, out: Path, answers: Mapping[int, ChildResult]) -> TrainingResult:
    """How one training ended, by the answers of its ranks. Raises SeatrialError where that says nothing of them."""
    from seatrial.bench import child_ranks

    ranks = tuple(answers)
    bad = {rank: answer for rank, answer in answers.items() if answer.error}
    if not bad:
        metrics = answers[ranks[0]].value
        if not isinstance(metrics, dict):
            raise SeatrialError(f"{name}: rank {ranks[0]} answered {str(metrics)[:80]!r}, which are no metrics")
        return TrainingResult(metrics, out, "", ranks=ranks)
    first = child_ranks.first_failed_rank(bad)
    for code, ended in {} if killed(bad[first].exit_code) else _NO_FINDING.items():
        if said := [_told(rank, answer) for rank, answer in bad.items() if answer.exit_code == code]:
            raise SeatrialError(f"{name} {ended}: {said[0]}")
    return TrainingResult(
        None, out, _told(first, bad[first]), bad[first].exit_code or 1, ranks=ranks, failed_rank=first
    )


def _new_folders(parent: Path, name: str, count: int) -> list[Path]:
    """Of another attempt some may be there already, and are kept."""
    attempt = 1
    while True:
        stem = name if attempt == 1 else f"{name}.{attempt}"
        folders = [parent / (stem if count == 1 else f"{stem}-{number}") for number in range(count)]
        if not any(folder.exists() for folder in folders):
            return folders
        attempt += 1


def _progress(context: Context, name: str, out: Path, steps: int) -> Callable[[], None]:
    """Tells where this rank's training is, by its files; nothing where they cannot be read, as on another node."""

    def look() -> None:
        if context.rank == 0 and (now := training_progress(out, steps)):
            context.progress(f"{name}: {now}")

    return look


def training_progress(out: Path, steps: int) -> str:
    """What a training of so many ``steps`` does now, by what is there in ``out``; "" before it has begun to write."""
    step = last_step(out)
    if step:
        return f"step {step} of {steps}" if step < steps else "all steps taken; saving, measuring"
    if (out / "steps.jsonl").exists():
        return "model built; first step"
    if any(not path.name.count(".incomplete-") for path in out.glob("data/*")):
        return "data prepared; building the model"
    return "preparing data" if (out / "config.json").exists() else ""


def last_step(out: Path) -> int:
    """The newest that stands in steps.jsonl; 0 where there is none."""
    try:
        with (out / "steps.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().splitlines(keepends=True)
        return int(json.loads([line for line in lines if line.endswith(b"\n")][-1])["step"])
    except (OSError, ValueError, IndexError):  # none yet
        return 0


def _read_steps(out: Path) -> tuple[dict[str, Any], ...]:
    path = out / "steps.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        steps = tuple(json.loads(line) for line in lines if line.endswith("\n"))  # the last may be cut short
    except (OSError, ValueError) as error:
        raise SeatrialError(f"cannot read {path}: {error}") from error
    if wrong := [step for step in steps if not isinstance(step, dict) or not isinstance(step.get("step"), int)]:
        raise SeatrialError(f"{path}: {str(wrong[0])[:80]!r} is no step")
    return steps


def _told(rank: int, answer: ChildResult) -> str:
    from seatrial.bench import child_ranks

    memory = any(words in answer.error for words in ("out of memory", "OutOfMemoryError"))
    return f"{'out of memory: ' if memory else ''}{child_ranks.failure_text(rank, answer)}"
