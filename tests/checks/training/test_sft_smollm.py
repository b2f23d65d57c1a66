"""The declared rules of train.sft_smollm on made-up measurements."""

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
    judged = outcomes(CHECK, values, trained=trained, device="cuda")
    return {metric for metric, outcome in judged.items() if outcome is Outcome.FAIL}


def test_a_good_training_passes() -> None:
    judged = outcomes(CHECK, GOOD, trained="yes", device="cuda")
    assert {judged[metric] for metric in GOOD} == {Outcome.PASS}


@pytest.mark.parametrize("metric", BAD)
def test_each_rule_fails_by_its_metric(metric: str) -> None:
    assert failed(GOOD | {metric: BAD[metric]}) == {metric}


def test_every_rule_has_its_bad_value_here() -> None:
    assert {rule.metric for rule in CHECK.rules} == set(BAD)


def test_of_a_training_that_did_not_end_only_the_exit_code_is_judged() -> None:
    assert failed(GOOD | BAD, trained="no") == {"exit_code"}


@pytest.mark.parametrize("name", [NAME, f"tiny/{NAME}"])
def test_the_config_ships_for_gpus_and_for_a_cpu(name: str) -> None:
    assert train_config.load(name).max_steps > 0


def test_a_training_without_its_metrics_is_an_error() -> None:
    judged = outcomes(CHECK, {"exit_code": 0}, trained="yes", device="cuda")
    assert judged["loss_drop"] is Outcome.ERROR
