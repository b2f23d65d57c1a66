"""Verdicts on the all-reduce of one rank with itself; real groups: test_real_groups.py."""

from __future__ import annotations

import pytest

from seatrial.checks.fabric.one_gpu import CHECK
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

FACTS = {"gpu": "NVIDIA H200", "world_size": 1, "nodes": 1}


@pytest.mark.parametrize(("wrong", "outcome"), [(0, Outcome.PASS), (3, Outcome.FAIL)])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_one_gpu_is_judged_by_its_data_only(wrong: int, outcome: Outcome, backend: str) -> None:
    judged = outcomes(
        CHECK, {"latency.1KiB node0/gpu0": 9.0, "wrong_elements node0/gpu0": wrong}, backend=backend, **FACTS
    )
    assert judged == {"wrong_elements": outcome}
