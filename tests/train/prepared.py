"""Rows, and configs that read them, for tests of prepared data."""

from __future__ import annotations

import json
from pathlib import Path

from seatrial.train import data, train_config
from seatrial.train.train_config import TrainConfig


def write_rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number} of this file"}) + "\n" for number in range(50)))
    return path


def settings(rows: Path, *overrides: str) -> TrainConfig:
    return train_config.load("tiny/throughput", ["model.name=qwen2-tiny", f"data.path={rows}", *overrides])


def prepare(config: TrainConfig, folder: Path) -> data.Blocks:
    return data.prepare(config, folder)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
