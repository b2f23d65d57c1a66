"""What users run: Hugging Face's Trainer, accelerate and peft, with DDP, FSDP2 or DeepSpeed's ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.model import UsageError
from seatrial.train.hf import hub

if TYPE_CHECKING:
    from seatrial.train.settings import TrainConfig


def train(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Train as ``config`` says, alone or as one rank of torchrun's; what rank 0 writes to ``out``/metrics.json.

    Also there: steps.jsonl, final/ and, where wanted, tensorboard/. Raises SeatrialError.
    """
    hub.settle(config)
    with _installed():
        from seatrial.train import failure
        from seatrial.train.hf import run  # imports transformers, which reads the environment as it is now
    with failure.shared():
        return run.train(config, out)


def evaluate(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Score function calling before and after the training in ``out``; what is in ``out``/evaluation.json.

    Raises SeatrialError.
    """
    hub.settle(config)
    with _installed():
        from seatrial.train.toolcalls import evaluate as evaluation
    return evaluation.evaluate(config, out)


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"stack hf needs {error.name}, which is not installed: pip install 'seatrial[hf]'") from error
