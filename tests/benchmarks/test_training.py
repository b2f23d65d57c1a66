"""benchmarks/training.py: the plan is valid, and the table and ratios are correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import training
from seatrial.train import train_config
from tests.paths import BENCHMARKS

PLAN = BENCHMARKS / "training.yaml"


def planned(only: str = "", *variants: str, gpus: tuple[int, ...] = ()) -> list[training.Run]:
    return list(training.planned_runs(PLAN, only, variants, gpus))


def metrics_of(stack: str, speed: float) -> dict[str, Any]:
    phases = {"time_to_first_step": 12.34}
    numbers = {"mfu_percent": None, "step_p50_s": 0.25, "step_p99_s": 0.3, "memory_peak_gib": None, "compile_s": 0.0}
    return {"stack": stack, "tokens_per_second_per_gpu": speed, "phases_s": phases, **numbers}


def test_each_variant_is_a_valid_config() -> None:
    for run in planned():
        train_config.load(run.config, [f"{key}={str(value).lower()}" for key, value in run.settings.items()])


def test_ratio_of_the_stacks() -> None:
    native_run, hf_run = planned("LoRA r=8, seq 512", "base", "hf", gpus=(1,))
    assert (native_run.settings, hf_run.settings) == ({}, {"stack": "hf"})
    assert train_config.load(native_run.config).bsz == 8
    assert training.ratios([(native_run, metrics_of("native", 18000.0)), (hf_run, metrics_of("hf", 8000.0))]) == [
        "LoRA r=8, seq 512 on 1: native 18,000 against hf 8,000 tok/s/GPU, 2.25 times as fast"
    ]


def test_runs_with_different_settings_are_not_compared() -> None:
    (hf_run,) = planned("LoRA r=8, seq 512", "hf")
    (other_batch,) = planned("LoRA r=8, seq 512", "bsz 16")
    (other_gpus,) = planned("LoRA r=8, seq 512", "base", gpus=(4,))
    (native_run,) = planned("LoRA r=8, seq 512", "base")
    native, hf = metrics_of("native", 1.0), metrics_of("hf", 1.0)
    assert (
        training.ratios([(hf_run, hf), (other_batch, native), (other_gpus, native), (native_run, {"error": "x"})]) == []
    )


def test_the_table_has_one_cell_per_column() -> None:
    (run,) = planned("LoRA r=8, seq 512", "base")
    cells = ["LoRA r=8, seq 512", "base", "1", "18,000", "unknown", "0.2500", "0.3000", "–", "0.0", "12.3"]
    assert training.cells(run, metrics_of("native", 18000.0)) == cells
    assert len(training.cells(run, {"error": "out of memory"})) == len(cells) == len(training.COLUMNS)


@pytest.mark.training
def test_real_trainings_of_both_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(
        "- {name: tiny, config: configs/tiny/lora-mistral-7b-ddp.yaml, gpus: [1], "
        "variants: {base: {}, hf: {stack: hf}}}\n"
    )
    options = ["--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"), "--set", "max_steps=3"]
    monkeypatch.setattr("sys.argv", ["training.py", *options])
    assert training.main() == 0
    *_, native, hf, _, ratio = capsys.readouterr().out.splitlines()
    for row, variant in ((native, "base"), (hf, "hf")):
        cells = dict(zip(training.COLUMNS, (cell.strip() for cell in row.strip("| ").split("|")), strict=True))
        assert (cells["run"], cells["variant"], cells["MFU %"]) == ("tiny", variant, "unknown")
        assert float(cells["tok/s/GPU"].replace(",", "")) > 0
    assert ratio.startswith("tiny on 1: native ")
