"""Does a training of the site's own work here: any command line, once on every node or once on every GPU?

Loss and speed are read from its log by regular expressions, or from the trainer_state.json of transformers' Trainer.
Each run is a program in its own session; every node runs its own, none of seatrial's ranks takes part.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from seatrial.checks.base import Check, Context, Options
from seatrial.discover import gpu
from seatrial.discover.gpu import Gpu
from seatrial.model import (
    Artifact,
    Fact,
    Metric,
    NotApplicable,
    Observation,
    Phase,
    Rule,
    Scope,
    SeatrialError,
    Series,
)
from seatrial.train import disk, trainer_state
from seatrial.train.trainer_state import Step, TrainerState
from seatrial.util import processes

RUN_METRICS = {
    "exit_code": "code",
    "wall_seconds": "s",
    "train_runtime": "s",
    "steps_logged": "count",
    "steps_missing": "count",
    "nonfinite_steps": "count",
    "loss_first": "nats",
    "loss_last": "nats",
    "loss_drop": "nats",
}
SPEEDS = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s", "step_seconds": "s"}
GROUPS = ("step", "loss", "grad_norm", *SPEEDS)  # what a named group of a log pattern may be called
PLACEHOLDERS = ("out", "gpus", "node", "node_rank", "nodes")
NO_COMMAND = (
    "no command is configured; for example: --set 'checks.train.command.options.command="
    '[torchrun, --standalone, "--nproc-per-node={gpus}", /shared/train.py, --out, "{out}"]\''
)
# They make a program take itself for a rank of seatrial's job, or load modules of seatrial's environment
_UNSET = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV"),
}
_POLL_S = 0.5
_NOTE_EVERY_S = 15
_TAIL_CHARS = 600


class CommandOptions(Options):
    command: tuple[str, ...] = Field(
        default=(), description="argv, or one string that is split as a shell would; no shell runs it"
    )
    per: Literal["node", "gpu"] = Field(default="node", description="one run on each node, or one on each GPU at once")
    env: dict[str, str] = Field(default={}, description="variables for the command")
    train_limit_s: float = Field(default=1500, gt=0, description="seconds after which the command is ended")
    steps: int | None = Field(default=None, gt=0, description="steps that must be there; of trainer_state: max_steps")
    log: tuple[str, ...] = Field(default=(), description=f"regular expressions with named groups: {', '.join(GROUPS)}")
    trainer_state: str = Field(default="", description="path below {out} of the Trainer's trainer_state.json")
    artifacts: tuple[str, ...] = Field(default=(), description="globs below {out}; each must match after the run")

    @field_validator("command", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("log")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                groups = set(re.compile(pattern).groupindex)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if not groups or groups - set(GROUPS):
                raise ValueError(f"{pattern!r} has the named groups {sorted(groups)}; expected some of {GROUPS}")
        return patterns

    @field_validator("artifacts", "trainer_state")
    @classmethod
    def _below_out(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for path in (value,) if isinstance(value, str) else value:
            if path.startswith("/") or ".." in PurePosixPath(path).parts:
                raise ValueError(f"{path!r} is not a path below {{out}}")
        return value

    @model_validator(mode="after")
    def _one_loss(self) -> CommandOptions:
        if self.trainer_state and any("loss" in re.compile(pattern).groupindex for pattern in self.log):
            raise ValueError("loss has two sources: trainer_state and a group of log; remove one")
        return self

    @property
    def loss_source(self) -> str:
        if self.trainer_state:
            return "trainer_state"
        return "log" if any("loss" in re.compile(pattern).groupindex for pattern in self.log) else "none"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One start of a command, which messages call ``name``. ``folder`` exists; stdout and stderr go to ``log``."""

    name: str
    subject: str
    argv: tuple[str, ...]
    folder: Path
    log: Path
    env: Mapping[str, str]


@dataclass(frozen=True)
class RunResult:
    """How a run ended. ``code`` is None where the time limit ended it."""

    exit_code: int | None
    seconds: float
    log_text: str

    @property
    def log_tail(self) -> str:
        return self.log_text.strip()[-_TAIL_CHARS:]


def measure(context: Context, options: CommandOptions) -> Iterator[Observation]:
    """Raises NotApplicable without a command, SeatrialError where it cannot start, does not end in time, finds no room
    on disk, or its log or record cannot be read.
    """
    if not options.command:
        raise NotApplicable(NO_COMMAND)
    gpus = visible_gpus()
    if len(gpus) < (context.expected_gpus or 0):
        raise SeatrialError(f"{context.node}: {len(gpus)} of {context.expected_gpus} promised GPUs are visible")
    indices = range(len(gpus)) if options.per == "gpu" and gpus else (None,)
    runs = [_run_of(context, options, gpus, index) for index in indices]
    yield Fact(name="device", value="cuda" if gpus else "cpu")
    yield Fact(name="command", value={run.subject: shlex.join(run.argv) for run in runs})
    for name, configured in _configured(options).items():
        yield Fact(name=name, value="yes" if configured else "no")
    ended = run_all(runs, options.train_limit_s, context)
    yield Fact(name="exit_reason", value={run.subject: exit_reason(one.exit_code) for run, one in ended})
    yield Fact(name="log_tail", value={run.subject: one.log_tail for run, one in ended})
    for run, one in ended:
        yield Artifact(path=str(run.log.relative_to(context.run_dir)), title=f"log of the command on {run.subject}")
        yield from exit_metrics(run, one, options.train_limit_s)
    good = [(run, one) for run, one in ended if one.exit_code == 0]
    missing = {run.subject: _missing(run.folder, options.artifacts) for run, _ in good}
    yield Fact(name="artifacts_not_found", value=missing)
    for run, one in good:
        if options.artifacts:
            yield metric("artifacts_missing", len(missing[run.subject]), run.subject)
        yield from _result(run, one, options)


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this node that CUDA would use. Raises SeatrialError where neither driver nor bus can be read."""
    facts = gpu.read_with_timeout()
    if facts.detection_error:
        raise SeatrialError(facts.detection_error)
    return gpu.cuda_visible(facts, os.environ)


def _run_of(context: Context, options: CommandOptions, gpus: Sequence[Gpu], index: int | None) -> Run:
    """The run on GPU number ``index`` of ``gpus``, or on the whole node. Raises SeatrialError."""
    chosen = gpus if index is None else (gpus[index],)
    subject = context.node if index is None else f"{context.node}/gpu{gpus[index].index}"
    folder = new_folder(context, subject.replace("/", "-"))
    values = {
        "out": str(folder),
        "gpus": str(len(chosen) or 1),  # processes to start: one on a machine without a GPU
        "node": context.node,
        "node_rank": str(context.rank),
        "nodes": str(context.world_size),
    }
    pattern = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
    argv = tuple(pattern.sub(lambda match: values[match[1]], argument) for argument in options.command)
    require_executable(argv[0], options.env.get("PATH"), context.node)
    env = options.env if index is None else {**options.env, "CUDA_VISIBLE_DEVICES": cuda_device(gpus[index])}
    log = folder / "command.log"
    return Run(name=Path(argv[0]).name, subject=subject, argv=argv, folder=folder, log=log, env=env)


def new_folder(context: Context, name: str) -> Path:
    """A new folder of this check for one run; a second measurement gets another."""
    folder = context.artifacts_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir()
    return folder


def require_executable(name: str, path: str | None, node: str) -> None:
    if not shutil.which(name, path=path):
        raise SeatrialError(f"options.command: there is no executable {name} on {node}")


def cuda_device(one: Gpu) -> str:
    """A GPU as CUDA_VISIBLE_DEVICES names it."""
    return one.uuid or str(one.index)


def _configured(options: CommandOptions) -> dict[str, bool]:
    """Facts by which the rules apply: what is not configured is not judged."""
    return {
        "loss_configured": options.loss_source != "none",
        "steps_configured": bool(options.trainer_state or (options.steps and options.loss_source == "log")),
        "artifacts_configured": bool(options.artifacts),
    }


def run_all(runs: Sequence[Run], limit_s: float, context: Context) -> list[tuple[Run, RunResult]]:
    """Start all ``runs`` at once and wait for them, at most ``limit_s`` seconds; nothing of them is left afterwards."""
    unset = [name for name in os.environ if name in _UNSET or name.startswith("TORCHELASTIC_")]
    started, children, seconds = time.monotonic(), list[processes.Child](), dict[int, float]()
    try:
        for run in runs:
            argv = ["env", *(f"--unset={name}" for name in unset), *run.argv]
            children.append(processes.start(argv, env=run.env, stdout=run.log, stderr=run.log))
        while len(seconds) < len(runs) and (passed := time.monotonic() - started) < limit_s:
            for number, child in enumerate(children):
                if child.poll() is not None:
                    seconds.setdefault(number, passed)
            context.progress(f"{runs[0].name}, {passed // _NOTE_EVERY_S * _NOTE_EVERY_S:.0f} s")
            time.sleep(_POLL_S)
    finally:
        for child in children:
            processes.stop(child)
    return [
        (
            run,
            RunResult(
                children[number].poll() if number in seconds else None,
                seconds.get(number, limit_s),
                run.log.read_text(encoding="utf-8", errors="replace"),
            ),
        )
        for number, run in enumerate(runs)
    ]


def exit_reason(code: int | None) -> str:
    if code is None:
        return "ended by the time limit"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals between the first and the last have no name in Python
        return f"killed by signal {-code}"


def exit_metrics(run: Run, ended: RunResult, limit_s: float) -> Iterator[Metric]:
    """Exit code and duration. Raises SeatrialError where the time limit or a full disk ended the run."""
    if ended.exit_code is None:
        raise SeatrialError(
            f"{run.subject}: {run.name} did not end within {limit_s:g} s; end of its log: {ended.log_tail}"
        )
    if ended.exit_code and disk.is_disk_full_message(ended.log_tail):
        where = f"{disk.filesystem_usage(run.folder)}. {disk.REMEDY}"
        raise SeatrialError(
            f"{run.subject}: {run.name} found no room on disk. {where}; end of its log: {ended.log_tail}"
        )
    code = ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code  # as a shell reports a signal
    yield metric("exit_code", code, run.subject)
    yield metric("wall_seconds", ended.seconds, run.subject)


def _missing(folder: Path, patterns: Sequence[str]) -> list[JsonValue]:
    """The globs that match neither a folder nor a file with content."""
    return [
        pattern
        for pattern in patterns
        if not any(path.is_dir() or path.stat().st_size for path in folder.glob(pattern))
    ]


def _result(run: Run, ended: RunResult, options: CommandOptions) -> Iterator[Observation]:
    entries = log_entries(ended.log_text, options.log, run.log) if options.log else []
    if options.loss_source == "log":
        yield from loss_observations(_state_of(entries, options.steps, run.log), options.steps or 0, run.subject)
    if options.trainer_state:
        state = trainer_state.read(run.folder / options.trainer_state)
        yield from loss_observations(state, options.steps or state.max_steps, run.subject)
        if state.summary and state.summary.train_samples_per_second is not None:
            yield metric("samples_per_second", state.summary.train_samples_per_second, run.subject)
    for name in SPEEDS:
        if values := tuple(entry[name] for entry in entries if name in entry):
            yield Metric(name=name, value=median(values), unit=SPEEDS[name], subject=run.subject, samples=values)


def log_entries(text: str, patterns: Sequence[str], log: Path) -> list[dict[str, float]]:
    """The values of the named groups of every line that a pattern matches.

    Raises SeatrialError for a pattern that matches no line, and for a group that is no number.
    """
    lines = text.splitlines()
    compiled = [re.compile(pattern) for pattern in patterns]
    by_line: dict[int, dict[str, float]] = {}
    for pattern in compiled:
        matches = [(number, match) for number, line in enumerate(lines) if (match := pattern.search(line))]
        if not matches:
            last = next((line for line in reversed(lines) if line.strip()), "")
            where = f"none of the {len(lines)} lines of {log}"
            raise SeatrialError(f"options.log: {pattern.pattern!r} matches {where}; the last: {last:.200}")
        for number, match in matches:
            values = {name: _number(value, pattern, log) for name, value in match.groupdict().items() if value}
            by_line.setdefault(number, {}).update(values)
    return [by_line[number] for number in sorted(by_line)]


def _number(text: str, pattern: re.Pattern[str], log: Path) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError as error:
        raise SeatrialError(f"options.log: {pattern.pattern!r} reads {text!r} in {log}, which is no number") from error


def _state_of(entries: Sequence[Mapping[str, float]], steps: int | None, log: Path) -> TrainerState:
    """The steps of a log. Raises SeatrialError where they do not rise, as where several ranks write to one log."""
    found: list[Step] = []
    for entry in (entry for entry in entries if "loss" in entry):
        previous = found[-1].step if found else -1
        step = int(entry["step"]) if "step" in entry else len(found) + 1
        if step <= previous:
            raise SeatrialError(
                f"options.log: step {step} follows step {previous} in {log}; match the lines of one rank only"
            )
        found.append(Step(step=step, loss=entry["loss"], grad_norm=entry.get("grad_norm")))
    return TrainerState(global_step=found[-1].step if found else 0, max_steps=steps or 0, steps=tuple(found))


def loss_observations(state: TrainerState, wanted: int, subject: str) -> Iterator[Observation]:
    """Steps and losses of a training. Pure. Without a summary there is no runtime, under three losses no drop."""
    losses = [(step.step, step.loss) for step in state.steps if step.finite]
    if losses:
        x, y = zip(*losses, strict=True)
        yield Series(name="loss", subject=subject, x=x, y=y, x_unit="step", y_unit="nats")
    yield metric("steps_logged", len(state.steps), subject)
    yield metric("steps_missing", max(0, wanted - state.global_step), subject)
    yield metric("nonfinite_steps", sum(not step.finite for step in state.steps), subject)
    if state.summary:
        yield metric("train_runtime", state.summary.train_runtime, subject)
    if state.first_last_third_loss:
        first, last = state.first_last_third_loss
        yield metric("loss_first", first, subject)
        yield metric("loss_last", last, subject)
        yield metric("loss_drop", first - last, subject)


def metric(name: str, value: float, subject: str) -> Metric:
    return Metric(name=name, value=value, unit=METRICS[name], subject=subject)


METRICS = {**RUN_METRICS, **SPEEDS, "artifacts_missing": "count"}
_LOOK = "Open command.log in this check's artifacts, and run the command of the fact `command` by hand"
_LOSS = {"loss_configured": "yes"}

CHECK = Check(
    name="train.command",
    title="A training command of this site",
    phase=Phase.SINGLE_GPU,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=(
        Rule(
            metric="exit_code",
            evidence_facts=("exit_reason", "log_tail"),
            expect="== 0",
            meaning="The command failed.",
            fix=_LOOK,
        ),
        Rule(
            metric="steps_missing",
            applies_if={"steps_configured": "yes"},
            expect="== 0",
            meaning="The training took fewer steps than configured.",
            fix=_LOOK,
        ),
        Rule(
            metric="nonfinite_steps",
            applies_if=_LOSS,
            expect="== 0",
            meaning="A loss or gradient norm that is infinite or NaN means wrong arithmetic, memory or precision.",
            fix="Compare train.cnn and train.ddp, which are stable, and look at `nvidia-smi -q -d ECC`.",
        ),
        Rule(
            metric="loss_drop",
            applies_if=_LOSS,
            expect="> 0 nats",
            meaning="The median loss of the last third of the steps must be below that of the first third.",
            fix="Look at the loss curve. Run more steps, or on a machine known to be good, and compare",
        ),
        Rule(
            metric="artifacts_missing",
            applies_if={"artifacts_configured": "yes"},
            evidence_facts=("artifacts_not_found",),
            expect="== 0",
            meaning="The command ended well and did not leave the files that it should.",
            fix=f"{_LOOK}; look at the space and permissions of the run directory: df -h; ls -ld",
        ),
    ),
    measure=measure,
    limit_s=2100,  # more than train_limit_s
    options=CommandOptions,
    performance_metrics=("wall_seconds", "train_runtime", *SPEEDS),
)
