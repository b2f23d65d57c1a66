"""The plan of the training benchmark holds what can be run; its table says what was, and the ratio of both stacks."""

from __future__ import annotations

import runpy
from typing import Any

from seatrial.train import train_config
from tests.paths import BENCHMARKS

SCRIPT = BENCHMARKS / "training.py"
script = runpy.run_path(str(SCRIPT))


def planned(only: str = "", *levers: str, gpus: tuple[int, ...] = ()) -> list[Any]:
    return list(script["planned"](SCRIPT.with_suffix(".yaml"), only, levers, gpus))


def found(stack: str, speed: float) -> dict[str, Any]:
    phases = {"time_to_first_step": 12.34}
    numbers = {"mfu_percent": None, "step_p50_s": 0.25, "step_p99_s": 0.3, "memory_peak_gib": None, "compile_s": 0.0}
    return {"stack": stack, "tokens_per_second_per_gpu": speed, "phases_s": phases, **numbers}


def test_each_lever_is_a_setting() -> None:
    for run in planned():
        train_config.load(run.config, [f"{key}={str(value).lower()}" for key, value in run.settings.items()])


def test_one_command_runs_both_stacks_and_says_their_ratio() -> None:
    ours, theirs = planned("LoRA r=8, seq 512", "plain", "hf", gpus=(1,))
    assert (ours.settings, theirs.settings) == ({}, {"stack": "hf"})
    assert train_config.load(ours.config).bsz == 8
    assert script["ratios"]([(ours, found("native", 18000.0)), (theirs, found("hf", 8000.0))]) == [
        "LoRA r=8, seq 512 on 1: native 18,000 against hf 8,000 tok/s/GPU, 2.25 times as fast"
    ]


def test_only_what_is_alike_is_compared() -> None:
    (theirs,) = planned("LoRA r=8, seq 512", "hf")
    (other_batch,) = planned("LoRA r=8, seq 512", "bsz 16")
    (other_gpus,) = planned("LoRA r=8, seq 512", "plain", gpus=(4,))
    (ours,) = planned("LoRA r=8, seq 512", "plain")
    native, hf = found("native", 1.0), found("hf", 1.0)
    assert script["ratios"]([(theirs, hf), (other_batch, native), (other_gpus, native), (ours, {"error": "x"})]) == []


def test_the_table_has_a_cell_a_column() -> None:
    (run,) = planned("LoRA r=8, seq 512", "plain")
    cells = ["LoRA r=8, seq 512", "plain", "1", "18,000", "unknown", "0.2500", "0.3000", "–", "0.0", "12.3"]
    assert script["row"](run, found("native", 18000.0)) == cells
    assert len(script["row"](run, {"error": "out of memory"})) == len(cells) == len(script["COLUMNS"])
