from __future__ import annotations

import pytest

from seatrial.checks import catalog
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

NAME = "nodes.messages"
WRONG, SLOW = "wrong_messages node0->node1", "time_vs_median node0->node1"
GOOD = {WRONG: 0.0, "message_time node0->node1": 20.0, SLOW: 1.0}


@pytest.mark.parametrize(
    ("key", "bad", "outcome"), [(WRONG, 1.0, Outcome.FAIL), (SLOW, 1.6, Outcome.WARN)], ids=["wrong", "slow"]
)
def test_each_rule(key: str, bad: float, outcome: Outcome) -> None:
    check, facts = catalog()[NAME], {"backend": "nccl", "comparable": "yes"}
    good = outcomes(check, GOOD, **facts)
    assert set(good.values()) == {Outcome.PASS}
    assert outcomes(check, {**GOOD, key: bad}, **facts) == {**good, key.partition(" ")[0]: outcome}


def test_times_are_not_compared_without_nccl() -> None:
    judged = outcomes(catalog()[NAME], {**GOOD, SLOW: 9.0}, backend="gloo", comparable="yes")
    assert judged == {"wrong_messages": Outcome.PASS, "time_vs_median": Outcome.SKIP}
