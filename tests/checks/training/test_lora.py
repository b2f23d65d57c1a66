"""train.lora: adapters, exports, efficiency, rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.training import lora
from seatrial.checks.training._results import TOKENS_PER_GPU
from seatrial.checks.training._workload import TrainingResult
from seatrial.model import Metric, Outcome
from seatrial.train import train_config
from tests.checks.fabric.verdicts import outcomes
from tests.checks.training.check_helpers import failed_metrics, lora_training, measured

CONFIG = train_config.load(f"tiny/{lora.NAME}")
EXPECTED = CONFIG.architecture().adapter_parameters(CONFIG.lora_targets, CONFIG.lora_r)
GOOD: dict[str, float] = {"exit_code": 0, "steps_missing": 0, "nonfinite_losses": 0, "loss_drop": 1}
GOOD |= {"adapter_mismatches": 0, "exports_missing": 0}


def trained(parameters: int = EXPECTED, speed: float = 100.0, **more: Any) -> TrainingResult:
    return TrainingResult(
        {"trained_parameters": parameters, TOKENS_PER_GPU: speed, **more}, Path("none"), "", ranks=(0,)
    )


def adapters(export: bool = True, **runs: list[TrainingResult]) -> dict[str, Metric]:
    config = train_config.load(f"tiny/{lora.NAME}", [f"export={str(export).lower()}"])
    return {metric.name: metric for metric in measured(lora.CHECK, lora._adapter_counts(runs, config)).metrics}


def test_adapter_mismatches() -> None:
    assert adapters(native=[trained()], hf=[trained()])["adapter_mismatches"].value == 0
    assert adapters(native=[trained(EXPECTED + 1)], hf=[trained()])["adapter_mismatches"].value == 1
    single_gpu = [trained(1), replace(trained(2), ranks=(1,))]
    assert adapters(native_single_gpu=single_gpu, hf=[trained()])["adapter_mismatches"].value == 2


def test_counts_are_named_by_training_and_rank() -> None:
    runs = {"hf_single_gpu": [trained(), replace(trained(7), ranks=(1,))], "hf": [trained()]}
    (mismatches, _) = measured(lora.CHECK, lora._adapter_counts(runs, CONFIG)).metrics
    assert mismatches.evidence == {
        "expected": EXPECTED,
        "hf_single_gpu of rank 0": EXPECTED,
        "hf_single_gpu of rank 1": 7,
        "hf": EXPECTED,
    }


def test_exports_are_missing_only_if_configured() -> None:
    assert adapters(native=[trained()], hf=[trained()])["exports_missing"].value == 2
    assert adapters(export=False, native=[trained()], hf=[trained()])["exports_missing"].value == 0
    missing = adapters(native=[trained(final="loaded")], hf=[trained()])["exports_missing"]
    assert (missing.value, missing.evidence) == (1, {"loaded": ["native"]})


def test_failed_training_is_not_counted() -> None:
    failed = TrainingResult(None, Path("none"), "rank 0: ended by signal 9", -9, ranks=(0,))
    values = {name: metric.value for name, metric in adapters(native=[failed]).items()}
    assert values == {"adapter_mismatches": 0, "exports_missing": 0}


def test_efficiency_and_ratio_of_stacks() -> None:
    runs = {
        "native": [trained(speed=90)],
        "native_single_gpu": [trained(speed=100), trained(speed=100)],
        "hf": [trained(speed=60)],
        "hf_single_gpu": [trained(speed=80)],
    }
    values = {metric.name: metric.value for metric in measured(lora.CHECK, lora._compare_stacks(runs)).metrics}
    assert values == pytest.approx({"efficiency.native": 90, "efficiency.hf": 75, "native_vs_hf": 1.5})
    one_rank = {name: runs[name] for name in lora.STACKS}
    metrics = measured(lora.CHECK, lora._compare_stacks(one_rank)).metrics
    assert [metric.name for metric in metrics] == ["native_vs_hf"]


@pytest.mark.parametrize("metric", ["adapter_mismatches", "exports_missing"])
def test_mismatch_or_missing_export_fails(metric: str) -> None:
    good = outcomes(lora.CHECK, GOOD, trained="yes", device="cpu")
    assert {name for name, outcome in good.items() if outcome is Outcome.FAIL} == set()
    bad = outcomes(lora.CHECK, GOOD | {metric: 1}, trained="yes", device="cpu")
    assert {name for name, outcome in bad.items() if outcome is Outcome.FAIL} == {metric}
    unfinished = outcomes(lora.CHECK, GOOD | {metric: 1}, trained="no", device="cpu")
    assert unfinished[metric] is Outcome.SKIP


@pytest.mark.training
@pytest.mark.parametrize("frozen", [True, False])
def test_training_that_does_not_freeze_the_model_fails(tmp_path: Path, frozen: bool) -> None:
    result = lora_training(CONFIG, tmp_path / "out", frozen)
    failed = failed_metrics(lora.CHECK, lora._adapter_counts({"native": [result]}, CONFIG))
    assert failed == (set() if frozen else {"adapter_mismatches"})


def test_speed_rule_needs_a_gpu_and_shipped_settings() -> None:
    speed = f"{TOKENS_PER_GPU}.native"
    for facts in ({"device": "cpu", "settings": "shipped"}, {"device": "cuda", "settings": "changed"}):
        assert outcomes(lora.CHECK, GOOD | {speed: 1}, trained="yes", **facts)[speed] is Outcome.SKIP
