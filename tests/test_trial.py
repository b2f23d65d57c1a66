from __future__ import annotations

from seatrial.model import Job, Measurement
from seatrial.plan import Plan
from seatrial.trial import _done

JOB = Job(
    name="ranks",
    placement="ranks",
    device="cpu",
    nodes=1,
    ranks_per_node=2,
    checks=("train.cnn",),
    options={},
    promised_gpus=None,
    limit_s=1,
)


def test_one_rank_measured_twice_does_not_stand_for_two() -> None:
    plan = Plan((JOB,), (), {})
    first, second = (Measurement(check="train.cnn", subject=f"n0/rank{rank}", rank=rank) for rank in (0, 1))
    assert _done(plan, [first, first]) == []
    assert _done(plan, [first, second]) == ["train.cnn"]
