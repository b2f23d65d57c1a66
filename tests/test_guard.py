"""The judge says the same as the golden files of the guard (tools/guard.py), and the guard sees what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from tools import guard

from tests.guard.changes import KINDS, Intent, Kind, record
from tests.guard.observed import Observed, observe
from tests.guard.shapes import GROUPS

# Group → the least number of its shapes
SHAPES = {"a": 56, "c": 100, "d": 126, "e": 30, "f": 400, "g": 100, "h": 4, "i": 300, "j": 120, "k": 150, "m": 150}
SHAPE_STEPS = {"d": 3, "f": 3}  # these take longest; `python tools/guard.py` compares all
FAILED: Observed = {"verdict device.gemm n0/gpu0 tflops.bf16": "FAIL, SKU: fail < 600 TFLOP/s", "decision": "REJECTED"}


@pytest.mark.parametrize("group", GROUPS)
def test_the_judge_says_the_same_of_shapes_and_of_every_twentieth_mutation(group: str) -> None:
    step = SHAPE_STEPS.get(group, 1)
    comparison = guard.compare([group], guard.read_entries(), mutation_step=20, shape_step=step)
    assert [str(each) for each in comparison.differences] == []
    assert step > 1 or comparison.unused([group]) == []
    assert comparison.compared >= SHAPES[group] // step


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


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("*", "PASS", "WARN"),
        ("*: decision", "REJECTED", "INCOMPLETE"),
        ("c/*", "PASS", "WARN"),
        ("c/*: *", "PASS", "WARN"),
        ("c/shape: verdict a * c", "PASS", "WARN"),
        ("c/shape: verdict a b c", "*", "WARN"),
        ("c/shape: verdict a b c", "PASS", "*"),
        ("c/*: shape", "made", None),
    ],
)
def test_a_wildcard_stands_for_names_of_shapes_of_one_group_only(key: str, before: str, after: str | None) -> None:
    with pytest.raises(ValidationError, match=r"pattern|any text|entry of its own"):
        entry(key, before, after)


def test_values_of_an_entry_are_compared_literally() -> None:
    literal = entry("c/*: without threshold a", "busbw.*", "busbw.* other than 1GiB")
    for after, differs in (("busbw.* other than 1GiB", False), ("busbw.8GiB other than 1GiB", True)):
        comparison = guard.Comparison([literal])
        comparison.add("c/shape", {"without threshold a": "busbw.*"}, {"without threshold a": after})
        assert bool(comparison.differences) is differs


@pytest.mark.parametrize(
    ("observation", "before", "after"),
    [
        *(
            (name, before, after)
            for name in ("verdict a b c", "result 0 verdict a b c", "result 0", "outcome")
            for before in ("FAIL, rule: == 0", "ERROR", "UNJUDGED; PASS, rule: == 0")
            for after in ("PASS, rule: == 0", "WARN", "SKIP", "not modelled")
        ),
        ("decision", "REJECTED", "ACCEPTED"),
        ("decision", "refused", "ACCEPTED"),
        ("decision", "another value", "ACCEPTED"),
        ("exit code", "1", "0"),
        ("exit code", "3", "0"),
        ("bad", "failed, exit code 1", "limited, exit code 0"),
        ("refused", "UsageError", "no"),
        ("nodes at fault", "n1", ""),
    ],
)
def test_no_entry_may_allow_that_the_judge_becomes_laxer(observation: str, before: str, after: str) -> None:
    with pytest.raises(ValidationError, match=r"became ACCEPTED|is now"):
        entry(f"c/shape: {observation}", before, after)
    comparison = guard.Comparison(())
    comparison.add("c/shape", {observation: before}, {observation: after})
    (difference,) = comparison.differences
    assert difference.refusal


@pytest.mark.parametrize(("decision", "is_refused"), [("REJECTED", False), ("INCOMPLETE", True), ("ACCEPTED", True)])
def test_a_check_is_measured_again_less_often_only_if_the_record_is_rejected(decision: str, is_refused: bool) -> None:
    comparison = guard.Comparison([entry("c/*: measured again 1", "device.gemm", "")])
    retried = {"measured again 1": "device.gemm", "decision": decision}
    comparison.add("c/shape", retried, {**retried, "measured again 1": ""})
    assert [bool(each.refusal) for each in comparison.differences] == [True] * is_refused


@pytest.mark.parametrize(
    ("observation", "before"),
    [
        *((name, outcome) for name in ("verdict a b c", "result 0 verdict a b") for outcome in ("FAIL", "UNJUDGED")),
        ("refused", "UsageError"),
        ("exit code", "3"),
        ("nodes at fault", "n1"),
    ],
)
def test_what_is_bad_may_not_vanish(observation: str, before: str) -> None:
    allowing = entry(f"c/shape: {observation}", before, None)
    comparison = guard.Comparison([allowing])
    comparison.add("c/shape", {observation: before}, {"verdict a other c": "FAIL"})
    assert [(each.observation, bool(each.refusal)) for each in comparison.differences] == [
        (observation, True),
        ("verdict a other c", False),
    ]


def test_a_bad_verdict_may_move_to_another_metric_of_its_check_and_subject() -> None:
    key = "verdict device.gemm n0/gpu0 tflops.bf16"
    allowing = entry(f"c/*: {key}", FAILED[key], None)

    def refused(after: Observed, before: Observed = FAILED) -> bool:
        comparison = guard.Comparison([allowing])
        comparison.add("c/shape", before, after)
        return any(each.refusal for each in comparison.differences)

    assert not refused({"verdict device.gemm n0/gpu0 tflops": "FAIL", "decision": "REJECTED"})
    assert not refused({"refused": "UsageError"})
    assert refused({"decision": "REJECTED"})
    assert refused({"verdict device.gemm n0/gpu0 tflops": "PASS", "decision": "REJECTED"})
    assert refused({"verdict device.gemm n0 tflops": "FAIL", "decision": "REJECTED"})
    assert refused({"verdict device.memory n0/gpu0 copy": "FAIL", "decision": "REJECTED"})
    other: Observed = {"verdict device.gemm n0/gpu0 tflops.fp8": "FAIL", "decision": "REJECTED"}
    assert refused(other, FAILED | other), "the other verdict was there before"


def test_an_entry_with_a_wildcard_that_allows_nothing_is_unused() -> None:
    wide = entry("c/other*: decision", "REJECTED", "INCOMPLETE")
    assert compared(FAILED | {"decision": "INCOMPLETE"}, wide).unused("c") == [wide]


def test_golden_files_are_never_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FOLDER", tmp_path)
    guard.write("k")
    written = (tmp_path / "k.jsonl.xz").read_bytes()
    assert len([*guard.read("k")]) >= SHAPES["k"]
    monkeypatch.setattr(guard, "shapes", lambda letter: iter(()))
    with pytest.raises(FileExistsError, match="never rewritten"):
        guard.write("k")
    monkeypatch.setattr("sys.argv", ["guard.py", "--write", "k"])
    with pytest.raises(SystemExit, match="2"):
        guard.main()
    assert (tmp_path / "k.jsonl.xz").read_bytes() == written


def test_a_mutation_does_not_list_again_what_changed_in_its_shape() -> None:
    comparison = guard.Comparison(())
    changed = comparison.add("c/shape", FAILED, FAILED | {"decision": "INCOMPLETE"})
    comparison.add("l/0 c/shape", FAILED, FAILED | {"decision": "INCOMPLETE", "reason": "new"}, (changed,))
    assert [each.observation for each in comparison.differences] == ["decision", "reason"]


def test_a_mutation_that_is_good_now_is_listed_although_its_shape_changed_to_the_same_value() -> None:
    comparison = guard.Comparison(())
    changed = comparison.add("c/shape", {"verdict a b c": "PASS, rule: < 1"}, {"verdict a b c": "PASS, rule: < 9"})
    comparison.add(
        "l/0 c/shape", {"verdict a b c": "FAIL, rule: < 1"}, {"verdict a b c": "PASS, rule: < 9"}, (changed,)
    )
    assert [each.shape for each in comparison.differences if each.refusal] == ["l/0 c/shape"]


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
