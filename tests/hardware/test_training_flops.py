from __future__ import annotations

from typing import Any

import pytest

from seatrial.hardware.training_flops import TrainingWork, training_work

RUN: dict[str, Any] = {"precision": "bf16 mixed", "flops_per_token": 4.2e10}


@pytest.mark.parametrize(
    ("key", "facts", "expected"),
    [
        ("mfu", {"run": RUN}, TrainingWork(4.2e10, "bf16", True)),
        ("mfu.hf", {"run.hf": RUN}, TrainingWork(4.2e10, "bf16", True)),
        ("tokens_per_second_per_gpu.hf", {"run.hf": RUN}, TrainingWork(4.2e10, "bf16", False)),
        (
            "tokens_per_second_per_gpu",
            {"training": {**RUN, "precision": "fp32"}},
            TrainingWork(4.2e10, "tf32", False),
        ),  # train.ddp
    ],
)
def test_the_run_is_that_of_the_metric(key: str, facts: dict[str, Any], expected: TrainingWork) -> None:
    assert training_work(key, facts) == expected


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("busbw.1GiB", {"run": RUN}),
        ("mfu.hf", {"run.native": RUN}),
        ("mfu", {"run": {**RUN, "precision": "int4"}}),
        ("mfu", {"run": {"flops_per_token": 1e9}}),
        ("mfu", {"run": "bf16"}),
    ],
)
def test_what_is_no_training_or_of_unknown_precision_has_no_work(key: str, facts: dict[str, Any]) -> None:
    assert training_work(key, facts) is None


@pytest.mark.parametrize("told", [None, "4.2e10", True, 0, -1, 1e18, float("inf"), float("nan")])
def test_a_count_that_no_model_has_is_unknown(told: Any) -> None:
    assert training_work("mfu", {"run": {**RUN, "flops_per_token": told}}) == TrainingWork(None, "bf16", True)
