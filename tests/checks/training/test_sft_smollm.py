"""Rules of train.sft_smollm on made-up measurements."""

from __future__ import annotations

import pytest

from seatrial.checks.training.sft_smollm import CHECK, NAME
from seatrial.model import Outcome
from seatrial.train import train_config
from tests.checks.fabric.verdicts import outcomes

GOOD: dict[str, float] = {"exit_code": 0, "steps_missing": 0, "nonfinite_losses": 0, "loss_drop": 1}
BAD: dict[str, float] = {"exit_code": 1, "steps_missing": 1, "nonfinite_losses": 1, "loss_drop": 0}
GOOD |= {"checkpoints": 1, "generated_tokens": 8}
BAD |= {"checkpoints": 0, "generated_tokens": 0}


def failed(values: dict[str, float], trained: str = "yes") -> set[str]:
    verdicts = outcomes(CHECK, values, trained=trained, device="cuda")
    return {metric for metric, outcome in verdicts.items() if outcome is Outcome.FAIL}


def test_good_values_pass() -> None:
    verdicts = outcomes(CHECK, GOOD, trained="yes", device="cuda")
    assert {verdicts[metric] for metric in GOOD} == {Outcome.PASS}


@pytest.mark.parametrize("metric", BAD)
def test_bad_value_fails_its_rule(metric: str) -> None:
    assert failed(GOOD | {metric: BAD[metric]}) == {metric}


def test_every_rule_has_a_bad_value() -> None:
    assert {rule.metric for rule in CHECK.rules} == set(BAD)


def test_failed_training_fails_only_exit_code() -> None:
    assert failed(GOOD | BAD, trained="no") == {"exit_code"}


@pytest.mark.parametrize("name", [NAME, f"tiny/{NAME}"])
def test_config_for_gpu_and_cpu(name: str) -> None:
    assert train_config.load(name).max_steps > 0


def test_missing_metrics_are_an_error() -> None:
    verdicts = outcomes(CHECK, {"exit_code": 0}, trained="yes", device="cuda")
    assert verdicts["loss_drop"] is Outcome.ERROR
