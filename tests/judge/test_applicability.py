"""A rule that does not apply says why in words, not in the names of variables."""

from __future__ import annotations

import re

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.judge.applicability import _MEANING, not_applicable_reason
from seatrial.judge.groups import opposite_direction


@pytest.mark.parametrize(
    ("fact", "wanted", "actual", "words"),
    [
        ("rdma_present", "yes", "no", "there is no RDMA device"),
        ("tasks_bound", "yes", "no: task/none, without task/affinity", "task/none, without task/affinity"),
        ("has_power_default_w", "yes", "no", "the GPUs have no power default w"),
        ("backend", "nccl", "gloo", "the backend is gloo here, not nccl"),
        ("paths_from", "options", "run directory", "the paths are those of the run directory"),
        ("sun_shines", "yes", "no", "no sun shines here"),
    ],
)
def test_each_kind_of_fact_has_its_sentence(fact: str, wanted: str, actual: str, words: str) -> None:
    assert not_applicable_reason({fact: wanted}, [fact], {fact: actual}) == words


def test_every_fact_that_is_otherwise_is_told_once() -> None:
    facts = {"usable": "no", "several_nodes": "no", "backend": "cuda"}
    told = not_applicable_reason(
        {"usable": "yes", "backend": "cuda", "several_nodes": "yes"}, ["usable", "several_nodes"], facts
    )
    assert told == "no path can be written to; there is one node only"


@pytest.mark.parametrize("machine", [{"backend": "cpu"}, {"has_usable_gpu": "no"}])
def test_a_machine_without_gpus_has_none_that_lack_something(machine: dict[str, JsonValue]) -> None:
    where = {"has_usable_gpu": "yes", "has_bf16": "yes", "has_memory_repair": "yes"}
    facts: dict[str, JsonValue] = {**dict.fromkeys(where, "no"), **machine}
    assert not_applicable_reason(where, list(where), facts) == "there is no usable GPU"


@pytest.mark.parametrize(
    ("one", "other"),
    [("n/gpu0->gpu1", "n/gpu1->gpu0"), ("n1->n2", "n2->n1"), ("a/rank10->rank2", "a/rank2->rank10")],
)
def test_a_pair_has_another_order(one: str, other: str) -> None:
    assert (opposite_direction(one), opposite_direction(other)) == (other, one)


def test_every_word_is_of_a_rule_and_none_reads_like_code() -> None:
    asked = {name for check in catalog().values() for rule in check.rules for name in rule.applies_if}
    assert set(_MEANING) <= asked
    for name in asked:
        words = not_applicable_reason({name: "yes"}, [name], {name: "no"})
        assert not re.search(r"\w+_\w+", words.replace("option time_limit", "")), words
