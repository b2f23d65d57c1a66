"""Trainings as checks: what ``seatrial train CONFIG`` does, in processes beside the ranks; and what all of them tell.

A training is judged like anything else that is measured: that it ends badly is a figure (``exit_code``), and no error
of the check. Nothing was measured only where a config cannot be trained here at all, or a library is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.checks.base import Options, Place
from seatrial.model import CLUSTER, Artifact, Fact, Metric, Observation, Rule, SeatrialError, Series
from seatrial.train import settings
from seatrial.train.child import REFUSED

if TYPE_CHECKING:
    from seatrial.bench.anew import Answer

LIMIT_S = 1200.0
REHEARSAL = "a rehearsal: the tiny twin of the config, on CPU cores that others share; it says nothing of any GPU"
# Of steps, at either end: a batch's loss strays from its mean by more than a step improves it
_ENDS = 3
_KEPT = ("config.json", "metrics.json", "steps.jsonl")
_TAIL = 4096  # bytes at the end of steps.jsonl, that hold a line


class WorkloadOptions(Options):
    """``overrides`` come after the check's own, in rising priority; ``limit_s`` is for each training, in seconds."""

    config: str = Field(default="", description="of another training: the name of one that ships, or a .yaml file")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE, as of seatrial train --set")
    limit_s: float = Field(default=LIMIT_S, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class Trained:
    """What one training left. ``problem`` is empty where it ended well, else tells how it ended, with its last words.

    ``metrics`` is metrics.json, None after a problem; ``steps`` the lines of steps.jsonl; ``ranks`` who took part.
    """

    metrics: dict[str, Any] | None
    out: Path
    problem: str
    exit_code: int = 0
    steps: tuple[dict[str, Any], ...] = ()
    ranks: tuple[int, ...] = ()

    def value(self, name: str) -> Any:
        """Of metrics.json; None where that is not known."""
        return (self.metrics or {}).get(name)


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
    leads = own is not None and place.rank == every[own][0]
    steps = rank.gather(_lines(outs[own]) if own is not None and leads else ())
    return [
        _ended(name, out, steps[ranks[0]], {one: answers[one] for one in ranks})
        for ranks, out in zip(every, outs, strict=True)
    ]


def _ended(name: str, out: Path, steps: tuple[dict[str, Any], ...], answers: Mapping[int, Answer]) -> Trained:
    """How one training ended, by the answers of its ranks. Raises SeatrialError where it never began."""
    ranks = tuple(answers)
    bad = {rank: answer for rank, answer in answers.items() if answer.problem}
    if not bad:
        return Trained(answers[ranks[0]].value, out, "", 0, steps, ranks)
    refused = [_told(rank, answer) for rank, answer in bad.items() if answer.code == REFUSED]
    if refused:
        raise SeatrialError(f"{name} was not trained: {refused[0]}")
    first = min(bad, key=lambda rank: bad[rank].place)
    return Trained(None, out, _told(first, bad[first]), bad[first].code or 1, steps, ranks)


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
    """Tells what steps.jsonl says of this rank's training; nothing where it cannot be read, as on another node."""

    def look() -> None:
        if place.rank == 0 and (step := last_step(out)):
            place.note(f"{name}: step {step} of {steps}")

    return look


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
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return tuple(json.loads(line) for line in lines if line.endswith("\n"))  # the last may be cut short


def _told(rank: int, answer: Answer) -> str:
    memory = any(words in answer.problem for words in ("out of memory", "OutOfMemoryError"))
    return f"{'out of memory: ' if memory else ''}rank {rank}: {answer.problem}"


# What every training tells. A check with several of them appends ".NAME" to each.
UNITS = {
    "exit_code": "",
    "steps_missing": "count",
    "nonfinite_losses": "count",
    "loss_first": "nats",
    "loss_last": "nats",
    "loss_drop": "nats",
    "loss_above_floor": "nats",
    "seconds": "s",
    "until_first_step": "s",
    "tokens_per_second_per_gpu": "tokens/s/GPU",
    "step_p50": "s",
    "step_p99": "s",
    "mfu": "%",
    "gemm_share": "%",
    "data_wait": "%",
    "exposed_communication": "%",
    "memory_peak": "GiB",
    "trained_parameters": "count",
}
# Ours → that of metrics.json: null there is not known, and no figure
_FROM = {
    "seconds": "train_runtime_s",
    "tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "step_p50": "step_p50_s",
    "step_p99": "step_p99_s",
    "mfu": "mfu_percent",
    "gemm_share": "gemm_percent",
    "data_wait": "data_wait_percent",
    "exposed_communication": "exposed_communication_percent",
    "memory_peak": "memory_peak_gib",
    "trained_parameters": "trained_parameters",
}
PERFORMANCE = ("tokens_per_second_per_gpu*", "step_p*", "seconds*", "until_first_step*", "mfu*", "gemm_share*")


def units(*names: str) -> dict[str, str]:
    """Of all that is told of each of the trainings called ``names``."""
    return {f"{metric}.{name}": unit for metric, unit in UNITS.items() for name in names}


def facts(place: Place, trained: Trained, **more: Any) -> Iterator[Fact]:
    """Where it was trained, and ``more``: what rules, baselines and a reader go by."""
    cuda = place.device.startswith("cuda")
    yield Fact(name="device", value="cuda" if cuda else "cpu")
    if cuda:
        yield Fact(name="gpu", value=trained.value("gpu0"))
    else:
        yield Fact(name="rehearsal", value=REHEARSAL)
    yield Fact(name="trained", value="no" if trained.problem else "yes")
    for name, value in more.items():
        yield Fact(name=name, value=value)


def told_of(trained: Trained) -> dict[str, Any]:
    """What was trained, by its metrics.json: for a fact."""
    names = ("model", "weights", "dataset", "stack", "strategy", "precision", "world_size", "parameters", "mfu_formula")
    found = {name: trained.value(name) for name in (*names, "final", "slowest_rank", "phases_s", "torch")}
    return {name: value for name, value in found.items() if value is not None} | {"problem": trained.problem or "none"}


def figures(trained: Trained, wanted_steps: int, name: str = "", subject: str = CLUSTER) -> Iterator[Observation]:
    """Metrics and curves of one training, each with ``name`` behind a point, where there is one."""
    end = f".{name}" if name else ""
    for metric, value in _values(trained, wanted_steps).items():
        if value is not None and math.isfinite(value):
            yield Metric(name=f"{metric}{end}", value=value, unit=UNITS[metric], subject=subject)
    for key, unit in (("loss", "nats"), ("grad_norm", "norm"), ("learning_rate", "1"), ("epoch", "epoch")):
        points = [(step["step"], step[key]) for step in trained.steps if _is_number(step.get(key))]
        if points:
            x, y = (tuple(map(float, axis)) for axis in zip(*points, strict=True))
            yield Series(name=f"{key}{end}", subject=subject, x=x, y=y, x_unit="step", y_unit=unit)


def _values(trained: Trained, wanted_steps: int) -> dict[str, float | None]:
    losses = [step["loss"] for step in trained.steps if _is_number(step.get("loss"))]
    found: dict[str, float | None] = {
        "exit_code": trained.exit_code,
        "steps_missing": wanted_steps - len(trained.steps),
        "nonfinite_losses": len(trained.steps) - len(losses),
    }
    if losses:
        few = min(_ENDS, max(1, len(losses) // 2))
        first, last, floor = fmean(losses[:few]), fmean(losses[-few:]), trained.value("loss_floor")
        found |= {"loss_first": losses[0], "loss_last": losses[-1], "loss_drop": first - last}
        found["loss_above_floor"] = None if floor is None else last - floor
    found |= {ours: trained.value(theirs) for ours, theirs in _FROM.items()}
    return found | {"until_first_step": (trained.value("phases_s") or {}).get("until_first_step")}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def artifacts(place: Place, trained: Trained, name: str) -> Iterator[Artifact]:
    """What is worth looking at, of what it wrote; the weights stay where they are."""
    logs = [path for path in sorted(place.out.glob(f"{trained.out.name}.rank*.err")) if path.stat().st_size]
    for path in [*(trained.out / file for file in _KEPT), *logs[:2]]:
        if path.is_file():
            yield Artifact(path=str(path.relative_to(place.run_dir)), title=f"{path.name} of {name}")


def rules(*names: str) -> tuple[Rule, ...]:
    """What is wrong of any training, whatever its speed. ``names`` as of ``units``; none: of the only one."""
    return tuple(rule for name in names or ("",) for rule in _rules_of(f".{name}" if name else ""))


def _rules_of(end: str) -> tuple[Rule, ...]:
    return (
        Rule(
            metric=f"exit_code{end}",
            expect="== 0",
            shows=("problems",),
            why="a training that ends otherwise is lost, whatever it reached",
            remedy="The fact problems has its last words, the artifacts its log: seatrial explain LOG. Out of memory: "
            "halve bsz and double grad_accum by overrides; or gradient_checkpointing=true",
        ),
        Rule(
            metric=f"steps_missing{end}",
            expect="== 0",
            where={"trained": "yes"},
            why="every step leaves a line: one that is missing was not taken, or its line was lost by the filesystem",
            remedy="Compare steps.jsonl (an artifact) with max_steps in config.json; look at filesystem.shared",
        ),
        Rule(
            metric=f"nonfinite_losses{end}",
            expect="== 0",
            where={"trained": "yes"},
            why="a loss that is no number means wrong arithmetic, damaged memory, or a learning rate that diverges",
            remedy="Repeat it: what comes again is the config, what does not is hardware: nvidia-smi -q -d "
            "ECC,ROW_REMAPPER; dmesg | grep -i xid",
        ),
        Rule(
            metric=f"loss_drop{end}",
            expect="> 0 nats",
            where={"trained": "yes"},
            why="the mean loss of the last steps is not under that of the first: nothing is learned",
            remedy="Look at the curve and at grad_norm. 0: no gradient reaches what trains. Wild: the learning rate is "
            "too high for these weights. Fine on one GPU only: look at train.ddp and collectives.all_reduce",
        ),
    )
