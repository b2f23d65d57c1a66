"""Short trainings of tiny models with the Hugging Face stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from seatrial.train import hf, train_config
from seatrial.train.train_config import TrainConfig
from tests.paths import CONFIGS


def config(name: str, *overrides: str) -> TrainConfig:
    """The config ``name`` in configs/tiny."""
    return train_config.load(CONFIGS / "tiny" / f"{name}.yaml", overrides)


def train(settings: TrainConfig, out: Path) -> dict[str, Any]:
    return hf.train(settings, out)


def steps(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
