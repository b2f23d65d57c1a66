from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import JsonValue

from seatrial.checks.base import Check, Options, Place
from seatrial.judge.baselines import Expected, Sku, find, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Limit, Measurement, Metric, Observation, Outcome, Phase, Rule, Scope, Verdict

SKU = Sku(
    name="Test GPU",
    nvml_names=("NVIDIA Test",),
    expected={"all_reduce": (Expected(gpus=4, nodes=1, value=400, unit="GB/s", source="a paper"),)},
)
SPEED = Rule(metric="speed", expect=Limit.parse(">= 10 GB/s"), why="slow is bad", remedy="look at the cable")


def never(place: Place, options: Options) -> Iterator[Observation]:
    raise AssertionError("judging measures nothing")


def check(*rules: Rule, scope: Scope = Scope.CLUSTER) -> Check:
    return Check(
        name="c",
        title="C",
        phase=Phase.INTERCONNECT,
        scope=scope,
        metrics={"speed": "GB/s"},
        rules=rules,
        measure=never,
        limit_s=1,
    )


def measured(
    value: float | None = None, *, subject: str = "cluster", facts: dict[str, JsonValue] | None = None, **more: Any
) -> Measurement:
    metrics = () if value is None else (Metric(name="speed", value=value, unit="GB/s", subject=subject),)
    return Measurement(check="c", subject=subject, metrics=metrics, facts=facts or {}, **more)


def judged(
    what: Check, *measurements: Measurement, expect: Mapping[str, Limit] | None = None
) -> list[tuple[str, Outcome]]:
    return [(verdict.subject, verdict.outcome) for verdict in verdicts(what, *measurements, expect=expect)]


def verdicts(what: Check, *measurements: Measurement, expect: Mapping[str, Limit] | None = None) -> list[Verdict]:
    return judge_check(what, measurements, expect or {}, "mine", [SKU])


def test_good_and_bad_are_told_apart_with_evidence_and_remedy() -> None:
    assert judged(check(SPEED), measured(10)) == [("cluster", Outcome.PASS)]
    (bad,) = verdicts(check(SPEED), measured(9.9))
    assert bad.outcome is Outcome.FAIL
    assert "9.9 GB/s, expected >= 10 GB/s: slow is bad" in bad.reason
    assert bad.remedy == "look at the cable"
    assert bad.judged_by == "rule: >= 10 GB/s"


def test_the_evidence_of_a_breach_shows_the_facts_that_the_rule_names() -> None:
    rule = SPEED.model_copy(update={"shows": ("cable", "absent")})
    facts: dict[str, JsonValue] = {"cable": {"port": 7}, "other": 1}
    (bad,) = verdicts(check(rule), measured(9, facts=facts))
    assert bad.evidence == 'speed = 9 GB/s on cluster; cable: {"port": 7}'
    (good,) = verdicts(check(rule), measured(11, facts=facts))
    assert good.evidence == "speed = 11 GB/s on cluster"
    (long,) = verdicts(check(rule), measured(9, facts={"cable": "x" * 10_000}))
    assert len(long.evidence) < 700


def test_an_unwise_value_only_warns() -> None:
    rule = SPEED.model_copy(update={"breach": Outcome.WARN})
    assert judged(check(rule), measured(1)) == [("cluster", Outcome.WARN)]


def test_what_nobody_measured_is_an_error() -> None:
    assert judged(check(SPEED)) == [("cluster", Outcome.ERROR)]
    assert judged(check(SPEED), measured(None)) == [("cluster", Outcome.ERROR)]


def test_each_node_must_measure_for_itself() -> None:
    what = check(SPEED, scope=Scope.NODE)
    assert judged(what, measured(11, subject="n0"), measured(None, subject="n1")) == [
        ("n0", Outcome.PASS),
        ("n1", Outcome.ERROR),
    ]


def test_an_error_is_told_once_beside_what_was_measured_before_it() -> None:
    broken = measured(3, error="RuntimeError: gone")
    assert judged(check(SPEED), broken) == [("cluster", Outcome.ERROR), ("cluster", Outcome.FAIL)]
    assert judged(check(SPEED), measured(None, error="RuntimeError: gone")) == [("cluster", Outcome.ERROR)]


def test_a_check_that_does_not_apply_is_skipped_with_its_reason() -> None:
    (verdict,) = verdicts(check(SPEED), measured(None, skipped="no GPU"))
    assert (verdict.outcome, verdict.reason) == (Outcome.SKIP, "no GPU")


def test_a_measurement_that_no_rule_judges_is_unjudged() -> None:
    assert judged(check(), measured(3)) == [("cluster", Outcome.UNJUDGED)]


def test_a_rule_applies_only_where_its_facts_hold_and_fails_closed_without_them() -> None:
    rule = SPEED.model_copy(update={"where": {"backend": "nccl"}})
    assert judged(check(rule), measured(1, facts={"backend": "gloo"})) == [("cluster", Outcome.SKIP)]
    assert judged(check(rule), measured(1, facts={"backend": "nccl"})) == [("cluster", Outcome.FAIL)]
    assert judged(check(rule), measured(1)) == [("cluster", Outcome.FAIL)]


def test_the_trial_outranks_the_check_and_says_so() -> None:
    (verdict,) = verdicts(check(SPEED), measured(11), expect={"speed": Limit.parse("> 12")})
    assert verdict.outcome is Outcome.FAIL
    assert verdict.judged_by == "trial mine: > 12 GB/s"


def test_a_threshold_of_the_trial_on_what_was_not_measured_is_an_error() -> None:
    assert (("cluster", Outcome.ERROR)) in judged(
        check(SPEED), measured(11), expect={"speed.8GiB": Limit.parse("> 12")}
    )


@pytest.mark.parametrize(
    ("value", "outcome"), [(400, Outcome.PASS), (379, Outcome.WARN), (361, Outcome.WARN), (359, Outcome.FAIL)]
)
def test_a_baseline_judges_by_shares_and_names_its_source(value: float, outcome: Outcome) -> None:
    rule = Rule(metric="speed", baseline="all_reduce", why="", remedy="")
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA Test", "world_size": 4, "nodes": 1}
    (verdict,) = verdicts(check(rule), measured(value, facts=facts))
    assert verdict.outcome is outcome
    assert "a paper" in verdict.judged_by


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"gpu": "NVIDIA Testx", "world_size": 4, "nodes": 1}, "no SKU data for NVIDIA Testx"),
        ({"gpu": "NVIDIA Test", "world_size": 8, "nodes": 1}, "for 8 GPUs on 1 nodes"),
        ({"world_size": 4, "nodes": 1}, "no SKU data for an unnamed device"),
    ],
)
def test_unknown_hardware_is_unjudged_never_guessed(facts: dict[str, JsonValue], words: str) -> None:
    rule = Rule(metric="speed", baseline="all_reduce", why="", remedy="")
    (verdict,) = verdicts(check(rule), measured(1e9, facts=facts))
    assert verdict.outcome is Outcome.UNJUDGED
    assert words in verdict.reason


def test_the_shipped_skus_load_and_every_number_has_a_source() -> None:
    numbers = [expected for sku in skus() for values in sku.expected.values() for expected in values]
    assert numbers
    assert all(expected.source and expected.value > 0 for expected in numbers)
    found = find("all_reduce.busbw.8GiB", {"gpu": "NVIDIA H200", "world_size": 4, "nodes": 1}, skus())
    assert not isinstance(found, str)
    assert found[1].value == 363.3
