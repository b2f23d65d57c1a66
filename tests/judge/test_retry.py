"""Verdicts on a measurement and its retry: one measurement fails no hardware, and an incomplete retry lifts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answer, metric
from seatrial.config.schema import CheckSettings, Config
from seatrial.judge import checks_to_retry, judge
from seatrial.model import (
    Baseline,
    Measurement,
    Metric,
    Outcome,
    Phase,
    Reason,
    ReferenceValue,
    Retry,
    Scope,
    Threshold,
    Verdict,
)
from tests.baselines import learned_runs

SPEED = metric("speed", ">= 10 GB/s", "slow is bad", "look at the cable", speed=True)
WRONG = metric("wrong", "== 0 count", "data is corrupted", "train nothing")
FACTS = {"gpu": "NVIDIA Unknown", "world_size": 1, "nodes": 1}
CONFIG = Config(name="t", checks={"c": CheckSettings()})


def not_called(context: Context, options: Options) -> Iterator[Answer]:
    raise AssertionError("evaluation must not measure")


def check(*declared: metric, scope: Scope = Scope.GPU) -> Check:
    return Check(
        name="c",
        title="C",
        phase=Phase.INTERCONNECT,
        scope=scope,
        declared=declared or (SPEED, WRONG),
        measure=not_called,
        limit_s=1,
    )


BY_REFERENCE = check(metric("speed", ">= 0.90 reference", warn=">= 0.95 reference", unit="GB/s", reference="b"))


def first(speed: float, subject: str = "n0/gpu0", wrong: int = 0, **more: Any) -> Measurement:
    values = (("speed", speed, "GB/s"), ("wrong", wrong, "count"))
    metrics = tuple(Metric(name=name, value=value, unit=unit, subject=subject) for name, value, unit in values)
    return Measurement(check="c", subject=subject, metrics=metrics, **{"facts": FACTS, **more})


def second(speed: float, subject: str = "n0/gpu0", wrong: int = 0, **more: Any) -> Measurement:
    return first(speed, subject, wrong, retry=1, facts={**FACTS, "retry": "another rank"}, **more)


def third(speed: float, subject: str = "n0/gpu0", **more: Any) -> Measurement:
    return first(speed, subject, retry=2, **more)


def verdicts(
    measurements: list[Measurement],
    retries: list[Measurement] | None,
    check_: Check | None = None,
    site: Baseline | None = None,
) -> list[Verdict]:
    return list(judge(CONFIG, [], measurements, {"c": check_ or check()}, {}, site, retries=retries))


def speed_verdicts(
    measurements: list[Measurement],
    retries: list[Measurement] | None,
    check_: Check | None = None,
    site: Baseline | None = None,
) -> list[Verdict]:
    return [verdict for verdict in verdicts(measurements, retries, check_, site) if verdict.metric == "speed"]


def speed_outcomes(
    measurements: list[Measurement],
    retries: list[Measurement] | None,
    check_: Check | None = None,
    site: Baseline | None = None,
) -> list[Outcome]:
    return [verdict.outcome for verdict in speed_verdicts(measurements, retries, check_, site)]


def test_two_failures_are_a_reproduced_fail() -> None:
    (bad,) = speed_verdicts([first(9)], [second(8)])
    assert (bad.outcome, bad.reasons) == (Outcome.FAIL, (Reason.THRESHOLD_VIOLATED, Reason.REPRODUCED))
    assert (bad.value, bad.retry, bad.fix) == (9, Retry(9, 8), "look at the cable")
    for text in ("speed = 9 GB/s on n0/gpu0", "another rank", "speed = 8 GB/s on n0/gpu0"):
        assert text in bad.evidence


def test_failure_that_is_not_reproduced_warns() -> None:
    (lifted,) = speed_verdicts([first(9)], [second(11), third(12)])
    assert (lifted.outcome, lifted.reasons) == (Outcome.WARN, (Reason.THRESHOLD_VIOLATED, Reason.NOT_REPRODUCED))
    assert lifted.retry == Retry(9, 11, third_value=12)


@pytest.mark.parametrize(
    ("third_measurements", "outcome", "reason"),
    [
        ([third(8)], Outcome.FAIL, Reason.REPRODUCED),
        ([], Outcome.UNJUDGED, Reason.NO_THIRD_MEASUREMENT),
        ([third(8, error="gone")], Outcome.UNJUDGED, Reason.NO_THIRD_MEASUREMENT),
    ],
)
@pytest.mark.parametrize("values", [(9, 11), (11, 9)])
def test_third_measurement_decides(
    values: tuple[float, float], third_measurements: list[Measurement], outcome: Outcome, reason: Reason
) -> None:
    (verdict,) = speed_verdicts([first(values[0])], [second(values[1]), *third_measurements])
    assert (verdict.outcome, verdict.reasons[-1]) == (outcome, reason)


def with_samples(measurement: Measurement, *samples: float) -> Measurement:
    speed = replace(measurement.metrics[0], value=median(samples), samples=samples)
    return measurement.model_copy(update={"metrics": (speed, *measurement.metrics[1:])})


@pytest.mark.parametrize(
    ("samples", "outcome"),
    [
        ((9.9, 9.8, 10.2, 9.9, 9.7, 10.1, 9.9), Outcome.UNJUDGED),  # near the threshold
        ((9.4, 9.7, 10.2), Outcome.UNJUDGED),
        ((9.4, 9.3, 9.7, 9.5, 9.4, 9.6, 10.2), Outcome.FAIL),  # together significant
    ],
)
def test_two_inconclusive_measurements_are_pooled(samples: tuple[float, ...], outcome: Outcome) -> None:
    measurement, retry = with_samples(first(9), *samples), with_samples(second(9), *samples)
    assert speed_outcomes([measurement], None) == [Outcome.UNJUDGED]
    (verdict,) = speed_verdicts([measurement], [retry])
    assert (verdict.outcome, verdict.reasons[-1]) == (outcome, Reason.REPRODUCED)
    assert checks_to_retry(CONFIG, [measurement], [], {"c": check()}, 1)


def test_failure_in_the_retry_only_warns() -> None:
    on_gpu0, on_gpu1 = speed_verdicts(
        [first(9, "n0/gpu0"), first(11, "n0/gpu1")],
        [second(8, "n0/gpu0"), second(9, "n0/gpu1"), third(8, "n0/gpu0"), third(11, "n0/gpu1")],
    )
    assert (on_gpu0.outcome, on_gpu1.outcome) == (Outcome.FAIL, Outcome.WARN)
    assert on_gpu1.reasons[-1] is Reason.NOT_REPRODUCED
    assert on_gpu1.retry == Retry(11, 9, third_value=11)


def test_failure_without_a_retry_remains_fail() -> None:
    (bad,) = speed_verdicts([first(9)], [])
    assert (bad.outcome, bad.reasons) == (Outcome.FAIL, (Reason.THRESHOLD_VIOLATED, Reason.NOT_RETRIED))


def test_metric_that_no_retry_lifts_has_no_retry_reason() -> None:
    (bad,) = [verdict for verdict in verdicts([first(11, wrong=1)], []) if verdict.metric == "wrong"]
    assert (bad.outcome, bad.reasons) == (Outcome.FAIL, (Reason.THRESHOLD_VIOLATED,))


def test_failure_has_no_retry_reason_before_the_retry() -> None:
    (bad,) = speed_verdicts([first(9)], None)
    assert (bad.outcome, bad.reasons) == (Outcome.FAIL, (Reason.THRESHOLD_VIOLATED,))


@pytest.mark.parametrize(
    ("retries", "problem"),
    [
        ([second(20, error="NCCL: gone")], "n0/gpu0: NCCL: gone"),
        ([second(20, skipped="no GPU")], "n0/gpu0: no GPU"),
        ([second(20, "n7/gpu0")], "measured n7/gpu0, not the same subjects"),
    ],
)
def test_failed_retry_lifts_nothing(retries: list[Measurement], problem: str) -> None:
    (bad,) = speed_verdicts([first(9)], retries)
    assert (bad.outcome, bad.reasons) == (Outcome.FAIL, (Reason.THRESHOLD_VIOLATED, Reason.NOT_RETRIED))
    assert bad.evidence.endswith(problem)


def test_retry_of_some_subjects_lifts_nothing() -> None:
    measurements = [first(9, "n0/gpu0"), first(11, "n0/gpu1")]
    assert speed_outcomes(measurements, [second(20, "n0/gpu0")]) == [Outcome.FAIL, Outcome.PASS]
    with_error = [second(20, "n0/gpu0"), second(20, "n0/gpu1", error="it fell off the bus")]
    assert speed_outcomes(measurements, with_error) == [Outcome.FAIL, Outcome.PASS]


def test_retry_without_the_metric_lifts_nothing() -> None:
    without_speed = second(0).model_copy(update={"metrics": second(0).metrics[1:]})
    assert speed_outcomes([first(9)], [without_speed]) == [Outcome.FAIL]


def test_corruption_in_either_measurement_fails() -> None:
    outcomes = {
        verdict.metric: verdict.outcome
        for verdict in verdicts([first(9, wrong=3)], [second(11, wrong=0), third(11)])
        if verdict.metric
    }
    assert outcomes == {"speed": Outcome.WARN, "wrong": Outcome.FAIL}
    for retries in ([second(11, wrong=3)], [second(11), third(11, wrong=3)], [second(11, wrong=2), third(11, wrong=3)]):
        in_retry = [verdict for verdict in verdicts([first(9)], retries) if verdict.metric == "wrong"]
        assert [verdict.outcome for verdict in in_retry] == [Outcome.PASS, Outcome.FAIL]
        assert in_retry[1].evidence.startswith("only in the retry: ")


def test_retry_of_a_collective_needs_all_ranks() -> None:
    cluster_check = check(scope=Scope.CLUSTER)

    def ranks(measurement: Measurement) -> list[Measurement]:
        metrics = tuple(replace(metric, subject="cluster") for metric in measurement.metrics)
        rank0 = measurement.model_copy(update={"metrics": metrics})
        return [rank0, measurement.model_copy(update={"subject": "n0/gpu1", "metrics": ()})]

    third_ranks = ranks(third(11))
    assert speed_outcomes(ranks(first(9)), [*ranks(second(11)), *third_ranks], cluster_check) == [Outcome.WARN]
    assert speed_outcomes(ranks(first(9)), [*ranks(second(11)), third_ranks[0]], cluster_check) == [Outcome.UNJUDGED]
    assert speed_outcomes(ranks(first(9)), ranks(second(11))[:1], cluster_check) == [Outcome.FAIL]


def test_rule_and_threshold_of_the_trial_are_retried_separately() -> None:
    """The check requires 10 GB/s, the trial more than 8 GB/s."""
    settings = CheckSettings(expect={"speed": Threshold.parse("> 8 GB/s")})
    config = Config(name="t", checks={"c": settings})

    def results(*values: float) -> list[tuple[Outcome, Retry | None]]:
        measured = [first(values[0])], [second(values[1])]
        verdicts = judge(config, [], measured[0], {"c": check()}, {}, retries=measured[1])
        return [(verdict.outcome, verdict.retry) for verdict in verdicts if verdict.metric == "speed"]

    assert results(7, 9) == [(Outcome.FAIL, Retry(7, 9)), (Outcome.UNJUDGED, Retry(7, 9))]
    assert results(9, 9) == [(Outcome.FAIL, Retry(9, 9)), (Outcome.PASS, None)]
    assert results(7, 7) == [(Outcome.FAIL, Retry(7, 7)), (Outcome.FAIL, Retry(7, 7))]
    assert set(checks_to_retry(config, [first(9)], [], {"c": check()}, retry_number=1)) == {"c"}


def test_retries_are_no_members_of_the_peer_group() -> None:
    measurements = [first(value, f"n{n}/gpu0") for n, value in enumerate((100, 101, 99, 100, 80))]

    def last_verdict(last: float) -> Verdict:
        retries = [second(value, f"n{n}/gpu0") for n, value in enumerate((100, 101, 99, 100, last))]
        return speed_verdicts(measurements, retries, BY_REFERENCE)[4]

    assert last_verdict(80).outcome is Outcome.FAIL
    basis = last_verdict(80).basis
    assert basis is not None
    assert basis.name.startswith("5 subjects")
    lifted = last_verdict(100)
    assert lifted.outcome is Outcome.UNJUDGED, "peers cannot show that unknown hardware is good"
    assert Reason.NOT_REPRODUCED in lifted.reasons
    assert lifted.retry == Retry(80, 100)


@pytest.mark.parametrize(("value", "outcome"), [(100, Outcome.WARN), (200, Outcome.FAIL), (85, Outcome.PASS)])
def test_recorded_retry_is_compared_with_a_new_baseline(value: float, outcome: Outcome) -> None:
    reference = ReferenceValue(gpus=1, nodes=1, value=value, unit="GB/s", source="runs", gpu="NVIDIA Unknown", runs=3)
    site = Baseline(name="lab", learned_from=learned_runs(), expected={"b": (reference,)})
    assert speed_outcomes([first(85)], [second(99), third(99)], BY_REFERENCE, site) == [outcome]


@pytest.mark.parametrize(
    ("measurements", "retries", "check_", "next_retry"),
    [
        ([first(9)], [], check(), 1),
        ([first(11)], [], check(), None),
        ([first(11, wrong=1)], [], check(), None),
        ([first(9)], [], check(replace(SPEED, speed=False), WRONG), None),  # speed is no performance metric
        ([first(9, error="gone")], [], check(), None),  # an incomplete first measurement
        ([first(9)], [second(9)], check(), None),  # reproduced
        ([first(9)], [second(9, error="gone")], check(), 1),
        ([first(9)], [second(11)], check(), 2),
        ([first(9), first(11, "n0/gpu1")], [second(9), second(9, "n0/gpu1")], check(), 2),
        ([first(9)], [second(11), third(11)], check(), None),
        ([first(9)], [second(11), third(11, error="gone")], check(), 2),
    ],
)
def test_checks_with_bad_performance_metrics_are_retried(
    measurements: list[Measurement], retries: list[Measurement], check_: Check, next_retry: int | None
) -> None:
    for number in (1, 2, 3):
        reasons = checks_to_retry(CONFIG, measurements, retries, {"c": check_}, number)
        assert set(reasons) == ({"c"} if number == next_retry else set())
        assert all("9 GB/s" in reason and ">= 10 GB/s" in reason for reason in reasons.values())


def test_reason_for_a_retry_counts_further_failures() -> None:
    reasons = checks_to_retry(CONFIG, [first(9), first(8, "n0/gpu1")], [], {"c": check()}, 1)
    assert reasons["c"].endswith("1 more")


def test_performance_metrics_of_shipped_checks_are_rates_times_or_ratios() -> None:
    patterns = [(check_, pattern) for check_ in catalog().values() for pattern in check_.speeds]
    assert patterns
    for check_, pattern in patterns:
        names = [name for name in check_.units if fnmatchcase(name, pattern)]
        assert names, f"{check_.name} measures no {pattern}"
        assert {check_.units[name] for name in names} <= {
            "GB/s",
            "Gb/s",
            "TFLOP/s",
            "files/s",
            "images/s",
            "iterations/s",
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


def slow_gpu(slow: int, *, is_retry: bool) -> list[Measurement]:
    """Four GPUs with a slow one; in the retry, rank r uses GPU 3 - r."""
    measure = second if is_retry else first
    return [measure(4 if gpu == slow else 11, f"n0/gpu{gpu}", rank=3 - gpu if is_retry else gpu) for gpu in range(4)]


def test_fault_that_follows_the_rank_is_reproduced() -> None:
    results = speed_verdicts(slow_gpu(2, is_retry=False), slow_gpu(1, is_retry=True))
    by_subject = {verdict.subject: verdict for verdict in results}
    fault = by_subject["n0/gpu2"]
    assert (fault.outcome, fault.reasons[-1]) == (Outcome.FAIL, Reason.REPRODUCED)
    assert fault.retry == Retry(4, 4, "n0/gpu1")


def test_fault_that_moves_to_another_gpu_is_a_fault_of_the_node() -> None:
    results = speed_verdicts(slow_gpu(2, is_retry=False), slow_gpu(0, is_retry=True))
    (node,) = [verdict for verdict in results if verdict.subject == "n0"]
    assert (node.outcome, node.reasons[-1]) == (Outcome.FAIL, Reason.REPRODUCED)
    assert node.retry == Retry(4, 4, "n0/gpu0")


def test_reproduced_fault_is_no_moved_fault() -> None:
    results = speed_verdicts(slow_gpu(2, is_retry=False), slow_gpu(2, is_retry=True))
    assert [verdict.subject for verdict in results if verdict.outcome is Outcome.FAIL] == ["n0/gpu2"]


@pytest.mark.parametrize(
    ("gpus_per_node", "reasons"), [(0, ()), (1, (Reason.SLOW_WINDOWS,)), (None, (Reason.SLOW_WINDOWS,))]
)
def test_slow_windows_are_judged_on_gpu_nodes_only(gpus_per_node: int | None, reasons: tuple[Reason, ...]) -> None:
    cluster = CONFIG.cluster.model_copy(update={"gpus_per_node": gpus_per_node})
    config = CONFIG.model_copy(update={"cluster": cluster})
    noisy = Metric(name="speed", value=20, unit="GB/s", subject="n0/gpu0", samples=(14, 14, 20, 25, 26))
    measurement = Measurement(check="c", subject="n0/gpu0", metrics=(noisy,), facts=FACTS)
    verdicts = judge(config, [], [measurement], {"c": check(SPEED)}, {})
    (speed,) = [verdict for verdict in verdicts if verdict.metric == "speed"]
    assert speed.reasons == reasons
