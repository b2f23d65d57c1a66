from __future__ import annotations

from typing import Any

import pytest

from seatrial.hardware.training_flops import TrainingWork, training_work

RUN: dict[str, Any] = {"precision": "bf16 mixed", "flops_per_token": 4.2e10}
FP32 = {**RUN, "precision": "fp32"}  # train.ddp


@pytest.mark.parametrize(
    ("metric", "facts", "expected"),
    [
        ("mfu", {"run": RUN}, TrainingWork(4.2e10, "bf16", True)),
        ("mfu.hf", {"run.hf": RUN}, TrainingWork(4.2e10, "bf16", True)),
        ("tokens_per_second_per_gpu.hf", {"run.hf": RUN}, TrainingWork(4.2e10, "bf16", False)),
        ("tokens_per_second_per_gpu", {"training": FP32}, TrainingWork(4.2e10, "tf32", False)),
    ],
)
def test_the_work_comes_from_the_run_of_the_metric(metric: str, facts: dict[str, Any], expected: TrainingWork) -> None:
    assert training_work(metric, facts) == expected


@pytest.mark.parametrize(
    ("metric", "facts"),
    [
        ("busbw.1GiB", {"run": RUN}),
        ("mfu.hf", {"run.native": RUN}),
        ("mfu", {"run": {**RUN, "precision": "int4"}}),
        ("mfu", {"run": {"flops_per_token": 1e9}}),
        ("mfu", {"run": "bf16"}),
    ],
)
def test_no_work_for_other_metrics_and_unknown_precisions(metric: str, facts: dict[str, Any]) -> None:
    assert training_work(metric, facts) is None


@pytest.mark.parametrize("flops", [None, "4.2e10", True, 0, -1, 1e18, float("inf"), float("nan")])
def test_an_implausible_flop_count_is_ignored(flops: Any) -> None:
    assert training_work("mfu", {"run": {**RUN, "flops_per_token": flops}}) == TrainingWork(None, "bf16", True)
