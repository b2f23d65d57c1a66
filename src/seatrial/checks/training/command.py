"""Runs a training command of the site, once per node or once per GPU.

Loss and speed are read from the command's log with regular expressions, or from the trainer_state.json that
transformers' Trainer writes.
Each run is a process in its own session on its node; seatrial's ranks only start it and wait.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from seatrial.checks.base import Check, Context, Options, RuleFact, SkipIf
from seatrial.discover import gpu
from seatrial.discover.gpu import Gpu
from seatrial.model import Artifact, Fact, Metric, NotApplicable, Observation, Phase, Rule, Scope, SeatrialError, Series
from seatrial.train import trainer_state
from seatrial.train.trainer_state import LoggedStep, TrainerState
from seatrial.util import processes
from seatrial.util.failures import exit_reason
from seatrial.util.secrets import redacted, secret_values

RUN_METRICS = {
    "exit_code": "code",
    "wall_seconds": "s",
    "train_runtime": "s",
    "steps_logged": "count",
    "steps_missing": "count",
    "nonfinite_steps": "count",
    "loss_first_third": "nats",
    "loss_last_third": "nats",
    "loss_drop": "nats",
}
SPEEDS = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s", "step_seconds": "s"}
LOG_GROUPS = ("step", "loss", "grad_norm", *SPEEDS)  # valid named groups of a log pattern
PLACEHOLDERS = ("out", "gpus", "node", "node_rank", "nodes")
NO_COMMAND = (
    "no command configured; example: --set 'checks.train.command.options.command="
    '[torchrun, --standalone, "--nproc-per-node={gpus}", /shared/train.py, --out, "{out}"]\''
)
# Variables that would make the command a rank of seatrial's job, or load modules of seatrial's environment
_UNSET = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV"),
}
_POLL_S = 0.5
_PROGRESS_INTERVAL_S = 15  # seconds in the progress line are a multiple of this, so that the line changes rarely
_TAIL_CHARS, _REDACTED_CHARS = 600, 20_000


class CommandOptions(Options):
    """Options of train.command."""

    command: tuple[str, ...] = Field(
        default=(), description="argv, or one string that is split like a shell command line; it runs without a shell"
    )
    per: Literal["node", "gpu"] = Field(default="node", description="one run per node, or one run per GPU concurrently")
    env: dict[str, str] = Field(default={}, description="environment variables of the command")
    train_limit_s: float = Field(default=1500, gt=0, description="time limit of the command, seconds")
    steps: int | None = Field(
        default=None, gt=0, description="expected steps; default with trainer_state: its max_steps"
    )
    log: tuple[str, ...] = Field(
        default=(), description=f"regular expressions with named groups: {', '.join(LOG_GROUPS)}"
    )
    trainer_state: str = Field(default="", description="path of trainer_state.json, relative to {out}")
    artifacts: tuple[str, ...] = Field(default=(), description="globs relative to {out}; each must match after the run")

    @field_validator("command", mode="before")
    @classmethod
    def _split_command(cls, value: object) -> object:
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("log")
    @classmethod
    def _check_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                groups = set(re.compile(pattern).groupindex)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if not groups or groups - set(LOG_GROUPS):
                raise ValueError(
                    f"{pattern!r} has the named groups {sorted(groups)}; expected one or more of {LOG_GROUPS}"
                )
        return patterns

    @field_validator("artifacts", "trainer_state")
    @classmethod
    def _check_paths_below_out(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for path in (value,) if isinstance(value, str) else value:
            if path.startswith("/") or ".." in PurePosixPath(path).parts:
                raise ValueError(f"{path!r} is not a path below {{out}}")
        return value

    @model_validator(mode="after")
    def _check_single_loss_source(self) -> CommandOptions:
        if self.trainer_state and any("loss" in re.compile(pattern).groupindex for pattern in self.log):
            raise ValueError("two sources of the loss: trainer_state and a group of log; remove one")
        return self

    @property
    def loss_source(self) -> str:
        if self.trainer_state:
            return "trainer_state"
        return "log" if any("loss" in re.compile(pattern).groupindex for pattern in self.log) else "none"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution of a command. ``name`` is for messages; ``log`` receives stdout and stderr; ``folder`` exists."""

    name: str
    subject: str
    argv: tuple[str, ...]
    folder: Path
    log: Path
    env: Mapping[str, str]


@dataclass(frozen=True)
class RunResult:
    """Result of a run; ``exit_code``: None after a stop at the time limit; ``log_tail``: without secrets."""

    exit_code: int | None
    seconds: float
    log_text: str
    log_tail: str


def measure(context: Context, options: CommandOptions) -> Iterator[Observation]:
    """Run the command and read its results.

    Raises NotApplicable without a command. Raises SeatrialError if the command cannot start, exceeds its time limit or
    fills the disk, or if the log or trainer_state.json cannot be read.
    """
    if not options.command:
        raise NotApplicable(NO_COMMAND)
    gpus = visible_gpus()
    if len(gpus) < (context.expected_gpus or 0):
        raise SeatrialError(f"{context.node}: {len(gpus)} GPUs visible, expected {context.expected_gpus}")
    gpu_numbers = range(len(gpus)) if options.per == "gpu" and gpus else (None,)
    runs = [_create_run(context, options, gpus, number) for number in gpu_numbers]
    yield Fact(name="device", value="cuda" if gpus else "cpu")
    yield Fact(name="command", value={run.subject: shlex.join(run.argv) for run in runs})
    for name, configured in _configured_facts(options).items():
        yield Fact(name=name, value="yes" if configured else "no")
    results = run_all(runs, options.train_limit_s, context)
    yield Fact(name="exit_reason", value={run.subject: end_reason(result.exit_code) for run, result in results})
    yield Fact(name="log_tail", value={run.subject: result.log_tail for run, result in results})
    for run, result in results:
        yield Artifact(path=str(run.log.relative_to(context.run_dir)), title=f"log of the command on {run.subject}")
        yield from exit_metrics(run, result, options.train_limit_s)
    successful = [(run, result) for run, result in results if result.exit_code == 0]
    missing = {run.subject: _missing_artifacts(run.folder, options.artifacts) for run, _ in successful}
    yield Fact(name="artifacts_not_found", value=missing)
    for run, result in successful:
        if options.artifacts:
            yield _metric("artifacts_missing", len(missing[run.subject]), run.subject)
        yield from _training_observations(run, result, options)


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this node that CUDA would use. Raises SeatrialError if neither driver nor PCI bus can be read."""
    facts = gpu.read_with_timeout()
    if facts.detection_error:
        raise SeatrialError(facts.detection_error)
    return gpu.cuda_visible(facts, os.environ)


def _create_run(context: Context, options: CommandOptions, gpus: Sequence[Gpu], number: int | None) -> Run:
    """The run on ``gpus[number]``, or on all ``gpus`` if ``number`` is None.

    Raises SeatrialError if the executable is not found.
    """
    run_gpus = gpus if number is None else (gpus[number],)
    subject = context.node if number is None else f"{context.node}/gpu{gpus[number].index}"
    folder = new_folder(context, subject.replace("/", "-"))
    placeholder_values = {
        "out": str(folder),
        "gpus": str(len(run_gpus) or 1),  # number of processes: one without a GPU
        "node": context.node,
        "node_rank": str(context.rank),
        "nodes": str(context.world_size),
    }
    pattern = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
    argv = tuple(pattern.sub(lambda match: placeholder_values[match[1]], argument) for argument in options.command)
    require_executable(argv[0], options.env.get("PATH"), context.node)
    env = options.env if number is None else {**options.env, "CUDA_VISIBLE_DEVICES": cuda_device(gpus[number])}
    log = folder / "command.log"
    return Run(name=Path(argv[0]).name, subject=subject, argv=argv, folder=folder, log=log, env=env)


def new_folder(context: Context, name: str) -> Path:
    """Create a folder in the check's artifacts folder, named after ``name`` and the current time."""
    folder = context.artifacts_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir()
    return folder


def require_executable(name: str, path: str | None, node: str) -> None:
    if not shutil.which(name, path=path):
        raise SeatrialError(f"options.command: executable {name} not found on {node}")


def cuda_device(gpu: Gpu) -> str:
    """The value of CUDA_VISIBLE_DEVICES for ``gpu``."""
    return gpu.uuid or str(gpu.index)


def _configured_facts(options: CommandOptions) -> dict[str, bool]:
    """Fact → whether the options configure the metrics of the fact. If not, the rules on these metrics do not apply."""
    return {
        "loss_configured": options.loss_source != "none",
        "steps_configured": bool(options.trainer_state or (options.steps and options.loss_source == "log")),
        "artifacts_configured": bool(options.artifacts),
    }


def run_all(runs: Sequence[Run], limit_s: float, context: Context) -> list[tuple[Run, RunResult]]:
    """Start all ``runs`` concurrently, wait at most ``limit_s`` seconds, and stop the remaining processes.

    Returns each run with its result.
    """
    unset = [name for name in os.environ if name in _UNSET or name.startswith("TORCHELASTIC_")]
    children: list[processes.Child] = []
    seconds_by_number: dict[int, float] = {}  # index in ``runs`` → duration, of the runs that have ended
    started = time.monotonic()
    try:
        for run in runs:
            argv = ["env", *(f"--unset={name}" for name in unset), *run.argv]
            children.append(processes.start(argv, env=run.env, stdout=run.log, stderr=run.log))
        while len(seconds_by_number) < len(runs) and (elapsed := time.monotonic() - started) < limit_s:
            for number, child in enumerate(children):
                if child.poll() is not None:
                    seconds_by_number.setdefault(number, elapsed)
            context.progress(f"{runs[0].name}, {elapsed // _PROGRESS_INTERVAL_S * _PROGRESS_INTERVAL_S:.0f} s")
            time.sleep(_POLL_S)
    finally:
        for child in children:
            processes.stop(child)
    return [
        (run, _run_result(run, child, seconds_by_number.get(number), limit_s))
        for number, (run, child) in enumerate(zip(runs, children, strict=True))
    ]


def _run_result(run: Run, child: processes.Child, seconds: float | None, limit_s: float) -> RunResult:
    text = run.log.read_text(encoding="utf-8", errors="replace")
    end = text.strip()[-_REDACTED_CHARS:]
    # redacted before the cut: half a secret has neither its value nor its form
    tail = redacted(end, secret_values({"env": run.env, "options": run.argv}))[-_TAIL_CHARS:]
    return RunResult(None, limit_s, text, tail) if seconds is None else RunResult(child.poll(), seconds, text, tail)


def end_reason(exit_code: int | None) -> str:
    """How the command ended: its exit code, a signal, or the time limit."""
    return "stopped at the time limit" if exit_code is None else exit_reason(exit_code)


def exit_metrics(run: Run, result: RunResult, limit_s: float) -> Iterator[Metric]:
    """Exit code and duration. Raises SeatrialError after the time limit or on a full disk."""
    from seatrial.train import disk

    if result.exit_code is None:
        raise SeatrialError(
            f"{run.subject}: {run.name} did not end within {limit_s:g} s; end of its log: {result.log_tail}"
        )
    if result.exit_code and disk.is_disk_full_message(result.log_tail):
        usage = f"{disk.filesystem_usage(run.folder)}. {disk.REMEDY}"
        raise SeatrialError(f"{run.subject}: {run.name}: disk full. {usage}; end of its log: {result.log_tail}")
    exit_code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code  # as in a shell
    yield _metric("exit_code", exit_code, run.subject)
    yield _metric("wall_seconds", result.seconds, run.subject)


def _missing_artifacts(folder: Path, patterns: Sequence[str]) -> list[JsonValue]:
    """The globs that match neither a folder nor a non-empty file."""
    return [
        pattern
        for pattern in patterns
        if not any(path.is_dir() or path.stat().st_size for path in folder.glob(pattern))
    ]


def _training_observations(run: Run, result: RunResult, options: CommandOptions) -> Iterator[Observation]:
    """Losses and speeds from the log and trainer_state.json."""
    entries = log_entries(result.log_text, options.log, run.log) if options.log else []
    if options.loss_source == "log":
        yield from loss_observations(_state_from_log(entries, options.steps, run.log), options.steps or 0, run.subject)
    if options.trainer_state:
        state = trainer_state.read(run.folder / options.trainer_state)
        yield from loss_observations(state, options.steps or state.max_steps, run.subject)
        if state.summary and state.summary.train_samples_per_second is not None:
            yield _metric("samples_per_second", state.summary.train_samples_per_second, run.subject)
    for name in SPEEDS:
        if values := tuple(entry[name] for entry in entries if name in entry):
            yield Metric(name=name, value=median(values), unit=SPEEDS[name], subject=run.subject, samples=values)


def log_entries(text: str, patterns: Sequence[str], log: Path) -> list[dict[str, float]]:
    """For each line that matches a pattern, in the order of the lines: named group → value.

    Raises SeatrialError for a pattern without a match and for a group that is not a number.
    """
    lines = text.splitlines()
    compiled = [re.compile(pattern) for pattern in patterns]
    by_line: dict[int, dict[str, float]] = {}
    for pattern in compiled:
        matches = [(number, match) for number, line in enumerate(lines) if (match := pattern.search(line))]
        if not matches:
            last = next((line for line in reversed(lines) if line.strip()), "")
            raise SeatrialError(
                f"options.log: {pattern.pattern!r} matches none of the {len(lines)} lines of {log}; last line: "
                f"{redacted(last):.200}"
            )
        for number, match in matches:
            values = {name: _number(value, pattern, log) for name, value in match.groupdict().items() if value}
            by_line.setdefault(number, {}).update(values)
    return [by_line[number] for number in sorted(by_line)]


def _number(text: str, pattern: re.Pattern[str], log: Path) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError as error:
        raise SeatrialError(f"options.log: {pattern.pattern!r} matches {text!r} in {log}; expected a number") from error


def _state_from_log(entries: Sequence[Mapping[str, float]], max_steps: int | None, log: Path) -> TrainerState:
    """The steps of the log entries that have a loss. Without the group ``step`` they are numbered from 1.

    Raises SeatrialError if step numbers do not increase, as when several ranks write to one log.
    """
    steps: list[LoggedStep] = []
    for entry in entries:
        if "loss" not in entry:
            continue
        previous = steps[-1].step if steps else -1
        step = int(entry["step"]) if "step" in entry else len(steps) + 1
        if step <= previous:
            raise SeatrialError(
                f"options.log: step {step} follows step {previous} in {log}; match the lines of one rank only"
            )
        steps.append(LoggedStep(step=step, loss=entry["loss"], grad_norm=entry.get("grad_norm")))
    last_step = steps[-1].step if steps else 0
    starts_at_0 = bool(steps) and steps[0].step == 0
    return TrainerState(global_step=last_step + starts_at_0, max_steps=max_steps or 0, steps=tuple(steps))


def loss_observations(state: TrainerState, expected_steps: int, subject: str) -> Iterator[Observation]:
    """Steps and losses of a training.

    Without a summary there is no metric train_runtime; with fewer than three finite losses there are no metrics
    loss_first_third, loss_last_third and loss_drop.
    """
    losses = [(step.step, step.loss) for step in state.steps if step.finite]
    if losses:
        x, y = zip(*losses, strict=True)
        yield Series(name="loss", subject=subject, x=x, y=y, x_unit="step", y_unit="nats")
    yield _metric("steps_logged", len(state.steps), subject)
    yield _metric("steps_missing", max(0, expected_steps - state.global_step), subject)
    yield _metric("nonfinite_steps", sum(not step.finite for step in state.steps), subject)
    if state.summary:
        yield _metric("train_runtime", state.summary.train_runtime, subject)
    if state.first_last_third_loss:
        first_third, last_third = state.first_last_third_loss
        yield _metric("loss_first_third", first_third, subject)
        yield _metric("loss_last_third", last_third, subject)
        yield _metric("loss_drop", first_third - last_third, subject)


def _metric(name: str, value: float, subject: str) -> Metric:
    return Metric(name=name, value=value, unit=METRICS[name], subject=subject)


METRICS = {**RUN_METRICS, **SPEEDS, "artifacts_missing": "count"}
_SEE_LOG = "Read command.log (artifact) and run the command of the fact `command` manually"
_LOSS = {"loss_configured": "yes"}

CHECK = Check(
    name="train.command",
    title="Training command of the site",
    phase=Phase.SINGLE_GPU,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=(
        Rule(
            metric="exit_code",
            evidence_facts=("exit_reason", "log_tail"),
            expect="== 0",
            meaning="The command failed.",
            fix=_SEE_LOG,
        ),
        Rule(
            metric="steps_missing",
            applies_if={"steps_configured": "yes"},
            expect="== 0",
            meaning="The training ran fewer steps than configured.",
            fix=_SEE_LOG,
        ),
        Rule(
            metric="nonfinite_steps",
            applies_if=_LOSS,
            expect="== 0",
            meaning="The loss or gradient norm is infinite or NaN: the training diverged, or a GPU computes wrongly.",
            fix="Lower the learning rate of the command. If train.cnn or train.ddp fail too: `nvidia-smi -q -d ECC`.",
        ),
        Rule(
            metric="loss_drop",
            applies_if=_LOSS,
            expect="> 0 nats",
            meaning="The median loss of the last third of the steps is not below that of the first third.",
            fix="Check the loss curve. Run more steps, or compare with a machine that is known to be good",
        ),
        Rule(
            metric="artifacts_missing",
            applies_if={"artifacts_configured": "yes"},
            evidence_facts=("artifacts_not_found",),
            expect="== 0",
            meaning="The command succeeded without writing the configured files.",
            fix=f"{_SEE_LOG}; check free space and permissions of the run directory: df -h; ls -ld",
        ),
    ),
    rule_facts={
        "steps_configured": RuleFact(
            reason="no number of steps configured: set option steps and option log, or the option trainer_state"
        ),
        "loss_configured": RuleFact(
            reason="no loss configured: set the option log (group loss) or the option trainer_state"
        ),
        "artifacts_configured": RuleFact(reason="the option artifacts is not set"),
    },
    measure=measure,
    limit_s=2100,  # above the default of train_limit_s, whose message names the command
    options=CommandOptions,
    skip_if=(SkipIf.NO_COMMAND,),
    performance_metrics=("wall_seconds", "train_runtime", *SPEEDS),
)
