"""Rules of train.sft_mistral and train.sft_smollm on made-up measurements."""

from __future__ import annotations

import pytest

from seatrial.checks.check import Check
from seatrial.checks.training.sft import MISTRAL, MISTRAL_CHECK, SMOLLM, SMOLLM_CHECK
from seatrial.model import Outcome
from seatrial.train import train_config
from tests.checks.fabric.verdicts import outcomes

GOOD: dict[str, float] = {"exit_code": 0, "steps_missing": 0, "nonfinite_losses": 0, "loss_drop": 1}
BAD: dict[str, float] = {"exit_code": 1, "steps_missing": 1, "nonfinite_losses": 1, "loss_drop": 0}
GOOD_SMOLLM = GOOD | {"checkpoints": 1, "generated_tokens": 8}
BAD_SMOLLM = BAD | {"checkpoints": 0, "generated_tokens": 0}
CASES = ((MISTRAL_CHECK, GOOD, BAD), (SMOLLM_CHECK, GOOD_SMOLLM, BAD_SMOLLM))


def failed(check: Check, values: dict[str, float], trained: str = "yes") -> set[str]:
    verdicts = outcomes(check, values, trained=trained, device="cuda")
    return {metric for metric, outcome in verdicts.items() if outcome is Outcome.FAIL}


@pytest.mark.parametrize(("check", "good", "bad"), CASES, ids=lambda case: getattr(case, "name", ""))
def test_each_bad_value_fails_its_rule(check: Check, good: dict[str, float], bad: dict[str, float]) -> None:
    verdicts = outcomes(check, good, trained="yes", device="cuda")
    assert {verdicts[metric] for metric in good} == {Outcome.PASS}
    assert {rule.metric for rule in check.rules} == set(bad)
    for metric, value in bad.items():
        assert failed(check, good | {metric: value}) == {metric}
    assert failed(check, good | bad, trained="no") == {"exit_code"}


@pytest.mark.parametrize("check", [MISTRAL_CHECK, SMOLLM_CHECK], ids=lambda check: check.name)
def test_missing_metrics_are_an_error(check: Check) -> None:
    verdicts = outcomes(check, {"exit_code": 0}, trained="yes", device="cuda")
    assert verdicts["loss_drop"] is Outcome.ERROR


@pytest.mark.parametrize("name", [MISTRAL, SMOLLM])
def test_config_for_gpu_and_cpu(name: str) -> None:
    assert all(train_config.load(config).max_steps > 0 for config in (name, f"tiny/{name}"))
