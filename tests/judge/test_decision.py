"""The decision fails closed, whatever verdicts it is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.judge import judge
from seatrial.judge.decision import decide, metrics_without_threshold
from seatrial.model import CLUSTER, DecisionValue, Measurement, Metric, Outcome, Reason, Verdict

NAMES = ("a", "b", "c")
RECORDED_ONE = Verdict("a", "n0", Outcome.SKIP, "busbw.1GiB", (Reason.NO_THRESHOLD,), "no SKU data for X", 1.0, "GB/s")
verdicts = st.lists(
    st.builds(
        Verdict,
        check=st.sampled_from(NAMES),
        subject=st.just("n0"),
        outcome=st.sampled_from(list(Outcome)),
    ),
    max_size=8,
)


def verdict(check: str, outcome: Outcome) -> Verdict:
    return Verdict(check=check, subject="n0", outcome=outcome)


def decided(
    *said: Verdict, required: dict[str, bool] | None = None, left_out: dict[str, str] | None = None
) -> DecisionValue:
    return decide(required or {"a": True}, said, left_out or {}, "").value


@given(verdicts, st.dictionaries(st.sampled_from(NAMES), st.booleans(), min_size=1))
def test_accepted_only_when_every_required_check_was_measured_and_good(
    said: list[Verdict], required: dict[str, bool]
) -> None:
    decision = decide(required, said, {}, "")
    outcomes = {name: [one.outcome for one in said if one.check == name] for name in required if required[name]}
    if any(one.outcome is Outcome.FAIL for one in said):
        assert decision.value is DecisionValue.REJECTED
    elif decision.value is DecisionValue.ACCEPTED:
        assert all(outcomes.values()), "a required check without any verdict"
        flat = [outcome for own in outcomes.values() for outcome in own]
        assert not {Outcome.ERROR, Outcome.UNJUDGED} & set(flat)
        assert {Outcome.PASS, Outcome.WARN} & set(flat), "nothing but skips"
    else:
        assert decision.reason


def test_the_simple_cases() -> None:
    assert decided(verdict("a", Outcome.PASS)) is DecisionValue.ACCEPTED
    assert decided(verdict("a", Outcome.WARN)) is DecisionValue.ACCEPTED
    assert decided(verdict("a", Outcome.FAIL), verdict("a", Outcome.PASS)) is DecisionValue.REJECTED
    assert decided(verdict("a", Outcome.PASS), verdict("a", Outcome.ERROR)) is DecisionValue.INCOMPLETE
    assert decided(verdict("a", Outcome.PASS), verdict("a", Outcome.UNJUDGED)) is DecisionValue.INCOMPLETE


def test_nothing_measured_is_not_accepted() -> None:
    assert decided() is DecisionValue.INCOMPLETE
    assert decided(verdict("a", Outcome.SKIP)) is DecisionValue.INCOMPLETE
    assert decided(verdict("a", Outcome.PASS), required={"a": False}) is DecisionValue.INCOMPLETE


def test_a_check_that_is_not_required_may_be_missing_but_not_bad() -> None:
    required = {"a": True, "b": False}
    assert decided(verdict("a", Outcome.PASS), verdict("b", Outcome.ERROR), required=required) is DecisionValue.ACCEPTED
    assert decided(verdict("a", Outcome.PASS), verdict("b", Outcome.FAIL), required=required) is DecisionValue.REJECTED


def test_what_is_not_required_and_not_known_is_named_beside_the_decision() -> None:
    said = (verdict("a", Outcome.PASS), verdict("b", Outcome.ERROR))
    decision = decide({"a": True, "b": False}, said, {}, "")
    assert decision.reason == "1 check passed; not required, and not known: b is ERROR"


def test_what_was_left_out_keeps_the_trial_incomplete() -> None:
    said = (verdict("a", Outcome.PASS), verdict("b", Outcome.SKIP))
    required = {"a": True, "b": True}
    assert decided(*said, required=required, left_out={"b": "--skip"}) is DecisionValue.INCOMPLETE
    assert decided(*said, required=required) is DecisionValue.ACCEPTED


def test_a_trial_that_was_stopped_is_incomplete_and_says_by_what() -> None:
    decision = decide({"a": True}, [verdict("a", Outcome.PASS)], {}, "", ("interrupted", ""))
    assert (decision.value, decision.reason) == (DecisionValue.INCOMPLETE, "interrupted")


def test_a_check_of_an_older_version_is_unjudged_and_a_lost_one_an_error() -> None:
    config = Config(name="old", checks={"gone.check": CheckSettings(), "lost.check": CheckSettings()})
    said = judge(config, [], [], {}, {})
    assert [one.outcome for one in said] == [Outcome.UNJUDGED, Outcome.UNJUDGED]


@pytest.mark.parametrize(("may_skip", "verb"), [(False, DecisionValue.INCOMPLETE), (True, DecisionValue.ACCEPTED)])
def test_a_threshold_that_nothing_was_held_to_is_told_and_by_default_accepts_nothing(
    may_skip: bool, verb: DecisionValue
) -> None:
    asked = CheckSettings.model_validate({"expect": {"busbw.8GiB": "> 350 GB/s"}, "may_skip": may_skip})
    name = "collectives.all_reduce"
    config = Config(name="t", checks={name: asked})
    skipped = Measurement(check=name, subject=CLUSTER, skipped="needs 2 ranks, this placement has 1")
    said = (verdict("a", Outcome.PASS), *judge(config, [], [skipped], catalog(), {}))
    decision = decide({"a": True, name: True}, said, {}, "")
    assert decision.value is verb
    told = f"{name} is not held to busbw.8GiB > 350 GB/s: needs 2 ranks, this placement has 1"
    assert decision.reason.endswith(told)


def test_what_may_skip_is_no_reason_why_a_trial_is_incomplete() -> None:
    asked = CheckSettings.model_validate({"expect": {"wall_seconds": "< 1200 s"}, "may_skip": True})
    skipped = Measurement(check="train.oumi", subject=CLUSTER, skipped="options.command names no executable")
    of_it = judge(Config(name="t", checks={"train.oumi": asked}), [], [skipped], catalog(), {})
    said = (verdict("a", Outcome.PASS), verdict("b", Outcome.ERROR), *of_it)
    assert {one.outcome for one in of_it} == {Outcome.SKIP}
    decision = decide({"a": True, "b": True, "train.oumi": True}, said, {}, "")
    assert (decision.value, decision.reason) == (DecisionValue.INCOMPLETE, "b is ERROR")


def test_what_was_only_recorded_does_not_fill_the_sentence() -> None:
    """Of a thousand nodes there are thousands of pairs: who accepts is told of how many checks the report has such."""
    skips = [replace(RECORDED_ONE, subject=f"n{one}") for one in range(1000)]
    decision = decide(
        {"a": True}, [verdict("a", Outcome.PASS), *skips], {}, "", metrics_without_threshold={"a": ("busbw.*",)}
    )
    told = "of 1 check the report lists figures that were recorded and judged by nothing"
    assert (decision.value, decision.reason) == (DecisionValue.ACCEPTED, f"1 check passed; {told}")


def test_what_failed_is_named_with_its_places() -> None:
    places = [("b", f"n{number}/gpu{number % 3}") for number in (2, 10, 3, 4)] + [("a", CLUSTER), ("b", "n2/gpu2")]
    said = [replace(verdict(check, Outcome.FAIL), subject=place) for check, place in places] + [
        verdict("c", Outcome.PASS)
    ]
    reason = decide(dict.fromkeys(NAMES, True), said, {}, "").reason
    assert reason == "2 checks failed: a, b on n2/gpu2, n10/gpu1, n3/gpu0 and 1 more"


JUDGED = Verdict(check="collectives.all_gather", subject="cluster", metric="busbw.1GiB", outcome=Outcome.PASS)


def measured(check: str, *names: str) -> Measurement:
    metrics = tuple(Metric(name=name, value=1, unit="GB/s", subject="cluster") for name in names)
    return Measurement(check=check, subject="cluster", metrics=metrics)


def test_figures_of_performance_that_no_verdict_is_on_are_told_together() -> None:
    sizes = ("busbw.1GiB", "busbw.1MiB", "busbw.1KiB", "latency.1KiB", "wrong_elements")
    every = [measured(f"collectives.{name}", *sizes) for name in ("all_gather", "broadcast", "reduce")]
    assert metrics_without_threshold(catalog(), every, [JUDGED]) == {
        "collectives.all_gather": ("busbw.* other than 1GiB", "latency.1KiB"),
        "collectives.broadcast": ("busbw.*", "latency.1KiB"),
        "collectives.reduce": ("busbw.*", "latency.1KiB"),
    }


def test_what_did_not_apply_judged_nothing() -> None:
    skipped = replace(JUDGED, outcome=Outcome.SKIP)
    one = measured("collectives.all_gather", "busbw.1GiB")
    assert metrics_without_threshold(catalog(), [one], [skipped]) == {"collectives.all_gather": ("busbw.1GiB",)}
    assert metrics_without_threshold(catalog(), [one], [JUDGED]) == {}


def test_acceptance_says_of_what_it_does_not_speak() -> None:
    recorded = {"a": ("busbw.*", "latency.*"), "b": ("busbw.*", "latency.*"), "c": ("triad",)}
    decision = decide({JUDGED.check: True}, [JUDGED], {}, "", metrics_without_threshold=recorded)
    assert decision.value is DecisionValue.ACCEPTED
    assert (
        decision.reason
        == "1 check passed; of 3 checks the report lists figures that were recorded and judged by nothing"
    )
    assert decision.metrics_without_threshold == recorded
    failed = replace(JUDGED, outcome=Outcome.FAIL)
    assert (
        decide({JUDGED.check: True}, [failed], {}, "", metrics_without_threshold=recorded).metrics_without_threshold
        == recorded
    )
