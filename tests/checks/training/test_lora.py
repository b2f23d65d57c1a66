"""LoRA by two stacks: adapters, exports, efficiency, and the rules on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.training import lora
from seatrial.checks.training._results import TOKENS_PER_GPU
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import Fact, Metric, Outcome
from seatrial.train import train_config
from tests.checks.fabric.verdicts import outcomes

CONFIG = train_config.load(f"tiny/{lora.NAME}")
DUE = CONFIG.architecture().adapter_parameters(CONFIG.lora_targets, CONFIG.lora_r)
GOOD: dict[str, float] = {"exit_code": 0, "steps_missing": 0, "nonfinite_losses": 0, "loss_drop": 1}
GOOD |= {"adapter_mismatches": 0, "exports_missing": 0}


def trained(parameters: int = DUE, speed: float = 100.0, **more: Any) -> TrainingResult:
    return TrainingResult(
        {"trained_parameters": parameters, TOKENS_PER_GPU: speed, **more}, Path("none"), "", ranks=(0,)
    )


def adapters(export: bool = True, **runs: list[TrainingResult]) -> dict[str, float]:
    wanted = train_config.load(f"tiny/{lora.NAME}", [f"export={str(export).lower()}"])
    return {one.name: one.value for one in lora._adapter_counts(runs, wanted) if isinstance(one, Metric)}


def test_adapters_are_counted_against_the_architecture() -> None:
    assert adapters(native=[trained()], hf=[trained()])["adapter_mismatches"] == 0
    assert adapters(native=[trained(DUE + 1)], hf=[trained()])["adapter_mismatches"] == 1
    assert (
        adapters(native_single_gpu=[trained(1), replace(trained(2), ranks=(1,))], hf=[trained()])["adapter_mismatches"]
        == 2
    )


def test_the_counts_are_named_by_training_and_rank() -> None:
    runs = {"hf_single_gpu": [trained(), replace(trained(7), ranks=(1,))], "hf": [trained()]}
    (fact,) = (one for one in lora._adapter_counts(runs, CONFIG) if isinstance(one, Fact))
    assert fact.value == {"expected": DUE, "hf_single_gpu of rank 0": DUE, "hf_single_gpu of rank 1": 7, "hf": DUE}


def test_an_export_is_missing_only_where_one_was_asked_for() -> None:
    assert adapters(native=[trained()], hf=[trained()])["exports_missing"] == 2
    assert adapters(export=False, native=[trained()], hf=[trained()])["exports_missing"] == 0


def test_a_training_that_failed_has_neither_adapters_nor_exports() -> None:
    failed = TrainingResult(None, Path("none"), "rank 0: ended by signal 9", -9, ranks=(0,))
    assert adapters(native=[failed]) == {"adapter_mismatches": 0, "exports_loaded": 0, "exports_missing": 0}


def test_each_stack_is_compared_with_its_gpus_alone_and_with_the_other() -> None:
    runs = {
        "native": [trained(speed=90)],
        "native_single_gpu": [trained(speed=100), trained(speed=100)],
        "hf": [trained(speed=60)],
        "hf_single_gpu": [trained(speed=80)],
    }
    found = {one.name: one.value for one in lora._compare_stacks(runs) if isinstance(one, Metric)}
    assert found == pytest.approx({"efficiency.native": 90, "efficiency.hf": 75, "native_vs_hf": 1.5})
    one_rank = {name: runs[name] for name in lora.STACKS}
    assert [one.name for one in lora._compare_stacks(one_rank) if isinstance(one, Metric)] == ["native_vs_hf"]


@pytest.mark.parametrize("metric", ["adapter_mismatches", "exports_missing"])
def test_one_that_is_wrong_or_missing_fails(metric: str) -> None:
    good = outcomes(lora.CHECK, GOOD, trained="yes", device="cpu")
    assert {name for name, outcome in good.items() if outcome is Outcome.FAIL} == set()
    bad = outcomes(lora.CHECK, GOOD | {metric: 1}, trained="yes", device="cpu")
    assert {name for name, outcome in bad.items() if outcome is Outcome.FAIL} == {metric}
    unfinished = outcomes(lora.CHECK, GOOD | {metric: 1}, trained="no", device="cpu")
    assert unfinished[metric] is Outcome.SKIP


def test_speed_is_judged_only_of_the_shipped_settings_on_gpus() -> None:
    speed = f"{TOKENS_PER_GPU}.native"
    for facts in ({"device": "cpu", "settings": "shipped"}, {"device": "cuda", "settings": "changed"}):
        assert outcomes(lora.CHECK, GOOD | {speed: 1}, trained="yes", **facts)[speed] is Outcome.SKIP
