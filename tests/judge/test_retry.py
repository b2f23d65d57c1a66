"""One measurement alone condemns no hardware, two do; and nothing is accepted because the second could not be made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.base import Check, Context, Options
from seatrial.config.schema import CheckSettings, Config
from seatrial.judge import checks_to_retry, judge
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

SPEED = Rule(metric="speed", expect=Threshold.parse(">= 10 GB/s"), meaning="slow is bad", fix="look at the cable")
WRONG = Rule(metric="wrong", expect=Threshold.parse("== 0"), meaning="data is corrupted", fix="train nothing")
FACTS = {"gpu": "NVIDIA Strange", "world_size": 1, "nodes": 1}


def never(context: Context, options: Options) -> Iterator[Observation]:
    raise AssertionError("judging measures nothing")


def check(*rules: Rule, scope: Scope = Scope.GPU, performance: tuple[str, ...] = ("sp*",)) -> Check:
    return Check(
        name="c",
        title="C",
        phase=Phase.INTERCONNECT,
        scope=scope,
        metrics={"speed": "GB/s", "wrong": "count"},
        rules=rules or (SPEED, WRONG),
        measure=never,
        limit_s=1,
        performance_metrics=performance,
    )


def measured(speed: float, where: str = "n0/gpu0", wrong: int = 0, **more: Any) -> Measurement:
    figures = (("speed", speed, "GB/s"), ("wrong", wrong, "count"))
    metrics = tuple(Metric(name=name, value=value, unit=unit, subject=where) for name, value, unit in figures)
    return Measurement(check="c", subject=where, metrics=metrics, facts=FACTS, **more)


def again(speed: float, where: str = "n0/gpu0", wrong: int = 0, **more: Any) -> Measurement:
    one = measured(speed, where, wrong, again=True, **more)
    return one.model_copy(update={"facts": {**FACTS, "retry": "another rank"}})


CONFIG = Config(name="t", checks={"c": CheckSettings()})


def verdicts(
    own: list[Measurement], repeats: list[Measurement], what: Check | None = None, site: Baseline | None = None
) -> list[Verdict]:
    return list(judge(CONFIG, [], own, {"c": what or check()}, {}, site, retries=repeats))


def on_speed(
    own: list[Measurement], repeats: list[Measurement], what: Check | None = None, site: Baseline | None = None
) -> list[Verdict]:
    return [one for one in verdicts(own, repeats, what, site) if one.metric == "speed"]


def test_what_falls_short_twice_fails_with_both_figures() -> None:
    (bad,) = on_speed([measured(9)], [again(8)])
    assert bad.outcome is Outcome.FAIL
    assert bad.message == "speed is 9 GB/s, expected >= 10 GB/s; reproduced (9 GB/s, then 8 GB/s): slow is bad"
    assert bad.evidence == "speed = 9 GB/s on n0/gpu0; measured again (another rank): speed = 8 GB/s on n0/gpu0"
    assert bad.fix == "look at the cable"


def test_what_falls_short_once_only_warns() -> None:
    (lifted,) = on_speed([measured(9)], [again(11)])
    assert lifted.outcome is Outcome.WARN
    assert "; not reproduced (9 GB/s, then 11 GB/s), worth looking at: slow is bad" in lifted.message


def test_what_falls_short_the_second_time_only_warns_too() -> None:
    first, second = on_speed(
        [measured(9, "n0/gpu0"), measured(11, "n0/gpu1")], [again(8, "n0/gpu0"), again(9, "n0/gpu1")]
    )
    assert (first.outcome, second.outcome) == (Outcome.FAIL, Outcome.WARN)
    assert "; the second time only (11 GB/s, then 9 GB/s)" in second.message


def test_a_fail_without_a_second_measurement_stays_one() -> None:
    (alone,) = on_speed([measured(9)], [])
    assert alone.outcome is Outcome.FAIL
    assert "; not repeated: slow is bad" in alone.message


def test_of_what_no_repetition_excuses_it_is_not_said_that_there_was_none() -> None:
    (bad,) = [one for one in verdicts([measured(11, wrong=1)], []) if one.metric == "wrong"]
    assert bad.outcome is Outcome.FAIL
    assert "not repeated" not in bad.message


def test_of_a_repetition_that_is_still_to_come_nothing_is_said() -> None:
    (first,) = [
        one for one in judge(CONFIG, [], [measured(9)], {"c": check()}, {}, retries=None) if one.metric == "speed"
    ]
    assert first.outcome is Outcome.FAIL
    assert first.message == "speed is 9 GB/s, expected >= 10 GB/s: slow is bad"


@pytest.mark.parametrize(
    ("repeats", "words"),
    [
        ([again(20, error="NCCL: gone")], "n0/gpu0: NCCL: gone"),
        ([again(20, skipped="no GPU")], "n0/gpu0: no GPU"),
        ([again(20, "n7/gpu0")], "only n7/gpu0"),
    ],
)
def test_a_second_measurement_that_is_none_lifts_nothing(repeats: list[Measurement], words: str) -> None:
    (bad,) = on_speed([measured(9)], repeats)
    assert bad.outcome is Outcome.FAIL
    assert "; not repeated, though it was tried: slow is bad" in bad.message
    assert bad.evidence.endswith(f"; measured again: {words}")


def test_a_second_measurement_of_some_places_lifts_nothing() -> None:
    own = [measured(9, "n0/gpu0"), measured(11, "n0/gpu1")]
    assert [one.outcome for one in on_speed(own, [again(20, "n0/gpu0")])] == [Outcome.FAIL, Outcome.PASS]
    broken = [again(20, "n0/gpu0"), again(20, "n0/gpu1", error="it fell off the bus")]
    assert [one.outcome for one in on_speed(own, broken)] == [Outcome.FAIL, Outcome.PASS]


def test_a_second_measurement_without_the_metric_lifts_nothing() -> None:
    empty = again(0).model_copy(update={"metrics": again(0).metrics[1:]})
    assert [one.outcome for one in on_speed([measured(9)], [empty])] == [Outcome.FAIL]


def test_corruption_seen_once_is_corruption_whenever_it_was() -> None:
    own, repeats = [measured(9, wrong=3)], [again(11, wrong=0)]
    outcomes = {one.metric: one.outcome for one in verdicts(own, repeats) if one.metric}
    assert outcomes == {"speed": Outcome.WARN, "wrong": Outcome.FAIL}
    late = [one for one in verdicts([measured(9)], [again(11, wrong=3)]) if one.metric == "wrong"]
    assert [one.outcome for one in late] == [Outcome.PASS, Outcome.FAIL]
    assert "seen when it was measured a second time: data is corrupted" in late[1].message


def test_of_a_collective_all_ranks_together_are_measured_twice() -> None:
    both = check(scope=Scope.CLUSTER)

    def ranks(first: Measurement) -> list[Measurement]:
        figures = tuple(replace(one, subject="cluster") for one in first.metrics)
        leader = first.model_copy(update={"metrics": figures})
        return [leader, first.model_copy(update={"subject": "n0/gpu1", "metrics": ()})]

    assert [one.outcome for one in on_speed(ranks(measured(9)), ranks(again(11)), both)] == [Outcome.WARN]
    assert [one.outcome for one in on_speed(ranks(measured(9)), ranks(again(11))[:1], both)] == [Outcome.FAIL]


def test_second_measurements_are_no_members_of_the_fleet() -> None:
    """Five of unknown hardware, one of them slow: all five again would make ten, and two slow ones."""
    what = check(Rule(metric="speed", reference="b", meaning="", fix=""), performance=())
    own = [measured(value, f"n{n}/gpu0") for n, value in enumerate((100, 101, 99, 100, 80))]

    def repeated(last: float) -> list[Measurement]:
        return [again(value, f"n{n}/gpu0") for n, value in enumerate((100, 101, 99, 100, last))]

    assert on_speed(own, repeated(80), what)[4].outcome is Outcome.FAIL
    assert "median of 5 subjects" in on_speed(own, repeated(80), what)[4].basis_text
    lifted = on_speed(own, repeated(100), what)[4]
    assert lifted.outcome is Outcome.UNJUDGED, "of unknown hardware nothing is ever good"
    assert "not reproduced (80 GB/s, then 100 GB/s)" in lifted.message


def test_an_old_record_is_judged_with_a_new_baseline_and_both_measurements() -> None:
    what = check(Rule(metric="speed", reference="b", meaning="", fix=""), performance=())

    def site(value: float) -> Baseline:
        expected = ReferenceValue(gpus=1, nodes=1, value=value, unit="GB/s", source="runs", gpu="NVIDIA Strange")
        return Baseline(name="lab", learned_from=(), expected={"b": (expected,)})

    own, repeats = [measured(85)], [again(99)]
    assert [one.outcome for one in on_speed(own, repeats, what, site(100))] == [Outcome.WARN]
    assert [one.outcome for one in on_speed(own, repeats, what, site(200))] == [Outcome.FAIL]
    assert [one.outcome for one in on_speed(own, repeats, what, site(85))] == [Outcome.PASS]


def test_only_what_fell_short_of_performance_is_repeated() -> None:
    def wanted(own: list[Measurement], repeats: list[Measurement] | None = None, what: Check | None = None) -> Any:
        return checks_to_retry(CONFIG, own, repeats or [], {"c": what or check()})

    short = {"c": "speed is 9 GB/s, expected >= 10 GB/s"}
    assert wanted([measured(9)]) == short
    assert wanted([measured(9), measured(8, "n0/gpu1")]) == {"c": f"{short['c']}, and 1 more"}
    assert wanted([measured(11)]) == {}
    assert wanted([measured(11, wrong=1)]) == {}
    assert wanted([measured(9)], what=check(performance=())) == {}, "nobody declared it to vary"
    assert wanted([measured(9, error="gone")]) == {}, "first it is to be measured everywhere"
    assert wanted([measured(9)], [again(9)]) == {}, "once more, not for ever"
    assert wanted([measured(9)], [again(9, error="gone")]) == short


def test_what_is_declared_to_vary_is_measured_and_says_nothing_of_corruption() -> None:
    declared = [(one, pattern) for one in catalog().values() for pattern in one.performance_metrics]
    assert declared
    for one, pattern in declared:
        found = [name for name in one.metrics if fnmatchcase(name, pattern)]
        assert found, f"{one.name} measures no {pattern}"
        assert {one.metrics[name] for name in found} <= {
            "GB/s",
            "TFLOP/s",
            "files/s",
            "images/s",
            "samples/s",
            "tokens/s",
            "tokens/s/GPU",
            "us",
            "s",
            "%",
            "x",
            "of the best",
            "of the median",
            "of the base",
        }


def slow_at(slow: int, *, reverse: bool, slowly: float = 4) -> list[Measurement]:
    """Four GPUs, of which one is slow; the second time rank r drives GPU 3 − r."""
    make = again if reverse else measured
    return [make(slowly if gpu == slow else 11, f"n0/gpu{gpu}", rank=3 - gpu if reverse else gpu) for gpu in range(4)]


def test_a_fault_that_goes_with_the_rank_is_reproduced() -> None:
    said = on_speed(slow_at(2, reverse=False), slow_at(1, reverse=True))
    assert [one.outcome for one in said] == [Outcome.PASS, Outcome.WARN, Outcome.FAIL, Outcome.PASS]
    assert (
        "; reproduced by the same rank (4 GB/s here, then 4 GB/s at n0/gpu1): it goes with the rank" in said[2].message
    )


def test_a_fault_that_moves_is_told_where_it_went() -> None:
    said = on_speed(slow_at(2, reverse=False), slow_at(0, reverse=True))
    assert [one.outcome for one in said] == [Outcome.WARN, Outcome.PASS, Outcome.WARN, Outcome.PASS]
    assert "not reproduced (4 GB/s, then 11 GB/s; instead n0/gpu0 fell short), worth looking at" in said[2].message
