"""Trainings as checks: what ``seatrial train CONFIG`` does, in processes beside the ranks; and what all of them tell.

A training is judged like anything else that is measured: that it ends badly is a figure (``exit_code``), and no error
of the check. Nothing was measured only where a config cannot be trained here at all, a library is missing, or the disk
is full.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.checks.base import Options, Place
from seatrial.model import CLUSTER, Artifact, Fact, Metric, Observation, Rule, SeatrialError, Series
from seatrial.train import settings
from seatrial.train.answer import NO_ROOM, REFUSED

if TYPE_CHECKING:
    from seatrial.bench.anew import Answer

LIMIT_S = 600.0  # generous: without weights or rows to fetch none takes two minutes
REHEARSAL = "a rehearsal: the tiny twin of the config, on CPU cores that others share; it says nothing of any GPU"
# Of steps, at either end: a batch's loss strays from its mean by more than a step improves it
_ENDS = 3
_KEPT = ("config.json", "metrics.json", "steps.jsonl")
_NO_FINDING = {REFUSED: "was not trained", NO_ROOM: "was not trained to its end, for want of room on disk"}
_TAIL = 4096  # bytes at the end of steps.jsonl, that hold a line


class WorkloadOptions(Options):
    """``overrides`` come after the check's own, in rising priority; ``limit_s`` is for each training, in seconds."""

    config: str = Field(default="", description="of another training: the name of one that ships, or a .yaml file")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE, as of seatrial train --set")
    limit_s: float = Field(default=LIMIT_S, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class Trained:
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
    failed: int | None = None
    logs: Path | None = None

    def value(self, name: str) -> Any:
        """Of metrics.json; None where that is not known."""
        return (self.metrics or {}).get(name)

    @property
    def reloaded(self) -> bool:
        """Whether what was exported was loaded again, and was what had been trained."""
        return str(self.value("final")).startswith("loaded")


def config_for(place: Place, name: str) -> str:
    """The config called ``name``; on a CPU its tiny twin, where it has one."""
    twin = f"tiny/{name}"
    return twin if not place.device.startswith("cuda") and twin in settings.shipped() else name


def train(
    place: Place,
    name: str,
    config: str,
    overrides: Sequence[str] = (),
    groups: Sequence[Sequence[int]] | None = None,
    limit_s: float = LIMIT_S,
    *,
    into: Path | None = None,
    generate: int = 0,
) -> list[Trained]:
    """Train ``config`` in each of ``groups`` of ranks at once, by default in one of all; the same answer on all ranks.

    ``name`` is what its folders in ``place.out`` begin with, which are new ones, unless one training is to go on
    ``into`` that of an earlier one. ``generate``: so many tokens with what was exported, see train.child. Called by all
    ranks together. Raises SeatrialError where nothing could be trained.
    """
    from seatrial.bench import anew, rank

    every = [tuple(ranks) for ranks in groups or [range(place.world_size)]]
    own = next((number for number, ranks in enumerate(every) if place.rank in ranks), None)
    outs = rank.gather([into] if into else _new_folders(place.out, name, len(every)))[0]
    wanted = settings.load(config, overrides)
    task = {"config": str(settings.find(config)), "overrides": list(overrides), "generate": generate}
    place.note(f"{name}: starting")
    began = time.monotonic()
    answers = anew.ask_anew(
        "seatrial.train.child",
        {**task, "out": str(outs[own or 0])},
        {"NCCL_DEBUG_FILE": str(place.out / f"nccl.{name}.%h.%p.log")},
        device=place.device,
        local_rank=place.local_rank,
        out=place.out / outs[0].name,
        limit_s=limit_s,
        groups=every,
        look=_progress(place, name, outs[own], wanted.max_steps) if own is not None else lambda: None,
    )
    seconds = rank.gather(time.monotonic() - began)[0]
    leads = own is not None and place.rank == every[own][0]
    steps = rank.gather(_lines(outs[own]) if own is not None and leads else ())
    return [
        replace(
            _ended(name, out, {one: answers[one] for one in ranks}),
            steps=steps[ranks[0]],
            max_steps=wanted.max_steps,
            seconds=seconds,
            logs=place.out / outs[0].name,
        )
        for ranks, out in zip(every, outs, strict=True)
    ]


def _ended(name: str, out: Path, answers: Mapping[int, Answer]) -> Trained:
    """How one training ended, by the answers of its ranks. Raises SeatrialError where that says nothing of them."""
    from seatrial.bench import anew

    ranks = tuple(answers)
    bad = {rank: answer for rank, answer in answers.items() if answer.problem}
    if not bad:
        metrics = answers[ranks[0]].value
        if not isinstance(metrics, dict):
            raise SeatrialError(f"{name}: rank {ranks[0]} answered {str(metrics)[:80]!r}, which are no metrics")
        return Trained(metrics, out, "", ranks=ranks)
    first = anew.first_to_fail(bad)
    for code, ended in {} if bad[first].code in anew.KILLED else _NO_FINDING.items():
        if said := [_told(rank, answer) for rank, answer in bad.items() if answer.code == code]:
            raise SeatrialError(f"{name} {ended}: {said[0]}")
    return Trained(None, out, _told(first, bad[first]), bad[first].code or 1, ranks=ranks, failed=first)


def _new_folders(parent: Path, name: str, count: int) -> list[Path]:
    """Of another attempt some may be there already, and are kept."""
    attempt = 1
    while True:
        stem = name if attempt == 1 else f"{name}.{attempt}"
        folders = [parent / (stem if count == 1 else f"{stem}-{number}") for number in range(count)]
        if not any(folder.exists() for folder in folders):
            return folders
        attempt += 1


def _progress(place: Place, name: str, out: Path, steps: int) -> Callable[[], None]:
    """Tells where this rank's training is, by its files; nothing where they cannot be read, as on another node."""

    def look() -> None:
        if place.rank == 0 and (now := doing(out, steps)):
            place.note(f"{name}: {now}")

    return look


def doing(out: Path, steps: int) -> str:
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


def _lines(out: Path) -> tuple[dict[str, Any], ...]:
    path = out / "steps.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        steps = tuple(json.loads(line) for line in lines if line.endswith("\n"))  # the last may be cut short
    except (OSError, ValueError) as error:
        raise SeatrialError(f"cannot read {path}: {error}") from error
    if wrong := [step for step in steps if not isinstance(step, dict) or not isinstance(step.get("step"), int)]:
        raise SeatrialError(f"{path}: {str(wrong[0])[:80]!r} is no step")
    return steps


def _told(rank: int, answer: Answer) -> str:
    from seatrial.bench import anew

    memory = any(words in answer.problem for words in ("out of memory", "OutOfMemoryError"))
    return f"{'out of memory: ' if memory else ''}{anew.told(rank, answer)}"


# Judged of all trainings of a check together: one that went wrong is enough, and the facts say which
JUDGED = {"exit_code": "", "steps_missing": "count", "nonfinite_losses": "count", "loss_drop": "nats"}
# Told of each training; a check with several appends ".NAME"
EACH = {
    "tokens_per_second_per_gpu": "tokens/s/GPU",
    "loss_first": "nats",
    "loss_last": "nats",
    "loss_above_floor": "nats",
    "step_p50": "s",
    "step_p99": "s",
    "mfu": "%",
    "gemm_share": "%",
    "data_wait": "%",
    "exposed_communication": "%",
    "memory_peak": "GiB",
    "parameters": "count",
    "trained_parameters": "count",
    "train_runtime": "s",
    "until_first_step": "s",
    "wall_seconds": "s",
}
_FROM = {  # those of metrics.json; null there is not known, and gives no figure
    "tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "step_p50": "step_p50_s",
    "step_p99": "step_p99_s",
    "mfu": "mfu_percent",
    "gemm_share": "gemm_percent",
    "data_wait": "data_wait_percent",
    "exposed_communication": "exposed_communication_percent",
    "memory_peak": "memory_peak_gib",
    "parameters": "parameters",
    "trained_parameters": "trained_parameters",
    "train_runtime": "train_runtime_s",
}
PERFORMANCE = ("tokens_per_second_per_gpu*", "step_p*", "mfu*", "gemm_share*", "*_seconds*", "train_runtime*")
_CURVES = {"loss": "nats", "grad_norm": "norm", "learning_rate": "per step", "epoch": "epochs"}


def units(*names: str) -> dict[str, str]:
    """Of what trainings called ``names`` tell; of the only one, where no name is given."""
    return JUDGED | {f"{metric}{_end(name)}": unit for metric, unit in EACH.items() for name in names or ("",)}


def _end(name: str) -> str:
    return f".{name}" if name else ""


def here(place: Place, alone: bool = False) -> list[Fact]:
    """What baselines and rules go by; ``alone``: of the first rank's device. All ranks call this together."""
    from seatrial.bench import rank, subgroups

    found = rank.describe_device(place.device) if alone else rank.describe_devices(place.device)
    facts = {"device": found["backend"], **{name: found[name] for name in ("gpu", "cpu", "world_size", "nodes")}}
    if not alone:
        facts |= {"world_size": place.world_size, "nodes": len(subgroups.ranks_by_node(place.node))}
    facts |= {} if found["backend"] == "cuda" else {"rehearsal": REHEARSAL}
    return [Fact(name=name, value=value) for name, value in facts.items()]


def settings_fact(options: WorkloadOptions) -> Fact:
    """Whether published speeds are of the same training: those of a rule with a baseline."""
    return Fact(name="settings", value="changed" if options.config or options.overrides else "shipped")


def each(
    place: Place, trained: Trained, name: str = "", subject: str = CLUSTER, brief: bool = False
) -> Iterator[Observation]:
    """Figures, curves, what was trained (fact ``run``) and files of one training; ``brief``: its figures, and where it
    failed who says why.
    """
    end, found = _end(name), _figures(trained)
    yield from (
        Metric(name=f"{metric}{end}", value=found[metric], unit=unit, subject=subject)
        for metric, unit in EACH.items()
        if is_number(found.get(metric))
    )
    if brief:
        yield from _logs(place, trained) if trained.problem else ()
        return
    for key, unit in _CURVES.items():
        points = [(step["step"], step[key]) for step in trained.steps if is_number(step.get(key))]
        if points:
            x, y = (tuple(map(float, axis)) for axis in zip(*points, strict=True))
            yield Series(name=f"{key}{end}", subject=subject, x=x, y=y, x_unit="step", y_unit=unit)
    yield Fact(name=f"run{end}", value=_what(trained))
    yield from _files(place, trained)


def judged(runs: Mapping[str, Trained]) -> Iterator[Observation]:
    """What ``RULES`` judge, of all trainings of a check by their names: the worst of each figure, and which it is."""
    problems = {name: one.problem for name, one in runs.items() if one.problem}
    yield Fact(name="trained", value="no" if problems else "yes")
    if problems:
        yield Fact(name="problems", value=problems)
    drops = {name: _drop(one) for name, one in runs.items()}
    yield Fact(name="loss_drops", value={name: round(drop, 4) for name, drop in drops.items() if drop is not None})
    values: dict[str, float | None] = {
        "exit_code": next((one.exit_code for one in runs.values() if one.exit_code), 0),
        "steps_missing": sum(map(_missing, runs.values())),
        "nonfinite_losses": sum(not is_number(step.get("loss")) for one in runs.values() for step in one.steps),
        "loss_drop": min((drop for drop in drops.values() if drop is not None), default=None),
    }
    for metric, value in values.items():
        if value is not None:
            yield Metric(name=metric, value=value, unit=JUDGED[metric], subject=CLUSTER)


def _missing(trained: Trained) -> int:
    """A step that was told twice makes up for none that is missing."""
    return len(set(range(1, trained.max_steps + 1)) - {step["step"] for step in trained.steps})


def _figures(trained: Trained) -> dict[str, Any]:
    losses, floor = _losses(trained), trained.value("loss_floor")
    phases = trained.value("phases_s") or {}
    found = {ours: trained.value(theirs) for ours, theirs in _FROM.items()}
    found |= {"wall_seconds": trained.seconds, "until_first_step": phases.get("until_first_step")}
    if losses:
        found |= {"loss_first": losses[0], "loss_last": losses[-1]}
        found["loss_above_floor"] = None if floor is None else fmean(_last(losses)) - floor
    return found


def _losses(trained: Trained) -> list[float]:
    return [step["loss"] for step in trained.steps if is_number(step.get("loss"))]


def _last(losses: Sequence[float]) -> Sequence[float]:
    return losses[-min(_ENDS, max(1, len(losses) // 2)) :]


def _drop(trained: Trained) -> float | None:
    """By how much the mean loss of the last steps is under that of the first; None with fewer than two."""
    losses = _losses(trained)
    if len(losses) < 2:
        return None
    last = _last(losses)
    return fmean(losses[: len(last)]) - fmean(last)


def is_number(value: Any) -> bool:
    """Also of what a float cannot hold, which JSON can."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _what(trained: Trained) -> dict[str, Any]:
    names = ("model", "weights", "dataset", "stack", "strategy", "precision", "world_size", "mfu_formula", "final")
    found = {name: trained.value(name) for name in (*names, "slowest_rank", "phases_s", "loss_floor", "torch")}
    ended = {"problem": trained.problem} if trained.problem else {}
    return {name: value for name, value in found.items() if value is not None} | ended


def _files(place: Place, trained: Trained) -> Iterator[Artifact]:
    """What is worth looking at, of what it wrote; weights stay where they are."""
    yield from _logs(place, trained)
    for path in (trained.out / file for file in _KEPT):
        if path.is_file():
            yield _artifact(place, trained, path)


def _logs(place: Place, trained: Trained) -> Iterator[Artifact]:
    """Of the rank that explains the problem, and of the first, as far as they said anything that is seen here."""
    if trained.logs is None:
        return
    for rank in dict.fromkeys(rank for rank in (trained.failed, *trained.ranks[:1]) if rank is not None):
        path = trained.logs.with_name(f"{trained.logs.name}.rank{rank}.err")
        if path.is_file() and path.stat().st_size:
            yield _artifact(place, trained, path)


def _artifact(place: Place, trained: Trained, path: Path) -> Artifact:
    return Artifact(path=str(path.relative_to(place.run_dir)), title=f"{trained.out.name}: {path.name}")


# What is wrong with any training, whatever its speed
RULES = (
    Rule(
        metric="exit_code",
        expect="== 0",
        shows=("problems",),
        why="a training that ends otherwise is lost, whatever it reached",
        remedy="The fact problems has its last words, the artifacts its log: seatrial explain LOG. Out of memory: "
        "overrides bsz=…/2 and grad_accum=…×2, or gradient_checkpointing=true, or more ranks with fsdp2",
    ),
    Rule(
        metric="steps_missing",
        expect="== 0",
        where={"trained": "yes"},
        why="every step leaves a line: one that is missing was not taken, or the filesystem lost its line",
        remedy="Compare steps.jsonl (an artifact) with max_steps in config.json; look at filesystem.shared",
    ),
    Rule(
        metric="nonfinite_losses",
        expect="== 0",
        where={"trained": "yes"},
        why="a loss that is no number means wrong arithmetic, damaged memory, or a learning rate that diverges",
        remedy="Repeat it: what comes again is the config, what does not is hardware: nvidia-smi -q -d "
        "ECC,ROW_REMAPPER; dmesg | grep -i xid",
    ),
    Rule(
        metric="loss_drop",
        expect="> 0 nats",
        where={"trained": "yes"},
        shows=("loss_drops",),
        why="the mean loss of the last steps is not under that of the first: nothing is learned",
        remedy="Look at the curve and at grad_norm. 0: no gradient reaches what trains. Wild: the learning rate is too "
        "high for these weights. Fine on one GPU alone: look at train.ddp and collectives.all_reduce",
    ),
)
