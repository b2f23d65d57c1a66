"""The form in which a check declares its metrics, and what its answers must be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from seatrial.checks.declare import (
    Answer,
    absent,
    answers,
    forbidden,
    is_possible,
    metric,
    not_requested,
    rule,
    unreadable,
    value,
)
from seatrial.model import Absent, Fact, Metric, Outcome, SeatrialError, Why
from seatrial.model.rule import OPPOSITE, PEERS, REFERENCE, Condition

DECLARED = (
    metric("up", "yes", "a node is down", "start it"),
    metric("speed.*", unit="GB/s", meaning="speed by size", per="rank"),
    metric("speed.8GiB", ">= 0.90 reference", "slow", "look", unit="GB/s", reference="speed", per="rank"),
    metric("errors", "== 0 errors", "broken", "replace it"),
)


def observed(*given: Answer) -> list[Any]:
    return list(answers(given, DECLARED, "a.check", {None: "cluster", "rank": "n0/gpu3"}))


def test_a_value_and_its_samples_are_stored_with_seven_digits_and_the_value_stays_within_their_range() -> None:
    noisy = 681.2345678901234
    (stored,) = observed(value("speed.8GiB", noisy)._replace(samples=(noisy, noisy)))
    assert (stored.value, stored.samples) == (681.2346, (681.2346, 681.2346))


def test_a_value_without_samples_keeps_all_digits() -> None:
    (stored,) = observed(value("speed.8GiB", 681.2345678901234))
    assert (stored.value, stored.samples) == (681.2345678901234, ())


@pytest.mark.parametrize(
    ("text", "limits", "reference"),
    [
        ("== 0 errors", {"": 0}, ""),
        (">= 0.90 reference", {REFERENCE: 0.9}, "key"),
        (">= 0.85 peers", {PEERS: 0.85}, ""),
        ("> 0.75 h2d_single / gpus", {"h2d_single / gpus": 0.75}, ""),
        ((">= 0.90 reference", ">= 0.80 peers"), {REFERENCE: 0.9, PEERS: 0.8}, "key"),
    ],
)
def test_only_a_rule_with_a_share_of_the_reference_value_has_its_key(
    text: str | tuple[str, ...], limits: dict[str, float], reference: str
) -> None:
    (made,) = metric("m", text, reference="key").rules
    assert {limit.base: limit.value for limit in made.limits} == limits
    assert {limit.outcome for limit in made.limits} == {Outcome.FAIL}
    assert made.reference == reference


def test_shares_make_one_rule_and_each_threshold_its_own() -> None:
    (relative,) = metric("m", ">= 0.85 reference", warn=(">= 0.95 reference", ">= 0.96 opposite"), reference="k").rules
    assert [relative.share(REFERENCE), relative.share(REFERENCE, Outcome.WARN)] == [0.85, 0.95]
    assert [relative.share(OPPOSITE), relative.share(OPPOSITE, Outcome.WARN)] == [None, 0.96]
    (peers,) = metric("m", warn=">= 0.70 peers").rules
    assert (peers.only_warns_by_peers, peers.share(PEERS, Outcome.WARN), peers.share(PEERS)) == (True, 0.7, None)
    limits = [
        (str(limit), limit.outcome) for each in metric("m", "<= 98 %", warn="<= 90 %").rules for limit in each.limits
    ]
    assert limits == [("<= 98 %", Outcome.FAIL), ("<= 90 %", Outcome.WARN)]


def test_condition_is_that_of_all_rules() -> None:
    when = "device == cuda and nodes >= 2"
    rules = metric("m", "<= 98 %", warn="<= 90 %", when=when).rules
    assert [each.when for each in rules] == [Condition.of(when)] * 2


def test_further_rules_have_their_own_condition_and_by_default_the_words_of_the_metric() -> None:
    also = (rule("<= 2 x", when="device == cpu", outcome=Outcome.WARN), rule("<= 9 x", "far too slow", "stop"))
    first, second, third = metric("m", "<= 1 x", "slow", "look", when="device == cuda", also=also).rules
    assert [str(each.when) for each in (first, second, third)] == ["device == cuda", "device == cpu", ""]
    assert (second.meaning, second.fix, second.limits[0].outcome) == ("slow", "look", Outcome.WARN)
    assert (third.meaning, third.fix) == ("far too slow", "stop")


def test_metric_without_a_rule() -> None:
    recorded = metric("m", unit="GB/s", meaning="its speed")
    assert (recorded.rules, recorded.unit) == ((), "GB/s")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("about 5", {}, "'about 5' is not a threshold"),
        (">= 0.9 of reference", {"unit": "GB/s"}, "no known base"),
        (">= 0.9 peer", {}, "0.90 peers"),
        ("yes", {"when": "device == CUDA"}, "device is never 'CUDA'"),
        ("yes", {"when": "nodes == 2"}, "no condition"),
        ("yes", {"per": "gpus"}, "per='gpus' is none of"),
        (">= 0.90 reference", {}, "needs reference=KEY"),
        ("<= 1 s", {"unit": "ms"}, "different units: ms, s"),
        ("<= 1 s", {"when": "device is cuda"}, "'device is cuda' is no condition"),
    ],
)
def test_declaration_that_cannot_be_read(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SeatrialError, match=message):
        metric("m", text, **options)


def test_values_have_the_declared_unit_and_by_default_the_subject_of_the_check_or_of_the_rank() -> None:
    given = observed(
        value("up", True), value("speed.1KiB", (3.0, 1.0, 2.0)), value("errors", 2, "n1", evidence={"line": "Xid 79"})
    )
    assert given == [
        Metric(name="up", value=1, unit="bool", subject="cluster"),
        Metric(name="speed.1KiB", value=2, unit="GB/s", subject="n0/gpu3", samples=(3, 1, 2)),
        Metric(name="errors", value=2, unit="errors", subject="n1", evidence={"line": "Xid 79"}),
    ]


def test_reasons_why_there_is_no_value() -> None:
    given = observed(
        absent("up", "no Slurm"),
        forbidden("errors", "root only", "n1"),
        unreadable("speed.8GiB", "out of memory"),
        not_requested("speed.1KiB", "not in the option sizes"),
    )
    assert [(each.metric, each.why, each.subject) for each in given] == [
        ("up", Why.DOES_NOT_APPLY, ""),
        ("errors", Why.NOT_PERMITTED, "n1"),
        ("speed.8GiB", Why.UNREADABLE, "n0/gpu3"),
        ("speed.1KiB", Why.NOT_REQUESTED, "n0/gpu3"),
    ]


def test_pattern_stands_for_metrics_without_an_answer() -> None:
    given = observed(value("up", True), absent("*", "no GPU"))
    assert [each.metric for each in given if isinstance(each, Absent)] == ["speed.*", "speed.8GiB", "errors"]


def test_facts_pass_unchanged() -> None:
    fact = Fact(name="x", value=1)
    assert observed(fact) == [fact]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([value("sped.8GiB", 1)], "declares no metric sped.8GiB"),
        ([absent("sped.*", "no GPU")], r"declares no metric sped\.\*"),
        ([value("up", True), value("up", True)], "two answers for up on cluster"),
        ([value("errors", 1, "n1"), value("errors", 0, "n1")], "two answers for errors on n1"),
        ([value("up", True), absent("up", "no Slurm")], "two answers for up"),
        ([absent("up", "no Slurm"), value("up", True)], "two answers for up on cluster: no Slurm; a value"),
        ([absent("up", "no Slurm"), value("up", True, "n1")], "two answers for up on n1: no Slurm; a value"),
        ([absent("up", "no Slurm"), unreadable("up", "timeout")], "two answers for up"),
        ([value("errors", float("nan"))], "errors on cluster is nan"),
        ([value("errors", (1.0, float("nan"), 2.0))], "errors on cluster is"),
        ([value("errors", None)], "errors on cluster is None, not a finite number"),  # type: ignore[arg-type]
        ([value("speed.1KiB", True)], "speed.1KiB on n0/gpu3 is True, not a finite number"),
        ([value("up", 3)], "up on cluster is 3, not yes or no"),
        ([value("errors", float("inf"))], "errors on cluster is inf"),
    ],
)
def test_contradicting_answers(given: Iterable[Answer], message: str) -> None:
    with pytest.raises(SeatrialError, match=message):
        observed(*given)


def test_observations_before_an_error_are_kept() -> None:
    def measure() -> Iterator[Answer]:
        yield value("up", True)
        yield value("up", True)

    given = answers(measure(), DECLARED, "a.check", {None: "cluster"})
    assert next(given) == Metric(name="up", value=1, unit="bool", subject="cluster")
    with pytest.raises(SeatrialError):
        next(given)


@pytest.mark.parametrize(
    ("fact", "accepted", "rejected"),
    [
        ("x", ["yes", "no"], ["yes: new", "no: too old", "not_supported", "permission_denied: root only", "No", 1]),
        ("backend", ["nccl"], ["no", "no: NCCL", "nccl: 2.28", "nccl\n", "mpi"]),
        ("layers", ["all", "12"], ["", 12, True, None, [], {}, 1.0]),
    ],
)
def test_values_of_a_fact(fact: str, accepted: list[Any], rejected: list[Any]) -> None:
    assert all(is_possible(fact, each) for each in accepted)
    assert not any(is_possible(fact, each) for each in rejected)
