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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from seatrial.checks.check import Check, Context, Options, SkipIf
from seatrial.checks.declare import Answers, absent, fact, forbidden, metric, unreadable, value
from seatrial.checks.training import _results
from seatrial.discover import gpu
from seatrial.discover.nvml import Gpu, MemoryGrowth, nvml_session
from seatrial.model import NotApplicable, Phase, Scope, SeatrialError
from seatrial.train import trainer_state
from seatrial.train.trainer_state import LoggedStep, TrainerState
from seatrial.util import processes
from seatrial.util.failures import exit_reason
from seatrial.util.secrets import redacted, secret_values

SPEEDS = ("tokens_per_second", "samples_per_second", "step_seconds")
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
_RESULTS = ("steps_missing", "nonfinite_steps", "loss_drop", "artifacts_missing")  # metrics of a command that succeeds
_GPU_MEMORY = "gpu_memory_growth"


class CommandOptions(Options):
    """Options of train.command."""

    command: tuple[str, ...] = Field(
        default=(), description="argv, or one string that is split like a shell command line; it runs without a shell"
    )
    per: Literal["node", "gpu"] = Field(default="node", description="one run per node, or one run per GPU concurrently")
    uses_gpu: bool = Field(default=True, description="on a node with GPUs, the command must use one")
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
    """One execution of a command. ``name`` is for messages; ``log`` receives stdout and stderr; ``folder`` exists.

    ``gpus``: the GPUs of which the command must use one.
    """

    name: str
    subject: str
    gpus: Sequence[Gpu]
    argv: tuple[str, ...]
    folder: Path
    log: Path
    env: Mapping[str, str]


@dataclass(frozen=True)
class RunResult:
    """Result of a run; ``exit_code``: None after a stop at the time limit; ``log_tail``: without secrets.

    ``gpu_memory``: the growth of the memory in use on the GPUs of the node during all runs; None without GPUs.
    """

    exit_code: int | None
    seconds: float
    log_text: str
    log_tail: str
    gpu_memory: MemoryGrowth | None


def measure(context: Context, options: CommandOptions) -> Answers:
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
    yield fact("device", "cuda" if gpus else "cpu")
    yield fact("command", {run.subject: shlex.join(run.argv) for run in runs})
    not_configured = _not_configured(options)
    for name, reason in not_configured.items():
        yield absent(name, reason)
    results = run_all(runs, options.train_limit_s, context)
    for run, result in results:
        yield context.artifact(run.log, f"log of the command on {run.subject}")
        yield from metrics_of_process(run, result, options.train_limit_s)
    for run, result in results:
        if result.exit_code:
            configured = (name for name in _RESULTS if name not in not_configured)
            yield unreadable(configured, "the command failed", run.subject)
            continue
        if options.artifacts:
            missing = _missing_artifacts(run.folder, options.artifacts)
            yield value("artifacts_missing", len(missing), run.subject, evidence=missing)
        yield from _losses_and_speeds(run, result, options)


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
    used = run_gpus if options.uses_gpu else ()
    return Run(name=Path(argv[0]).name, subject=subject, gpus=used, argv=argv, folder=folder, log=log, env=env)


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


def _not_configured(options: CommandOptions) -> dict[str, str]:
    """Metric → why it does not apply with these options."""
    reasons: dict[str, str] = {}
    if options.loss_source == "none":
        no_loss = "no loss configured: set the option log (group loss) or the option trainer_state"
        reasons = {"nonfinite_steps": no_loss, "loss_drop": no_loss}
    if not (options.trainer_state or (options.steps and options.loss_source == "log")):
        reasons["steps_missing"] = (
            "no number of steps configured: set option steps and option log, or the option trainer_state"
        )
    if not options.artifacts:
        reasons["artifacts_missing"] = "the option artifacts is not set"
    return reasons


def run_all(runs: Sequence[Run], limit_s: float, context: Context) -> list[tuple[Run, RunResult]]:
    """Start all ``runs`` concurrently, wait at most ``limit_s`` seconds, and stop the remaining processes.

    Returns each run with its result.
    """
    unset = [name for name in os.environ if name in _UNSET or name.startswith("TORCHELASTIC_")]
    children: list[processes.Child] = []
    seconds_by_number: dict[int, float] = {}  # index in ``runs`` → duration, of the runs that have ended
    gpus = {each.index for run in runs for each in run.gpus}
    with ExitStack() as stack:
        memory = MemoryGrowth(stack.enter_context(nvml_session()), gpus) if gpus else None
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
                if memory:
                    memory.read()
                time.sleep(_POLL_S)
        finally:
            for child in children:
                processes.stop(child)
    return [
        (run, _run_result(run, child, seconds_by_number.get(number), limit_s, memory))
        for number, (run, child) in enumerate(zip(runs, children, strict=True))
    ]


def _run_result(
    run: Run, child: processes.Child, seconds: float | None, limit_s: float, memory: MemoryGrowth | None
) -> RunResult:
    text = run.log.read_text(encoding="utf-8", errors="replace")
    end = text.strip()[-_REDACTED_CHARS:]
    # redacted before the cut: half a secret has neither its value nor its form
    tail = redacted(end, secret_values({"env": run.env, "options": run.argv}))[-_TAIL_CHARS:]
    exit_code = None if seconds is None else child.poll()
    return RunResult(exit_code, limit_s if seconds is None else seconds, text, tail, memory)


def metrics_of_process(run: Run, result: RunResult, limit_s: float) -> Answers:
    """Exit code, duration, and after a success the growth of GPU memory.

    Raises SeatrialError after the time limit or on a full disk.
    """
    from seatrial.train import disk

    if result.exit_code is None:
        raise SeatrialError(
            f"{run.subject}: {run.name} did not end within {limit_s:g} s; end of its log: {result.log_tail}"
        )
    if result.exit_code and disk.is_disk_full_message(result.log_tail):
        usage = f"{disk.filesystem_usage(run.folder)}. {disk.REMEDY}"
        raise SeatrialError(f"{run.subject}: {run.name}: disk full. {usage}; end of its log: {result.log_tail}")
    exit_code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code  # as in a shell
    evidence = {"exit_reason": exit_reason(result.exit_code), "log_tail": result.log_tail}
    yield value("exit_code", exit_code, run.subject, evidence=evidence)
    yield value("wall_seconds", result.seconds, run.subject)
    if not result.gpu_memory:
        yield absent(_GPU_MEMORY, "the run needs no GPU", run.subject)
    elif result.exit_code:
        yield unreadable(_GPU_MEMORY, f"{run.name} failed", run.subject)
    elif growth := [result.gpu_memory.bytes[gpu.index] for gpu in run.gpus if gpu.index in result.gpu_memory.bytes]:
        yield value(_GPU_MEMORY, max(growth) / 1e9, run.subject)
    else:
        reader = result.gpu_memory.reader
        no_value = forbidden if reader.unavailable else unreadable
        yield no_value(_GPU_MEMORY, "; ".join(reader.unreadable.values()), run.subject)


def _missing_artifacts(folder: Path, patterns: Sequence[str]) -> list[JsonValue]:
    """The globs that match neither a folder nor a non-empty file."""
    return [
        pattern
        for pattern in patterns
        if not any(path.is_dir() or path.stat().st_size for path in folder.glob(pattern))
    ]


def _losses_and_speeds(run: Run, result: RunResult, options: CommandOptions) -> Answers:
    """Losses and speeds from the log and trainer_state.json."""
    entries = log_entries(result.log_text, options.log, run.log) if options.log else []
    if options.loss_source == "log":
        yield from steps_and_losses(_state_from_log(entries, options.steps, run.log), options.steps, run.subject)
    if options.trainer_state:
        state = trainer_state.read(run.folder / options.trainer_state)
        yield from steps_and_losses(state, options.steps or state.max_steps, run.subject)
        if state.summary and state.summary.train_samples_per_second is not None:
            yield value("samples_per_second", state.summary.train_samples_per_second, run.subject)
    for name in SPEEDS:
        if samples := tuple(entry[name] for entry in entries if name in entry):
            yield value(name, samples, run.subject)


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


def steps_and_losses(state: TrainerState, expected_steps: int | None, subject: str) -> Answers:
    """Steps and losses of a training. Without a summary there is no metric train_runtime."""
    losses = [(step.step, step.loss) for step in state.steps if step.finite]
    yield from _results.loss_curve(losses, subject)
    if expected_steps is not None:
        yield value("steps_missing", max(0, expected_steps - state.global_step), subject)
    yield value("nonfinite_steps", sum(not step.finite for step in state.steps), subject)
    if state.summary:
        yield value("train_runtime", state.summary.train_runtime, subject)
    if state.first_last_third_loss:
        first_third, last_third = state.first_last_third_loss
        yield value("loss_first_third", first_third, subject)
        yield value("loss_last_third", last_third, subject)
        yield value("loss_drop", first_third - last_third, subject)
    else:
        yield unreadable("loss_drop", f"{len(losses)} steps with a finite loss; 3 are needed", subject)


# Metrics that each training has, beside those of its steps
COMMON = (
    metric(
        _GPU_MEMORY,
        "> 0.1 GB",  # a CUDA context without any tensor took 0.55 GB on an H200 (docs/results/2026-11-29-1xh200-oumi)
        "The memory in use on the GPUs did not grow while the command ran: it computed on the CPU.",
        "In the environment of the command: `python -c 'import torch; torch.zeros(1).cuda()'`",
    ),
    metric("wall_seconds", unit="s", meaning="duration from the start of the processes to their end", speed=True),
    metric("train_runtime", unit="s", meaning="duration of all training steps", speed=True),
    metric("loss_first_third", unit="nats", meaning="median loss of the first third of the steps"),
    metric("loss_last_third", unit="nats", meaning="median loss of the last third of the steps"),
)
_SEE_LOG = "Read command.log (artifact) and run the command of the fact `command` manually"

CHECK = Check(
    measure=measure,
    name="train.command",
    title="Training command of the site",
    phase=Phase.SINGLE_GPU,
    scope=Scope.NODE,
    limit_s=2100,  # above the default of train_limit_s, whose message names the command
    options=CommandOptions,
    skip_if=(SkipIf.NO_COMMAND,),
    declared=(
        metric("exit_code", "== 0 code", "The command failed (128 + N: signal N).", _SEE_LOG, log_evidence=True),
        metric("steps_missing", "== 0 count", "The training ran fewer steps than configured.", _SEE_LOG),
        metric(
            "nonfinite_steps",
            "== 0 count",
            "The loss or gradient norm is infinite or NaN: the training diverged, or a GPU computes wrongly.",
            "Lower the learning rate of the command. If train.cnn or train.ddp fail too: `nvidia-smi -q -d ECC`.",
        ),
        metric(
            "loss_drop",
            "> 0 nats",
            "The median loss of the last third of the steps is not below that of the first third.",
            "Check the loss curve. Run more steps, or compare with a machine that is known to be good",
        ),
        metric(
            "artifacts_missing",
            "== 0 count",
            "The command succeeded without writing the configured files.",
            f"{_SEE_LOG}; check free space and permissions of the run directory: df -h; ls -ld",
        ),
        *COMMON,
        metric("tokens_per_second", unit="tokens/s", meaning="tokens per second that the log reports", speed=True),
        metric("samples_per_second", unit="samples/s", meaning="samples per second of the whole run", speed=True),
        metric("step_seconds", unit="s", meaning="median duration of a step that the log reports", speed=True),
    ),
)
