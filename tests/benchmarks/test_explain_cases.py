"""benchmarks/explain_cases.py: how answers are scored, and that no answer gets worse."""

from __future__ import annotations

import json

import pytest
from benchmarks.explain_cases import Answer, Case

from benchmarks import explain_cases

CASE = Case(
    id=1,
    file="1.log",
    what="x",
    source="x",
    tool="explain",
    args="",
    healthy=False,
    expected_cause="the cgroup tree is full",
    first_words="cgroups",
    must_match="cgroup",
    wrong_if=("disk full",),
)
HEALTHY = CASE.model_copy(update={"healthy": True, "must_match": "", "wrong_if": (".+",)})


@pytest.mark.parametrize(
    ("case", "given", "score"),
    [
        (CASE, Answer("Cgroup tree full", is_general=False, lines=()), "right"),
        (CASE, Answer("cgroup: disk full", is_general=False, lines=()), "wrong"),
        (CASE, Answer("cgroup: disk full", is_general=True, lines=()), "generic"),
        (CASE, Answer("something", is_general=False, lines=()), "wrong"),
        (CASE, Answer("", is_general=False, lines=("x: cgroup error",)), "silent"),
        (CASE, Answer("", is_general=False, lines=("x: other error",)), "generic"),
        (HEALTHY, Answer("", is_general=False, lines=()), "right"),
        (HEALTHY, Answer("anything", is_general=True, lines=()), "wrong"),
    ],
)
def test_score(case: Case, given: Answer, score: str) -> None:
    assert explain_cases.score(case, given) == score


@pytest.mark.parametrize("group", sorted(path.parent.name for path in explain_cases.CASES.glob("*/cases.yaml")))
def test_answers_are_those_of_the_committed_numbers(group: str) -> None:
    scores = explain_cases.scores(group)
    committed = json.loads(explain_cases.RESULT.read_text(encoding="utf-8"))["now"][group]["not_right"]
    assert {str(number): score for number, score in scores.items() if score != "right"} == committed
    assert "wrong" not in scores.values()
    assert all(case.wrong_if for case in explain_cases.cases(group))
