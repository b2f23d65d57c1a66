"""A program that stands for seatrial copies a shipped record, with another duration and rate; one test runs it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.container_against_bare import figures, main, summary
from tools.records import record_path

from seatrial.pipeline.run_directory import load_trial

RECORD = record_path("2026-11-27-2xh100/quick")
FAKE = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = --out ] && out=$2; shift; done
mkdir "$out" && cp "$0.trial.json" "$out/trial.json"
"""
# seatrial, of which only the checks of the figures run
REAL = """#!/bin/sh
exec PYTHON -m seatrial "$@" --only collectives.all_reduce --only train.cnn --only train.ddp
"""


def write_program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def seatrial(path: Path, seconds: float, rate: float) -> str:
    """A program whose first rank has ``rate`` images per second in train.cnn, and the second 50 more."""
    trial = load_trial(RECORD)
    measurements = [
        measurement.model_copy(
            update={
                "metrics": tuple(
                    replace(metric, value=rate + 50 * (measurement.rank or 0), samples=())
                    if metric.name == "images_per_second"
                    else metric
                    for metric in measurement.metrics
                )
            }
        )
        for measurement in trial.measurements
    ]
    changed = trial.model_copy(update={"seconds": seconds, "measurements": tuple(measurements)})
    Path(f"{path}.trial.json").write_text(changed.model_dump_json())
    return write_program(path, FAKE)


def test_pairs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, container = seatrial(tmp_path / "bare", 50, 100), seatrial(tmp_path / "container", 60, 90)
    folder = tmp_path / "pairs"
    folder.mkdir()
    assert main(["--bare", bare, "--container", container, "--folder", str(folder), "--pairs", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)["summary"]
    assert printed["trial_s"] == {"ratio": 1.2, "smallest_ratio": 1.2, "largest_ratio": 1.2, "bare_spread": 0.0}
    assert printed["cnn_images_per_s"]["ratio"] == 0.9
    assert printed["all_reduce_GB_per_s"]["ratio"] == 1.0


@pytest.mark.training
@pytest.mark.timeout(900)
def test_figures_of_a_real_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = write_program(tmp_path / "real", REAL.replace("PYTHON", sys.executable))
    copied = seatrial(tmp_path / "copied", 60, 90)
    assert main(["--bare", real, "--container", copied, "--folder", str(tmp_path), "--pairs", "1"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert all(value > 0 for value in pair["bare"].values())


def test_the_spread_is_reported() -> None:
    pairs = [
        {"bare": {"s": bare}, "container": {"s": inside}} for bare, inside in ((10.0, 12.0), (20.0, 20.0), (12.0, 11.0))
    ]
    assert summary(pairs) == {"s": {"ratio": 1.0, "smallest_ratio": 0.917, "largest_ratio": 1.2, "bare_spread": 0.833}}


def test_a_trial_without_a_figure_is_refused() -> None:
    trial = load_trial(RECORD)
    measured = tuple(measurement for measurement in trial.measurements if measurement.check == "train.cnn")
    with pytest.raises(ValueError, match="all_reduce_GB_per_s, ddp_tokens_per_s"):
        figures(trial.model_copy(update={"measurements": measured}))


def test_a_command_without_a_record_ends_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"left no .*trial\.json"):
        main(["--bare", "false", "--container", "false", "--folder", str(tmp_path)])
