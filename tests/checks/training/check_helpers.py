"""Helpers for tests of the training checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answer
from seatrial.checks.training._workload import TrainingResult
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Measurement, Outcome
from seatrial.train import loop, lora
from seatrial.train.decoder import Decoder
from seatrial.train.train_config import TrainConfig
from seatrial.worker import measure
from tests.train.ranks import run


def outcomes(check: Check, measurements: Iterable[Measurement]) -> dict[str, Outcome]:
    """Metric → outcome of its rule."""
    return {verdict.metric: verdict.outcome for verdict in judge_check(check, list(measurements), {}, "t")}


def measured(check: Check, answers: Iterable[Answer], **facts: str | int) -> Measurement:
    """The measurement of ``check`` if its ``measure`` yields ``answers`` and ``facts``."""
    given = [*answers, *(Fact(name=name, value=value) for name, value in facts.items())]
    measurement = measure(replace(check, measure=lambda context, options: iter(given)), make_context(Path()), {})
    assert measurement.error is None
    return measurement


def failed_metrics(check: Check, answers: Iterable[Answer]) -> set[str]:
    """The metrics with outcome FAIL if ``check`` yields ``answers`` of a completed training."""
    verdicts = outcomes(check, [measured(check, answers, trained="yes")])
    return {metric for metric, outcome in verdicts.items() if outcome is Outcome.FAIL}


def lora_training(config: TrainConfig, out: Path, frozen: bool) -> TrainingResult:
    """The result of a LoRA training on one rank; without ``frozen`` it trains the weights of the model, too."""
    (metrics,) = run(1, _train_lora, config, out, frozen)
    return TrainingResult(metrics, out, "", ranks=(0,))


def _train_lora(config: TrainConfig, out: Path, frozen: bool) -> dict[str, Any]:
    attach = lora.attach

    def attach_without_freezing(model: Decoder, *arguments: Any) -> None:
        attach(model, *arguments)
        model.requires_grad_(True)

    with patch.object(lora, "attach", attach if frozen else attach_without_freezing):
        return loop.train(config, out)


def make_context(out: Path, ranks: int = 2) -> Context:
    return Context(
        node="n0",
        rank=0,
        world_size=ranks,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=out,
        run_dir=out,
    )
