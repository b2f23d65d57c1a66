from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import JsonValue

from seatrial.checks.base import Check, Context, Options
from seatrial.hardware.bounds import COLLECTIVE
from seatrial.hardware.references import Reference, References, Sku, skus
from seatrial.judge.rules import judge_check
from seatrial.model import (
    Baseline,
    Measurement,
    Metric,
    Observation,
    Outcome,
    Phase,
    ReferenceValue,
    Rule,
    Scope,
    Threshold,
    Verdict,
)

SKU = Sku(
    name="Test GPU",
    nvml_names=("NVIDIA Test",),
    expected={"all_reduce": (ReferenceValue(gpus=4, nodes=1, value=400, unit="GB/s", source="a paper"),)},
)
SPEED = Rule(metric="speed", expect=Threshold.parse(">= 10 GB/s"), meaning="slow is bad", fix="look at the cable")


def never(context: Context, options: Options) -> Iterator[Observation]:
    raise AssertionError("judging measures nothing")


def check(*rules: Rule, scope: Scope = Scope.CLUSTER) -> Check:
    """One of a collective, where a rule has a baseline such as ``x.busbw.1GiB``."""
    timed = {rule.metric: rule.reference for rule in rules if rule.reference and ".busbw." in rule.reference}
    return Check(
        name="c",
        title="C",
        phase=Phase.INTERCONNECT,
        scope=scope,
        metrics={"speed": "GB/s"},
        rules=rules,
        measure=never,
        limit_s=1,
        operation="".join(baseline.partition(".")[0] for baseline in timed.values()),
        bounds=dict.fromkeys(timed, COLLECTIVE),
    )


def measured(
    value: float | None = None, *, subject: str = "cluster", facts: dict[str, JsonValue] | None = None, **more: Any
) -> Measurement:
    metrics = () if value is None else (Metric(name="speed", value=value, unit="GB/s", subject=subject),)
    return Measurement(check="c", subject=subject, metrics=metrics, facts=facts or {}, **more)


def judged(
    what: Check, *measurements: Measurement, expect: Mapping[str, Threshold] | None = None
) -> list[tuple[str, Outcome]]:
    return [(verdict.subject, verdict.outcome) for verdict in verdicts(what, *measurements, expect=expect)]


def verdicts(
    what: Check,
    *measurements: Measurement,
    expect: Mapping[str, Threshold] | None = None,
    site: Baseline | None = None,
) -> list[Verdict]:
    return judge_check(what, measurements, expect or {}, "mine", References(site, [SKU]))


def test_good_and_bad_are_told_apart_with_evidence_and_fix() -> None:
    assert judged(check(SPEED), measured(10)) == [("cluster", Outcome.PASS)]
    (bad,) = verdicts(check(SPEED), measured(9.9))
    assert bad.outcome is Outcome.FAIL
    assert "9.9 GB/s, expected >= 10 GB/s: slow is bad" in bad.message
    assert bad.fix == "look at the cable"
    assert bad.basis_text == "rule: >= 10 GB/s"


def test_the_evidence_of_a_breach_shows_the_facts_that_the_rule_names() -> None:
    rule = SPEED.model_copy(update={"evidence_facts": ("cable", "absent")})
    facts: dict[str, JsonValue] = {"cable": {"port": 7}, "other": 1}
    (bad,) = verdicts(check(rule), measured(9, facts=facts))
    assert bad.evidence == 'speed = 9 GB/s on cluster; cable: {"port": 7}'
    (good,) = verdicts(check(rule), measured(11, facts=facts))
    assert (good.message, good.evidence) == ("speed is 11 GB/s", "")
    (long,) = verdicts(check(rule), measured(9, facts={"cable": "x" * 10_000}))
    assert len(long.evidence) < 700


def test_an_unwise_value_only_warns() -> None:
    rule = SPEED.model_copy(update={"outcome_if_violated": Outcome.WARN})
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
    assert (verdict.outcome, verdict.message) == (Outcome.SKIP, "no GPU")


def test_a_measurement_that_no_rule_judges_is_unjudged() -> None:
    assert judged(check(), measured(3)) == [("cluster", Outcome.UNJUDGED)]


def test_a_rule_applies_only_where_its_facts_hold_and_fails_closed_without_them() -> None:
    rule = SPEED.model_copy(update={"applies_if": {"backend": "nccl"}})
    assert judged(check(rule), measured(1, facts={"backend": "gloo"})) == [("cluster", Outcome.SKIP)]
    assert judged(check(rule), measured(1, facts={"backend": "nccl"})) == [("cluster", Outcome.FAIL)]
    assert judged(check(rule), measured(1)) == [("cluster", Outcome.FAIL)]


def test_the_trial_outranks_the_check_and_says_so() -> None:
    (verdict,) = verdicts(check(SPEED), measured(11), expect={"speed": Threshold.parse("> 12")})
    assert verdict.outcome is Outcome.FAIL
    assert verdict.basis_text == "trial mine: > 12 GB/s"


def test_a_threshold_of_the_trial_on_what_was_not_measured_is_an_error() -> None:
    assert (("cluster", Outcome.ERROR)) in judged(
        check(SPEED), measured(11), expect={"speed.8GiB": Threshold.parse("> 12")}
    )


def test_the_shipped_skus_load_and_every_number_has_a_source() -> None:
    numbers = [expected for sku in skus() for values in sku.expected.values() for expected in values]
    assert numbers
    assert all(expected.source and expected.value > 0 for expected in numbers)
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 4, "nodes": 1}
    found = References(None, skus()).site_or_sku_reference("all_reduce.busbw.8GiB", facts)
    assert isinstance(found, Reference)
    assert found.value == 363.3


FOUR: dict[str, JsonValue] = {"gpu": "NVIDIA Test", "world_size": 4, "nodes": 1}
STRANGE: dict[str, JsonValue] = {"gpu": "NVIDIA Strange", "world_size": 1, "nodes": 1}
BY_BASELINE = Rule(metric="speed", reference="all_reduce", meaning="", fix="")


TOGETHER = Rule(
    metric="speed", compare_with_peers=True, warn_below=0.75, meaning="it shares a port", fix="look at the tree"
)


BOTH = Rule(
    metric="speed",
    reference="all_reduce",
    fail_below=0.85,
    asymmetry_limit=0.95,
    meaning="a lame link",
    fix="nvlink -e",
)


def test_corruption_fails_whatever_a_trial_lets_pass() -> None:
    """A record whose trial was written by hand: on load such a threshold is refused."""
    what = check(Rule(metric="speed", expect=Threshold.parse("== 0"), meaning="corrupted", fix=""))
    wrong = Metric(name="speed", value=5, unit="count", subject="cluster")
    seen = Measurement(check="c", subject="cluster", metrics=(wrong,))
    said = verdicts(what, seen, expect={"speed": Threshold.parse("<= 1000000")})
    assert [(one.outcome, one.basis_text.partition(":")[0]) for one in said] == [
        (Outcome.FAIL, "rule"),
        (Outcome.PASS, "trial mine"),
    ]
    assert said[1].basis is not None
    assert said[1].basis.lax_reason == "the check itself asks for == 0"


def test_a_thousand_nodes_are_judged_in_seconds() -> None:
    what = check(BY_BASELINE, scope=Scope.GPU)
    many = [measured(100 + index % 3, subject=f"n{index // 8}/gpu{index % 8}", facts=STRANGE) for index in range(8192)]
    began = time.process_time()
    assert {one.outcome for one in verdicts(what, *many)} == {Outcome.UNJUDGED}
    assert time.process_time() - began < 5


AT_8GIB = Rule(metric="busbw.8GiB", reference="all_reduce.busbw.8GiB", meaning="the links", fix="look at them")
ONLY = "the trial's options ask for sizes of 1GiB"


def at_1gib(left_out: dict[str, JsonValue] | None = None) -> Measurement:
    metrics = (Metric(name="busbw.1GiB", value=350, unit="GB/s", subject="cluster"),)
    return Measurement(check="c", subject="cluster", metrics=metrics, facts={"left_out": left_out} if left_out else {})


def of_8gib(measurement: Measurement, expect: Mapping[str, Threshold]) -> Verdict:
    found = judge_check(check(AT_8GIB), [measurement], expect, "my trial")
    return next(one for one in found if one.metric == "busbw.8GiB")


def test_a_size_that_was_not_asked_for_is_passed_over_where_the_trial_has_a_threshold_at_another() -> None:
    at_another = {"busbw.1GiB": Threshold.parse("> 300 GB/s")}
    verdict = of_8gib(at_1gib({"busbw.8GiB": ONLY}), expect=at_another)
    assert verdict.outcome is Outcome.SKIP
    assert verdict.message == f"c busbw.8GiB is not judged: {ONLY}, and it has a threshold on busbw.1GiB"
    assert verdict.basis_text, "the decision tells of what nothing was held to"


def test_a_size_that_was_not_asked_for_is_missed_where_nothing_judges_another() -> None:
    of_another_figure = {"latency.1GiB": Threshold.parse("< 9000 us")}
    verdict = of_8gib(at_1gib({"busbw.8GiB": ONLY}), expect=of_another_figure)
    assert verdict.outcome is Outcome.ERROR
    assert f"({ONLY}, with a threshold on none of them)" in verdict.message


def test_a_size_that_was_asked_for_and_is_missing_is_missed_whatever_else_has_a_threshold() -> None:
    at_another = {"busbw.1GiB": Threshold.parse("> 300 GB/s")}
    verdict = of_8gib(at_1gib(), expect=at_another)
    assert verdict.outcome is Outcome.ERROR


def test_what_could_not_be_measured_may_be_an_error_by_its_rule() -> None:
    refused = SPEED.model_copy(update={"outcome_if_violated": Outcome.ERROR})
    assert [one.outcome for one in judge_check(check(refused), [measured(9)], {}, "my trial")] == [Outcome.ERROR]
