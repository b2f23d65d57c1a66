"""Whether a rule is applicable, and the reason as text without variable names."""

from __future__ import annotations

import pytest

from seatrial.judge.applicability import unmet_condition
from seatrial.judge.groups import opposite_direction
from seatrial.model import Outcome


@pytest.mark.parametrize(
    ("value", "outcome", "reason"),
    [
        ("no", Outcome.SKIP, "some fact is no, not yes"),
        ("no: task/none", Outcome.SKIP, "task/none"),
        ("gloo", Outcome.SKIP, "some fact is gloo, not yes"),
        ("not_supported: no NVLink", Outcome.SKIP, "no NVLink"),
        ("permission_denied", Outcome.UNJUDGED, "some fact is permission denied, not yes"),
        ("permission_denied: root only", Outcome.UNJUDGED, "root only"),
    ],
)
def test_outcome_and_reason_for_each_kind_of_value(value: str, outcome: Outcome, reason: str) -> None:
    assert unmet_condition("some_fact", "yes", value) == (outcome, reason)


@pytest.mark.parametrize(
    ("pair", "opposite"),
    [("n/gpu0->gpu1", "n/gpu1->gpu0"), ("n1->n2", "n2->n1"), ("a/rank10->rank2", "a/rank2->rank10")],
)
def test_opposite_direction_of_a_pair(pair: str, opposite: str) -> None:
    assert (opposite_direction(pair), opposite_direction(opposite)) == (opposite, pair)
