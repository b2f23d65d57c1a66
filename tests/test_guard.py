"""The judge says the same as the golden files of the guard (tools/guard.py), and the guard sees what differs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from tools import guard

from tests.guard.changes import KINDS, Intent, Kind, record
from tests.guard.observed import Observed, observe
from tests.guard.shapes import GROUPS

# Group → the least number of its shapes
SHAPES = {"a": 56, "c": 100, "d": 126, "e": 30, "f": 400, "g": 100, "h": 4, "i": 300, "j": 120, "k": 150}
FAILED: Observed = {"verdict device.gemm n0/gpu0 tflops.bf16": "FAIL, SKU: fail < 600 TFLOP/s", "decision": "REJECTED"}


@pytest.mark.parametrize("group", GROUPS)
def test_the_judge_says_the_same_of_all_shapes_and_of_every_twentieth_mutation(group: str) -> None:
    comparison = guard.compare([group], guard.read_entries(), mutation_step=20)
    assert [str(each) for each in comparison.differences] == []
    assert comparison.unused([group]) == []
    assert comparison.compared >= SHAPES[group]


def test_there_are_as_many_mutations_as_promised_of_all_kinds() -> None:
    mutations = [guard.Mutation.model_validate(line) for line in guard.read(guard.MUTATIONS)]
    assert len(mutations) == guard.MUTATION_COUNT
    kinds: list[str] = [mutation.intent.kind for mutation in mutations]
    assert set(kinds) == set(KINDS)
    assert min(map(kinds.count, kinds)) > 100
    assert sum(bool(mutation.changes) for mutation in mutations) > 0.6 * guard.MUTATION_COUNT
    assert {mutation.shape.partition("/")[0] for mutation in mutations} == {"a", "c", "d", "e", "f", "g", "h", "j"}


def compared(after: Observed, *entries: guard.Entry) -> guard.Comparison:
    comparison = guard.Comparison(entries)
    comparison.add("c/shape", FAILED, after)
    return comparison


def entry(key: str, before: str | None, after: str | None) -> guard.Entry:
    return guard.Entry(key=key, before=before, after=after, reason="a reason")


def test_a_difference_is_allowed_only_by_an_entry_that_matches_it() -> None:
    after = FAILED | {"decision": "INCOMPLETE"}
    (difference,) = compared(after).differences
    assert (difference.key, difference.before, difference.after) == ("c/shape: decision", "REJECTED", "INCOMPLETE")
    wanted = entry("c/*: decision", "REJECTED", "INCOMPLETE")
    allowed = compared(after, wanted)
    assert (allowed.differences, allowed.unused("c")) == ([], [])
    assert compared(after, entry("d/*: decision", "REJECTED", "INCOMPLETE")).differences
    assert compared(after, entry("c/*: decision", "REJECTED", None)).differences
    assert compared(FAILED, wanted).unused("c") == [wanted]


def test_an_entry_is_unused_only_if_its_group_was_compared() -> None:
    of_mutation = entry("l/*: decision", "REJECTED", "INCOMPLETE")
    assert compared(FAILED, of_mutation).unused(GROUPS) == []
    assert compared(FAILED, of_mutation).unused("l") == [of_mutation]


@pytest.mark.parametrize("before", ["FAIL, rule: == 0", "ERROR", "UNJUDGED; PASS, rule: == 0"])
@pytest.mark.parametrize("after", ["PASS, rule: == 0", "WARN", "SKIP"])
def test_no_entry_may_turn_a_bad_outcome_into_a_good_one(before: str, after: str) -> None:
    with pytest.raises(ValidationError, match="turns"):
        entry("c/shape: verdict a b c", before, after)
    wide = entry("*", "*", "*")
    comparison = guard.Comparison([wide])
    comparison.add("c/shape", {"verdict a b c": before}, {"verdict a b c": after})
    assert [each.refusal for each in comparison.differences] == [
        f"{before.split(',')[0].split(';')[0]} became {after.split(',')[0]}"
    ]


def test_a_bad_outcome_may_move_but_not_vanish() -> None:
    key = "verdict device.gemm n0/gpu0 tflops.bf16"
    wide = entry("*", "*", None), entry("*", None, "*")
    moved = {"verdict device.gemm n0 tflops.bf16": "FAIL", "decision": "REJECTED"}
    assert compared(moved, *wide).differences == []
    (vanished,) = compared({"decision": "REJECTED"}, *wide).differences
    assert (vanished.observation, bool(vanished.refusal)) == (key, True)


def test_a_mutation_does_not_list_again_what_changed_in_its_shape() -> None:
    comparison = guard.Comparison(())
    changed = comparison.add("c/shape", FAILED, FAILED | {"decision": "INCOMPLETE"})
    comparison.add("l/0 c/shape", FAILED, FAILED | {"decision": "INCOMPLETE", "reason": "new"}, (changed,))
    assert [each.observation for each in comparison.differences] == ["decision", "reason"]


def test_each_kind_of_intent_changes_the_record() -> None:
    place = "device.gemm", "vm/gpu0", "tflops.bf16"
    trial = record("2026-11-22-4xh200/acceptance")
    before = observe(trial)
    expected: dict[Kind, str] = {
        "dropped": "ERROR",
        "cannot_be_read": "ERROR",
        "times_0.5": "FAIL",
        "times_2": "ERROR",
    }
    for kind, outcome in expected.items():
        after = observe(Intent(*place, kind).apply(trial))
        assert after[f"verdict {' '.join(place)}"].startswith(outcome)
        assert before[f"verdict {' '.join(place)}"].startswith("PASS")
