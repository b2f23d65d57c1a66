"""The decision on a trial fails closed for any verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.judge import judge
from seatrial.judge.decision import decide, metrics_without_threshold
from seatrial.model import (
    CLUSTER,
    TIME_LIMIT,
    DecisionValue,
    Measurement,
    Metric,
    Outcome,
    Reason,
    ReasonCode,
    Verdict,
)

NAMES = ("a", "b", "c")
WITHOUT_THRESHOLD = Verdict(
    "a", "n0", Outcome.SKIP, "busbw.1GiB", (Reason.NO_THRESHOLD,), "no SKU data for X", 1.0, "GB/s"
)
random_verdicts = st.lists(
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


def decision_value(
    *verdicts: Verdict, required: dict[str, bool] | None = None, excluded_checks: dict[str, str] | None = None
) -> DecisionValue:
    return decide(required or {"a": True}, verdicts, excluded_checks or {}, "").value


@pytest.mark.parametrize("required", [True, False])
def test_check_excluded_by_the_time_limit_prevents_acceptance(required: bool) -> None:
    excluded = Verdict("b", CLUSTER, Outcome.SKIP, reasons=(Reason.EXCLUDED,), detail=TIME_LIMIT)
    decision = decide({"a": True, "b": required}, [verdict("a", Outcome.PASS), excluded], {"b": TIME_LIMIT}, "")
    assert decision.value is DecisionValue.INCOMPLETE
    assert "excluded by --time-limit: b" in decision.reason


@given(random_verdicts, st.dictionaries(st.sampled_from(NAMES), st.booleans(), min_size=1))
def test_accepted_only_if_every_required_check_is_measured_and_good(
    verdicts: list[Verdict], required: dict[str, bool]
) -> None:
    decision = decide(required, verdicts, {}, "")
    outcomes = {
        name: [verdict.outcome for verdict in verdicts if verdict.check == name] for name in required if required[name]
    }
    if any(verdict.outcome is Outcome.FAIL for verdict in verdicts):
        assert decision.value is DecisionValue.REJECTED
    elif decision.value is DecisionValue.ACCEPTED:
        assert all(outcomes.values()), "a required check without any verdict"
        all_outcomes = {outcome for of_check in outcomes.values() for outcome in of_check}
        assert not {Outcome.ERROR, Outcome.UNJUDGED} & all_outcomes
        assert {Outcome.PASS, Outcome.WARN} & all_outcomes, "only skipped checks"
    else:
        assert decision.reason


@pytest.mark.parametrize(
    ("outcomes", "value"),
    [
        ((Outcome.PASS,), DecisionValue.ACCEPTED),
        ((Outcome.WARN,), DecisionValue.ACCEPTED),
        ((Outcome.FAIL, Outcome.PASS), DecisionValue.REJECTED),
        ((Outcome.PASS, Outcome.ERROR), DecisionValue.INCOMPLETE),
        ((Outcome.PASS, Outcome.UNJUDGED), DecisionValue.INCOMPLETE),
        ((Outcome.SKIP,), DecisionValue.INCOMPLETE),
        ((), DecisionValue.INCOMPLETE),
    ],
)
def test_decision_by_the_outcomes_of_a_required_check(outcomes: tuple[Outcome, ...], value: DecisionValue) -> None:
    assert decision_value(*(verdict("a", outcome) for outcome in outcomes)) is value


def test_without_required_checks_the_trial_is_incomplete() -> None:
    assert decision_value(verdict("a", Outcome.PASS), required={"a": False}) is DecisionValue.INCOMPLETE


def test_check_that_is_not_required_may_be_missing_but_must_not_fail() -> None:
    required = {"a": True, "b": False}
    passed = verdict("a", Outcome.PASS)
    assert decision_value(passed, verdict("b", Outcome.ERROR), required=required) is DecisionValue.ACCEPTED
    assert decision_value(passed, verdict("b", Outcome.FAIL), required=required) is DecisionValue.REJECTED
    decision = decide(required, [passed, verdict("b", Outcome.ERROR)], {}, "")
    assert decision.reason.endswith("b is ERROR")


def test_excluded_required_check_keeps_the_trial_incomplete() -> None:
    verdicts = (verdict("a", Outcome.PASS), verdict("b", Outcome.SKIP))
    required = {"a": True, "b": True}
    assert decision_value(*verdicts, required=required, excluded_checks={"b": "--skip"}) is DecisionValue.INCOMPLETE
    assert decision_value(*verdicts, required=required) is DecisionValue.ACCEPTED


def test_excluded_check_that_is_not_required_is_not_counted_as_not_applicable() -> None:
    verdicts = [verdict("a", Outcome.PASS), verdict("b", Outcome.SKIP), verdict("c", Outcome.SKIP)]
    decision = decide({"a": True, "b": False, "c": False}, verdicts, {"b": "--skip"}, "")
    assert decision.value is DecisionValue.ACCEPTED
    assert "1 not applicable (c)" in decision.reason
    assert "1 excluded (b)" in decision.reason


def test_checks_that_were_not_measured_are_one_reason() -> None:
    def not_measured(name: str) -> Verdict:
        return replace(verdict(name, Outcome.ERROR), reasons=(Reason.NOT_MEASURED,))

    required = dict.fromkeys("abc", True)
    rest = decide(required, [verdict("a", Outcome.PASS), not_measured("b"), not_measured("c")], {}, "", ("stopped",))
    assert rest.reason == "stopped; not measured: b, c"
    none = decide(required, [not_measured(name) for name in required], {}, "", ("stopped",))
    assert (none.value, none.reason) == (DecisionValue.INCOMPLETE, "stopped; no required check was measured")


def test_stopped_trial_is_incomplete_for_that_reason() -> None:
    decision = decide({"a": True}, [verdict("a", Outcome.PASS)], {}, "", ("interrupted", ""))
    assert (decision.value, decision.reason) == (DecisionValue.INCOMPLETE, "interrupted")


@pytest.mark.parametrize(
    ("cpu_only", "requested", "value", "code"),
    [
        (True, False, DecisionValue.INCOMPLETE, ReasonCode.NO_GPU),
        (True, True, DecisionValue.ACCEPTED, None),
        (False, False, DecisionValue.ACCEPTED, None),
    ],
)
def test_trial_without_gpus_is_accepted_only_on_request(
    cpu_only: bool, requested: bool, value: DecisionValue, code: ReasonCode | None
) -> None:
    passed = [verdict("a", Outcome.PASS)]
    decision = decide({"a": True}, passed, {}, "", cpu_only=cpu_only, cpu_only_requested=requested)
    assert (decision.value, decision.reason_code, decision.cpu_only) == (value, code, cpu_only)
    assert ("--gpus-per-node 0" in decision.reason) is (code is not None)


def test_failure_without_gpus_is_rejected() -> None:
    decision = decide({"a": True}, [verdict("a", Outcome.FAIL)], {}, "", cpu_only=True)
    assert (decision.value, decision.reason_code) == (DecisionValue.REJECTED, None)


def test_unknown_check_is_unjudged() -> None:
    config = Config(name="old", checks={"gone.check": CheckSettings(), "lost.check": CheckSettings()})
    verdicts = judge(config, [], [], {}, {})
    assert {(verdict.outcome, verdict.reasons) for verdict in verdicts} == {(Outcome.UNJUDGED, (Reason.NO_RULE,))}
    assert [verdict.check for verdict in verdicts] == ["gone.check", "lost.check"]


@pytest.mark.parametrize(("may_skip", "value"), [(False, DecisionValue.INCOMPLETE), (True, DecisionValue.ACCEPTED)])
def test_threshold_on_a_skipped_check_is_in_the_reason_of_the_decision(may_skip: bool, value: DecisionValue) -> None:
    settings = CheckSettings.model_validate({"expect": {"busbw.8GiB": "> 350 GB/s"}, "may_skip": may_skip})
    name = "collectives.all_reduce"
    config = Config(name="t", checks={name: settings})
    skipped = Measurement(check=name, subject=CLUSTER, skipped="needs 2 ranks, this placement has 1")
    verdicts = judge(config, [], [skipped], catalog(), {})
    (on_threshold,) = [verdict for verdict in verdicts if verdict.metric]
    decision = decide({"a": True, name: True}, [verdict("a", Outcome.PASS), *verdicts], {}, "")
    assert decision.value is value
    assert on_threshold.reasons == (Reason.THRESHOLD_NOT_EVALUATED,)
    assert decision.reason.endswith(on_threshold.message)
    for text in (name, "busbw.8GiB > 350 GB/s", "needs 2 ranks, this placement has 1"):
        assert text in on_threshold.message


def test_check_that_may_skip_is_no_reason_for_incomplete() -> None:
    settings = CheckSettings.model_validate({"expect": {"wall_seconds": "< 1200 s"}, "may_skip": True})
    skipped = Measurement(check="train.oumi", subject=CLUSTER, skipped="options.command names no executable")
    of_oumi = judge(Config(name="t", checks={"train.oumi": settings}), [], [skipped], catalog(), {})
    assert {verdict.outcome for verdict in of_oumi} == {Outcome.SKIP}
    verdicts = (verdict("a", Outcome.PASS), verdict("b", Outcome.ERROR), *of_oumi)
    decision = decide({"a": True, "b": True, "train.oumi": True}, verdicts, {}, "")
    assert (decision.value, decision.reason) == (DecisionValue.INCOMPLETE, "b is ERROR")


def test_metrics_without_threshold_are_counted_in_the_reason() -> None:
    """A thousand nodes have thousands of pairs; the reason names the number of checks only."""
    skips = [replace(WITHOUT_THRESHOLD, subject=f"n{number}") for number in range(1000)]
    verdicts = [verdict("a", Outcome.PASS), *skips]
    decision = decide({"a": True}, verdicts, {}, "", metrics_without_threshold={"a": ("busbw.*",)})
    assert decision.value is DecisionValue.ACCEPTED
    assert "1 check has metrics without a threshold" in decision.reason
    assert len(decision.reason) < 100


def test_failed_checks_are_named_with_their_subjects() -> None:
    subjects = [("b", f"n{number}/gpu{number % 3}") for number in (2, 10, 3, 4)] + [("a", CLUSTER), ("b", "n2/gpu2")]
    verdicts = [replace(verdict(check, Outcome.FAIL), subject=subject) for check, subject in subjects]
    reason = decide(dict.fromkeys(NAMES, True), [*verdicts, verdict("c", Outcome.PASS)], {}, "").reason
    assert reason == "2 checks failed: a, b on n2/gpu2, n10/gpu1, n3/gpu0 and 1 more"


EVALUATED = Verdict(check="collectives.all_gather", subject="cluster", metric="busbw.1GiB", outcome=Outcome.PASS)


def measured(check: str, *names: str) -> Measurement:
    metrics = tuple(Metric(name=name, value=1, unit="GB/s", subject="cluster") for name in names)
    return Measurement(check=check, subject="cluster", metrics=metrics)


def test_metrics_without_threshold_are_grouped_by_family() -> None:
    names = ("busbw.1GiB", "busbw.1MiB", "busbw.1KiB", "latency.1KiB", "wrong_elements")
    measurements = [measured(f"collectives.{operation}", *names) for operation in ("all_gather", "broadcast", "reduce")]
    assert metrics_without_threshold(catalog(), measurements, [EVALUATED]) == {
        "collectives.all_gather": ("busbw.* other than 1GiB", "latency.1KiB"),
        "collectives.broadcast": ("busbw.*", "latency.1KiB"),
        "collectives.reduce": ("busbw.*", "latency.1KiB"),
    }


def test_skipped_verdict_is_no_evaluation() -> None:
    measurement = measured(EVALUATED.check, EVALUATED.metric)
    skipped = replace(EVALUATED, outcome=Outcome.SKIP)
    assert metrics_without_threshold(catalog(), [measurement], [skipped]) == {EVALUATED.check: (EVALUATED.metric,)}
    assert metrics_without_threshold(catalog(), [measurement], [EVALUATED]) == {}


@pytest.mark.parametrize(
    ("outcome", "value"), [(Outcome.PASS, DecisionValue.ACCEPTED), (Outcome.FAIL, DecisionValue.REJECTED)]
)
def test_decision_lists_the_metrics_without_threshold(outcome: Outcome, value: DecisionValue) -> None:
    metrics = {"a": ("busbw.*", "latency.*"), "b": ("busbw.*", "latency.*"), "c": ("triad",)}
    verdicts = [replace(EVALUATED, outcome=outcome)]
    decision = decide({EVALUATED.check: True}, verdicts, {}, "", metrics_without_threshold=metrics)
    assert (decision.value, decision.metrics_without_threshold) == (value, metrics)
    assert ("3 checks" in decision.reason) is (outcome is Outcome.PASS)


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.FAIL, Outcome.ERROR])
def test_every_reason_ends_with_the_notes(outcome: Outcome) -> None:
    decision = decide({"a": True}, [verdict("a", outcome)], {}, "", notes=("baseline lab", "override"))
    assert decision.reason.endswith("; baseline lab; override")
    assert decision.reason.partition("; ")[0]


def test_untested_nodes_prevent_acceptance_and_are_named() -> None:
    missing = "2 of 3 nodes tested, missing nodes: node1 (IDLE+DRAIN: fan broken)"
    decision = decide({"a": True}, [verdict("a", Outcome.PASS)], {}, "", untested_nodes=missing)
    assert (decision.value, decision.reason) == (DecisionValue.INCOMPLETE, missing)
    decision = decide({"a": True}, [verdict("a", Outcome.FAIL)], {}, "", untested_nodes=missing)
    assert decision.value is DecisionValue.REJECTED
    assert missing in decision.reason


def test_rejected_names_what_ended_the_trial() -> None:
    decision = decide({"a": True, "b": True}, [verdict("a", Outcome.FAIL)], {}, "", blockers=("interrupted", ""))
    assert decision.reason == "1 check failed: a on n0; interrupted"
