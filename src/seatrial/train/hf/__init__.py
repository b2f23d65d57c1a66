"""Stack hf: Hugging Face's Trainer, accelerate and peft, with DDP, FSDP2 or DeepSpeed's ZeRO-3."""

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
    from seatrial.train.data_cache import Prepared
    from seatrial.train.train_config import TrainConfig


def train(config: TrainConfig, out: Path, started: float | None = None) -> dict[str, Any]:
    """Train in this process or as one rank of torchrun; return the metrics that rank 0 writes to ``out``/metrics.json.

    Also writes steps.jsonl, final/ and, if configured, tensorboard/. ``started``: start of the process (Unix time), for
    the duration of startup. Raises SeatrialError.
    """
    started = started or time.time()
    with _checked_imports(config):
        from seatrial.train import failure
        from seatrial.train.hf import run  # imports transformers, which reads the environment now
        from seatrial.train.progress import StartupPhases
    with failure.propagate_failure():
        return run.train(config, out, StartupPhases(started, "imports"))


def evaluate(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Score function calling before and after the training in ``out``; return the content of ``out``/evaluation.json.

    Raises SeatrialError.
    """
    with _checked_imports(config):
        from seatrial.train.function_calling import evaluate as evaluation
    return evaluation.evaluate(config, out)


def preprocess(config: TrainConfig, cache: Path) -> Prepared:
    """The prepared data of ``config`` in ``cache``, written if missing: see blocks.prepare. Raises SeatrialError."""
    if hub.needs_hub(config):
        hub.require_writable_cache()
    with _checked_imports(config):
        from seatrial.train.hf import blocks
    prepared = blocks.prepare(config, cache)
    blocks.print_rejected(blocks.report(prepared.folder))
    return prepared


def prepare_external_trainer(config: TrainConfig, folder: Path) -> dict[str, int]:
    """Write rows and model for an external trainer: see external_trainer.write_inputs. Raises SeatrialError."""
    with _checked_imports(config):
        from seatrial.train.hf import external_trainer
    return external_trainer.write_inputs(config, folder)


def generate_text(folder: Path) -> str:
    """Generate text with the model in ``folder``, from a fixed prompt: see external_trainer.generate_text."""
    with _checked_imports():
        from seatrial.train.hf import external_trainer
    return external_trainer.generate_text(folder)


@contextmanager
def _checked_imports(config: TrainConfig | None = None) -> Iterator[None]:
    """Context manager for imports: pauses the garbage collector. Raises UsageError if a package is missing.

    ``config``: decides whether the libraries, which read the environment at their import, may use the Hub.
    """
    if config is not None:
        hub.set_offline_mode(config)
    try:
        with gc_paused(), _hidden_packages("sklearn", "scipy"):
            yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"stack hf needs {error.name}, which is not installed: pip install '.[hf]' in a clone of seatrial"
        ) from error


@contextmanager
def _hidden_packages(*packages: str) -> Iterator[None]:
    """Context manager: other packages treat ``packages`` that are not yet imported as not installed.

    transformers imports scikit-learn and SciPy if they are installed, for features that seatrial does not use. These
    imports took a quarter of the startup time of a rank.
    """
    hidden: dict[str, Any] = dict.fromkeys(name for name in packages if name not in sys.modules)  # None: import fails
    sys.modules |= hidden
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
