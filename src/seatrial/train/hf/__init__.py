"""What users run: Hugging Face's Trainer, accelerate and peft, with DDP, FSDP2 or DeepSpeed's ZeRO-3."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.model import UsageError
from seatrial.train.hf import hub
from seatrial.util.gc_pause import gc_paused

if TYPE_CHECKING:
    from seatrial.train.train_config import TrainConfig


def train(config: TrainConfig, out: Path, started: float | None = None) -> dict[str, Any]:
    """Train as ``config`` says, alone or as one rank of torchrun's; what rank 0 writes to ``out``/metrics.json.

    Also there: steps.jsonl, final/ and, where wanted, tensorboard/. ``started`` is when the process began (Unix time),
    to say what the start cost. Raises SeatrialError.
    """
    started = started or time.time()
    hub.set_offline_mode(config)
    with _checked_imports():
        from seatrial.train import failure
        from seatrial.train.hf import run  # imports transformers, which reads the environment as it is now
        from seatrial.train.progress import StartupPhases
    with failure.propagate_failure():
        return run.train(config, out, StartupPhases(started, "imports"))


def evaluate(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Score function calling before and after the training in ``out``; what is in ``out``/evaluation.json.

    Raises SeatrialError.
    """
    hub.set_offline_mode(config)
    with _checked_imports():
        from seatrial.train.function_calling import evaluate as evaluation
    return evaluation.evaluate(config, out)


def prepare_external_trainer(config: TrainConfig, folder: Path) -> dict[str, int]:
    """Write the rows and the model that another trainer starts from: see foreign.prepare. Raises SeatrialError."""
    hub.set_offline_mode(config)
    with _checked_imports():
        from seatrial.train.hf import external_trainer
    return external_trainer.write_inputs(config, folder)


def generate_text(folder: Path) -> str:
    """Load a model of another trainer, and let it answer: see seatrial.train.hf.external_trainer. Raises SeatrialError."""
    with _checked_imports():
        from seatrial.train.hf import external_trainer
    return external_trainer.generate_text(folder)


@contextmanager
def _checked_imports() -> Iterator[None]:
    try:
        with gc_paused(), _as_if_missing("sklearn", "scipy"):
            yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"stack hf needs {error.name}, which is not installed: pip install '.[hf]' in a clone of seatrial"
        ) from error


@contextmanager
def _as_if_missing(*packages: str) -> Iterator[None]:
    """Within, those that are not imported yet count as not installed.

    transformers imports scikit-learn and SciPy where it finds them, for a way of generating and a loss of pictures that
    are not ours: a quarter of the time that a rank took to start.
    """
    hidden: dict[str, Any] = dict.fromkeys(name for name in packages if name not in sys.modules)
    sys.modules |= hidden
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
