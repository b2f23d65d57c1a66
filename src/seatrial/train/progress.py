"""How a training run goes on: a JSON line a step, curves, a line for a person now and then; what the start cost."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from seatrial.model import UsageError
from seatrial.train.parallel import World
from seatrial.train.train_config import TrainConfig
from seatrial.util import journal
from seatrial.util.files import write_json

STEPS_FILE = "steps.jsonl"
LIVE_S = 1.0  # on a terminal the line is renewed so often: a person looks at it


@dataclass(frozen=True)
class Step:
    """One step, of all ranks together but for the times, which are this rank's. None is what the stack does not know.

    ``loss`` in nats a trained token. ``tokens`` are the positions of all sequences, padding among them;
    ``trained_tokens`` those that the loss is taken of.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float | None
    epoch: float | None
    tokens: int
    trained_tokens: int | None
    seconds: float
    forward_s: float | None = None
    data_wait_s: float | None = None

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm or 0.0)


class StartupPhases:
    """Where the time went before the first step was done: seconds by phase, from the start of the process."""

    def __init__(self, started: float, phase: str) -> None:
        self._started = self._last = started
        self._ends: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.end_phase(phase)

    def end_phase(self, phase: str) -> None:
        """``phase`` has just ended."""
        self._ends[phase] = time.time()
        self.seconds[phase] = self._ends[phase] - self._last
        self._last = self._ends[phase]

    def end_first_step(self) -> None:
        """A step has been seen to be done; only the first counts, and holds what had to be compiled for it."""
        if "first_step" not in self.seconds:
            self.end_phase("first_step")
            self.seconds["time_to_first_step"] = self._last - self._started

    def since(self, phase: str) -> float:
        """Seconds since ``phase`` ended."""
        return time.time() - self._ends[phase]


class StepLog:
    """Steps as they become known: on the first rank each is a line of ``out``/steps.jsonl.

    Lines of the ``done`` steps of a run that is resumed stay; what came after them is overwritten. Raises UsageError
    where a run that is not resumed finds some: another has begun there since ``claim``; or where one still writes.
    """

    def __init__(self, settings: TrainConfig, world: World, out: Path, done: int) -> None:
        self._settings, self._world = settings, world
        self._file = _lines(out / STEPS_FILE, done, settings.checkpoint.resume) if world.is_rank0 else None
        # of stack hf the Trainer writes its own, under the same names
        ours = world.is_rank0 and settings.tensorboard and settings.stack == "native"
        self._board: Any = _board(out, done) if ours else None
        self._live = sys.stderr.isatty()
        self._every = min(LIVE_S, settings.log_every_s) if self._live else settings.log_every_s
        self._said = time.monotonic()
        self._first: tuple[int, float] | None = None

    def write(self, record: Step) -> Step:
        if self._file is not None:
            self._file.write(json.dumps(asdict(record)) + "\n")
            self._tell(record)
        if self._board is not None:
            self._draw(record)
        return record

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _draw(self, record: Step) -> None:
        curves = {name: getattr(record, name) for name in ("loss", "grad_norm", "learning_rate", "epoch")}
        curves["tokens_per_second_per_gpu"] = record.tokens / record.seconds / self._world.size
        for name, value in curves.items():
            self._board.add_scalar(f"train/{name}", value, record.step)

    def _tell(self, record: Step) -> None:
        now = time.monotonic()
        self._first = self._first or (record.step, now)
        last = record.step == self._settings.max_steps
        if now - self._said < self._every and not last:
            return
        self._said = now
        start, end = ("\r\033[K", "\n" if last else "") if self._live else ("", "\n")
        print(start + self._line(record, self._left(record, now)), end=end, file=sys.stderr, flush=True)

    def _left(self, record: Step, now: float) -> float:
        """Seconds, at the pace since the first step: that one alone is slow."""
        first, then = self._first or (record.step, now)
        pace = (now - then) / (record.step - first) if record.step > first else record.seconds
        return pace * (self._settings.max_steps - record.step)

    def _line(self, record: Step, left: float) -> str:
        said = [f"step {record.step}/{self._settings.max_steps}", f"loss {record.loss:.4f}"]
        said += [] if record.grad_norm is None else [f"grad norm {record.grad_norm:.3f}"]
        said += [] if record.learning_rate is None else [f"lr {record.learning_rate:.2e}"]
        said.append(f"{record.tokens / record.seconds / self._world.size:,.0f} tok/s/GPU")
        said += [] if record.data_wait_s is None else [f"data {record.data_wait_s / record.seconds:.1%}"]
        return "  ".join([*said, f"{left:.0f} s left"])


def create_run_folder(settings: TrainConfig, out: Path) -> None:
    """Make ``out`` the folder of this run, with the resolved config in it; the first rank's.

    Raises UsageError where it holds another run, one is at work in it, or it cannot be written to.
    """
    if not settings.checkpoint.resume and (out / STEPS_FILE).exists():
        raise _holds_a_run(out)
    try:
        if (out / STEPS_FILE).exists():  # of a run that goes on at this moment the config stays what it is
            with (out / STEPS_FILE).open("a", encoding="utf-8") as steps:
                _have_alone(steps, out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", settings.model_dump(mode="json"))
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; name another folder with --out") from error


def require_tensorboard(settings: TrainConfig) -> None:
    """Raises UsageError where logs for TensorBoard are wanted, and it is not installed: before anything is trained."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("tensorboard: true needs tensorboard, which is not installed: pip install tensorboard")


def _board(out: Path, done: int) -> Any:
    """Curves of a run that is resumed go on behind its ``done`` steps."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and not part of torch

    writer: Any = SummaryWriter
    return writer(str(out / "tensorboard"), purge_step=done + 1 if done else None)


def _holds_a_run(out: Path) -> UsageError:
    return UsageError(f"{out} holds a run: name another --out, or go on with --set checkpoint.resume=true")


def _have_alone(file: TextIO, out: Path) -> None:
    if not journal.lock(file.fileno(), out):
        file.close()
        raise UsageError(f"another training is at work in {out}: end it first, or wait until it is done")


def _lines(path: Path, done: int, resumed: bool) -> TextIO:
    """The file that steps are written to, which is ours alone until this process ends."""
    try:  # of two that were started at once, one alone makes the file; the other has saved nothing by then
        file = path.open("a+" if resumed else "x", buffering=1, encoding="utf-8")
    except FileExistsError as error:
        raise _holds_a_run(path.parent) from error
    _have_alone(file, path.parent)
    if resumed:
        file.seek(0)
        kept = file.read().splitlines()[:done]
        file.truncate(0)
        file.writelines(f"{line}\n" for line in kept)
    return file
