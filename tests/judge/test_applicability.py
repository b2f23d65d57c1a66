"""Whether a rule is applicable, and the reason as text without variable names."""

from __future__ import annotations

import pytest

from seatrial.judge.applicability import unmet_condition
from seatrial.judge.groups import opposite_direction


@pytest.mark.parametrize(
    ("value", "reason"),
    [("no", "some fact is no, not yes"), ("gloo", "some fact is gloo, not yes")],
)
def test_the_reason_names_the_fact_its_value_and_the_required_one(value: str, reason: str) -> None:
    assert unmet_condition("some_fact", "yes", value) == reason


@pytest.mark.parametrize(
    ("pair", "opposite"),
    [("n/gpu0->gpu1", "n/gpu1->gpu0"), ("n1->n2", "n2->n1"), ("a/rank10->rank2", "a/rank2->rank10")],
)
def test_opposite_direction_of_a_pair(pair: str, opposite: str) -> None:
    assert (opposite_direction(pair), opposite_direction(opposite)) == (opposite, pair)
