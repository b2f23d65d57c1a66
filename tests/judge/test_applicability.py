"""Whether a rule is applicable, and the reason as text without variable names."""

from __future__ import annotations

import re

import pytest

from seatrial.checks import catalog
from seatrial.checks.base import RuleFact
from seatrial.judge.applicability import unmet_condition
from seatrial.judge.groups import opposite_direction
from seatrial.model import Outcome


@pytest.mark.parametrize(
    ("fact", "value", "outcome", "reason"),
    [
        (RuleFact(reason="single node"), "no", Outcome.SKIP, "single node"),
        (RuleFact(reason="single node"), "no: task/none", Outcome.SKIP, "task/none"),
        (RuleFact("a|b", "the paths come from {}"), "b", Outcome.SKIP, "the paths come from b"),
        (RuleFact("nccl|gloo"), "gloo", Outcome.SKIP, "some fact is gloo, not yes"),
        (RuleFact(), "not_supported: no NVLink", Outcome.SKIP, "no NVLink"),
        (RuleFact(), "permission_denied", Outcome.UNJUDGED, "some fact is permission denied, not yes"),
        (RuleFact(not_supported=Outcome.ERROR), "not_supported", Outcome.ERROR, "some fact is not supported, not yes"),
        (RuleFact(permission_denied=Outcome.SKIP), "permission_denied: root only", Outcome.SKIP, "root only"),
    ],
)
def test_outcome_and_reason_for_each_kind_of_value(fact: RuleFact, value: str, outcome: Outcome, reason: str) -> None:
    assert fact.accepts(value)
    assert unmet_condition("some_fact", "yes", fact, value) == (outcome, reason)


@pytest.mark.parametrize(
    ("pair", "opposite"),
    [("n/gpu0->gpu1", "n/gpu1->gpu0"), ("n1->n2", "n2->n1"), ("a/rank10->rank2", "a/rank2->rank10")],
)
def test_opposite_direction_of_a_pair(pair: str, opposite: str) -> None:
    assert (opposite_direction(pair), opposite_direction(opposite)) == (opposite, pair)


def test_reasons_contain_no_variable_names() -> None:
    for check in catalog().values():
        for name, fact in check.rule_facts.items():
            _, reason = unmet_condition(name, "yes", fact, "no")
            option_names = r"option \w+|cluster\.gpus_per_node"
            assert not re.search(r"\w+_\w+", re.sub(option_names, "", reason)), reason
