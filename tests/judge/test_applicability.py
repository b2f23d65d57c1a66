"""The reason why a rule is not applicable, as text without variable names."""

from __future__ import annotations

import re

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.judge.applicability import _REASON_TEXTS, not_applicable_reason
from seatrial.judge.groups import opposite_direction


@pytest.mark.parametrize(
    ("fact", "required", "actual", "text"),
    [
        ("rdma_present", "yes", "no", _REASON_TEXTS["rdma_present"]),
        ("tasks_bound", "yes", "no: task/none, without task/affinity", "task/none, without task/affinity"),
        ("has_power_default_w", "yes", "no", "the GPUs have no power default w"),
        ("backend", "nccl", "gloo", "backend is gloo, not nccl"),
        ("paths_from", "options", "run directory", _REASON_TEXTS["paths_from"].format("run directory")),
        ("hyperthreading", "yes", "no", "no hyperthreading"),
    ],
)
def test_reason_for_each_kind_of_fact(fact: str, required: str, actual: str, text: str) -> None:
    assert not_applicable_reason({fact: required}, [fact], {fact: actual}) == text


def test_each_mismatched_fact_is_listed_once() -> None:
    facts = {"any_path_usable": "no", "several_nodes": "no", "backend": "cuda"}
    applies_if = {"any_path_usable": "yes", "backend": "cuda", "several_nodes": "yes"}
    reason = not_applicable_reason(applies_if, ["any_path_usable", "several_nodes"], facts)
    assert reason == f"{_REASON_TEXTS['any_path_usable']}; {_REASON_TEXTS['several_nodes']}"


@pytest.mark.parametrize("machine", [{"backend": "cpu"}, {"has_usable_gpu": "no"}])
def test_without_gpus_the_reason_is_the_missing_gpu(machine: dict[str, JsonValue]) -> None:
    applies_if = {"has_usable_gpu": "yes", "has_bf16": "yes", "has_memory_repair": "yes"}
    facts: dict[str, JsonValue] = {**dict.fromkeys(applies_if, "no"), **machine}
    assert not_applicable_reason(applies_if, list(applies_if), facts) == _REASON_TEXTS["has_usable_gpu"]


@pytest.mark.parametrize(
    ("pair", "opposite"),
    [("n/gpu0->gpu1", "n/gpu1->gpu0"), ("n1->n2", "n2->n1"), ("a/rank10->rank2", "a/rank2->rank10")],
)
def test_opposite_direction_of_a_pair(pair: str, opposite: str) -> None:
    assert (opposite_direction(pair), opposite_direction(opposite)) == (opposite, pair)


def test_reason_texts_belong_to_rules_and_contain_no_variable_names() -> None:
    names = {name for check in catalog().values() for rule in check.rules for name in rule.applies_if}
    assert set(_REASON_TEXTS) <= names
    for name in names:
        reason = not_applicable_reason({name: "yes"}, [name], {name: "no"})
        option_names = r"option \w+|cluster\.gpus_per_node"
        assert not re.search(r"\w+_\w+", re.sub(option_names, "", reason)), reason
