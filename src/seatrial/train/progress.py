"""Progress of a training run: steps.jsonl, TensorBoard curves, progress lines, and durations of startup phases."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from seatrial.model import SeatrialError, UsageError
from seatrial.train import restarts
from seatrial.train.parallel import World
from seatrial.train.script_flags import write_run_args
from seatrial.train.step_speed import STEPS_FILE
from seatrial.train.train_config import TrainConfig
from seatrial.util import journal
from seatrial.util.files import write_json

LOCK_TIMEOUT_S = 120.0  # how long a restarted job waits for the lock of steps.jsonl, which its earlier start held
TERMINAL_INTERVAL_S = 1.0  # seconds between updates of the progress line on a terminal


@dataclass(frozen=True)
class Step:
    """One step of all ranks; times are those of this rank. None: the stack does not measure this value.

    ``loss``: nats per trained token. ``tokens``: all positions, including padding. ``trained_tokens``: positions with a
    loss. ``compute_s``: compute time of this rank without waits for other ranks, see rank_times.py. ``data_wait_s``:
    seconds for which the device waited for the batch.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float | None
    epoch: float | None
    tokens: int
    trained_tokens: int | None
    seconds: float
    compute_s: float | None = None
    data_wait_s: float | None = None

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm or 0.0)


class StartupPhases:
    """Seconds by phase, from the start of the process to the end of the first step.

    ``first_phase`` began at ``started`` (Unix time) and ends when this object is created.
    """

    def __init__(self, started: float, first_phase: str) -> None:
        self._started = self._last_end = started
        self._end_by_phase: dict[str, float] = {}  # Unix times
        self.seconds: dict[str, float] = {}
        self.end_phase(first_phase)

    def end_phase(self, phase: str) -> None:
        """Records that ``phase`` ends now."""
        end = time.time()
        self.seconds[phase] = end - self._last_end
        self._end_by_phase[phase] = self._last_end = end

    def end_first_step(self) -> None:
        """Records the end of the first step, compilation included; later calls have no effect."""
        if "first_step" not in self.seconds:
            self.end_phase("first_step")
            self.seconds["time_to_first_step"] = self._last_end - self._started

    def since(self, phase: str) -> float:
        """Seconds since ``phase`` ended."""
        return time.time() - self._end_by_phase[phase]


class StepLog:
    """Writes each step to ``out``/steps.jsonl, TensorBoard and stderr, on rank 0; does nothing on other ranks.

    A resumed run keeps the lines of its ``completed_steps`` and removes later ones. Raises UsageError if another run
    has created the file since ``create_run_folder``, or is still writing it.
    """

    def __init__(self, settings: TrainConfig, world: World, out: Path, completed_steps: int) -> None:
        self._settings, self._world = settings, world
        resumed = settings.checkpoint.resume
        self._file = _open_steps_file(out / STEPS_FILE, completed_steps, resumed) if world.is_rank_0 else None
        # With stack hf the Trainer of transformers writes these curves
        self._tensorboard: Any = None
        if world.is_rank_0 and settings.tensorboard and settings.stack == "native":
            from torch.utils.tensorboard import SummaryWriter  # slow to import; requires the package tensorboard

            writer: Any = SummaryWriter  # untyped; a resumed run discards events after its completed_steps
            purge_step = completed_steps + 1 if completed_steps else None
            self._tensorboard = writer(str(out / "tensorboard"), purge_step=purge_step)
        self._is_terminal = sys.stderr.isatty()
        self._interval_s = min(TERMINAL_INTERVAL_S, settings.log_every_s) if self._is_terminal else settings.log_every_s
        self._last_print = time.monotonic()
        self._first_record: Step | None = None  # of this process, which may have resumed a run
        self._first_record_time = 0.0  # time.monotonic() at the end of this step

    def write(self, record: Step) -> Step:
        """Writes ``record`` and returns it."""
        if self._file is not None:
            self._file.write(json.dumps(asdict(record)) + "\n")
            self._print_progress(record)
        if self._tensorboard is not None:
            curves = {name: getattr(record, name) for name in ("loss", "grad_norm", "learning_rate", "epoch")}
            curves["tokens_per_second_per_gpu"] = record.tokens / record.seconds / self._world.size
            for name, value in curves.items():
                self._tensorboard.add_scalar(f"train/{name}", value, record.step)
        return record

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _print_progress(self, record: Step) -> None:
        now = time.monotonic()
        if self._first_record is None:
            self._first_record, self._first_record_time = record, now
        is_last = record.step == self._settings.max_steps
        if now - self._last_print < self._interval_s and not is_last:
            return
        self._last_print = now
        # The slow first step of this process counts only if it is the only one
        steps_after_first = record.step - self._first_record.step
        step_s = (now - self._first_record_time) / steps_after_first if steps_after_first else record.seconds
        line = self._line(record, step_s * (self._settings.max_steps - record.step))
        if self._is_terminal:  # replace the previous line
            print(f"\r\033[K{line}", end="\n" if is_last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _line(self, record: Step, remaining_s: float) -> str:
        parts = [f"step {record.step}/{self._settings.max_steps}", f"loss {record.loss:.4f}"]
        if record.grad_norm is not None:
            parts.append(f"grad norm {record.grad_norm:.3f}")
        if record.learning_rate is not None:
            parts.append(f"lr {record.learning_rate:.2e}")
        parts.append(f"{record.tokens / record.seconds / self._world.size:,.0f} tok/s/GPU")
        if record.data_wait_s is not None:
            parts.append(f"data {record.data_wait_s / record.seconds:.1%}")
        parts.append(f"{remaining_s:.0f} s left")
        return "  ".join(parts)


def create_run_folder(settings: TrainConfig, out: Path) -> Path:
    """Creates and returns the run folder ``out`` with the resolved config in config.json and run_args.json; on rank 0.

    Raises UsageError if ``out`` contains a run and checkpoint.resume is false, if a run is writing to ``out``, or if
    ``out`` is not writable.
    """
    if not settings.checkpoint.resume and (out / STEPS_FILE).exists():
        raise _existing_run_error(out)
    try:
        if (out / STEPS_FILE).exists():  # do not overwrite the config of a run that is still writing
            with (out / STEPS_FILE).open("a", encoding="utf-8") as steps:
                _lock(steps, out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", settings.model_dump(mode="json"))
        write_run_args(settings, out)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; set --out to another directory") from error
    return out


def require_steps_left(settings: TrainConfig, out: Path, completed_steps: int) -> None:
    """Raises SeatrialError if a run in ``out`` that is resumed after ``completed_steps`` has no step left."""
    if completed_steps >= settings.max_steps:
        raise SeatrialError(f"nothing to resume: {out} has {completed_steps} steps, max_steps is {settings.max_steps}")


def require_tensorboard(settings: TrainConfig) -> None:
    """Raises UsageError if ``tensorboard`` is true and the package is not installed."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("tensorboard: true requires the package tensorboard: pip install tensorboard")


def _existing_run_error(out: Path) -> UsageError:
    if restarts.restart_count():
        return UsageError(
            f"Slurm restarted this job, and {out} contains the run of its first start: to resume it, submit the job "
            "with --set checkpoint.requeue=true --set checkpoint.every=STEPS"
        )
    return UsageError(f"{out} contains a run: set another --out, or resume it with --set checkpoint.resume=true")


def _lock(file: TextIO, out: Path) -> None:
    """Locks ``file``. Raises UsageError if another run holds the lock; a restarted job first waits for the lock."""
    # a filesystem keeps the lock of a lost node for a while, 90 s by default with NFSv4
    deadline = time.monotonic() + (LOCK_TIMEOUT_S if restarts.restart_count() else 0)
    while not (locked := journal.lock(file.fileno(), out)) and time.monotonic() < deadline:
        time.sleep(1)
    if not locked:
        file.close()
        raise UsageError(f"another training run is writing to {out}: stop it or wait until it ends")


def _open_steps_file(path: Path, completed_steps: int, resumed: bool) -> TextIO:
    """The open steps file, locked until it is closed; a resumed run keeps the first ``completed_steps`` lines."""
    try:  # of two runs started at the same time, one creates the file; the other fails before it saves anything
        file = path.open("a+" if resumed else "x", buffering=1, encoding="utf-8")
    except FileExistsError as error:
        raise _existing_run_error(path.parent) from error
    _lock(file, path.parent)
    if resumed:
        file.seek(0)
        kept = file.read().splitlines()[:completed_steps]
        file.truncate(0)
        file.writelines(f"{line}\n" for line in kept)
    return file
