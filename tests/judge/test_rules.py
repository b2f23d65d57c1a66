"""Rules of one check: thresholds of trials, applicability, missing metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
from pydantic import JsonValue

from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answer, metric
from seatrial.hardware.links import COLLECTIVE
from seatrial.hardware.references import Reference, References, Sku, Spec, skus
from seatrial.judge.rules import judge_check
from seatrial.model import (
    Absent,
    Baseline,
    Basis,
    BasisKind,
    Measurement,
    Metric,
    Outcome,
    Phase,
    Reason,
    ReferenceValue,
    Scope,
    Threshold,
    Verdict,
    Why,
)

SKU = Sku(
    name="Test GPU",
    nvml_names=("NVIDIA Test",),
    expected={"all_reduce": (ReferenceValue(gpus=4, nodes=1, value=400, unit="GB/s", source="a paper"),)},
)
SPEED = metric("speed", ">= 10 GB/s", "slow is bad", "look at the cable")


def not_called(context: Context, options: Options) -> Iterator[Answer]:
    raise AssertionError("evaluation must not measure")


def by_reference(key: str, **options: Any) -> metric:
    """The metric ``speed`` with a reference value; of a collective if ``key`` is such as ``x.busbw.1GiB``."""
    fields: dict[str, Any] = {"unit": "GB/s", "reference": key, "bound": COLLECTIVE if ".busbw." in key else ""}
    return metric(**{"name": "speed", "text": ">= 0.90 reference", "warn": ">= 0.95 reference"} | fields | options)


def check(*declared: metric, scope: Scope = Scope.CLUSTER) -> Check:
    """A check; its operation is that of the metrics bounded as a COLLECTIVE."""
    return Check(
        name="c",
        title="C",
        phase=Phase.INTERCONNECT,
        scope=scope,
        declared=declared,
        measure=not_called,
        limit_s=1,
        operation="".join(each.reference.partition(".")[0] for each in declared if each.bound),
    )


def measured(
    value: float | None = None, *, subject: str = "cluster", facts: dict[str, JsonValue] | None = None, **more: Any
) -> Measurement:
    metrics = () if value is None else (Metric(name="speed", value=value, unit="GB/s", subject=subject),)
    return Measurement(check="c", subject=subject, metrics=metrics, facts=facts or {}, **more)


def outcomes(
    check_: Check, *measurements: Measurement, expect: Mapping[str, Threshold] | None = None
) -> list[tuple[str, Outcome]]:
    return [(verdict.subject, verdict.outcome) for verdict in verdicts(check_, *measurements, expect=expect)]


def verdicts(
    check_: Check,
    *measurements: Measurement,
    expect: Mapping[str, Threshold] | None = None,
    site: Baseline | None = None,
    override: bool = False,
) -> list[Verdict]:
    return judge_check(check_, measurements, expect or {}, "mine", References(site, [SKU]), override=override)


def test_violated_threshold_fails_with_meaning_and_fix() -> None:
    assert outcomes(check(SPEED), measured(10)) == [("cluster", Outcome.PASS)]
    (bad,) = verdicts(check(SPEED), measured(9.9))
    assert (bad.outcome, bad.reasons) == (Outcome.FAIL, (Reason.THRESHOLD_VIOLATED,))
    assert (bad.value, bad.meaning, bad.fix) == (9.9, "slow is bad", "look at the cable")
    assert bad.basis == Basis(BasisKind.RULE, "", 10, "GB/s", ">=")


def test_evidence_of_a_bad_value_is_that_of_the_check() -> None:
    def judged(value: float, evidence: JsonValue) -> Verdict:
        speed = Metric(name="speed", value=value, unit="GB/s", subject="cluster", evidence=evidence)
        (verdict,) = verdicts(check(SPEED), measured().model_copy(update={"metrics": (speed,)}))
        return verdict

    assert judged(9, {"cable": {"port": 7}, "empty": []}).evidence == 'speed = 9 GB/s on cluster; cable: {"port": 7}'
    assert judged(9, [7]).evidence == "speed = 9 GB/s on cluster; [7]"
    assert (judged(11, [7]).reasons, judged(11, [7]).evidence) == ((), "")
    assert len(judged(9, "x" * 10_000).evidence) < 700


@pytest.mark.parametrize("outcome", [Outcome.WARN, Outcome.ERROR])
def test_outcome_of_a_violation(outcome: Literal[Outcome.WARN, Outcome.ERROR]) -> None:
    assert outcomes(check(replace(SPEED, outcome=outcome)), measured(1)) == [("cluster", outcome)]


def test_missing_measurement_or_metric_is_an_error() -> None:
    assert outcomes(check(SPEED)) == [("cluster", Outcome.ERROR)]
    assert outcomes(check(SPEED), measured(None)) == [("cluster", Outcome.ERROR)]


def test_missing_metric_of_one_node_is_an_error_of_that_node() -> None:
    node_check = check(SPEED, scope=Scope.NODE)
    assert outcomes(node_check, measured(11, subject="n0"), measured(None, subject="n1")) == [
        ("n0", Outcome.PASS),
        ("n1", Outcome.ERROR),
    ]


def test_failed_measurement_has_one_error_and_its_metrics_are_evaluated() -> None:
    failed = measured(3, error="RuntimeError: gone")
    assert outcomes(check(SPEED), failed) == [("cluster", Outcome.ERROR), ("cluster", Outcome.FAIL)]
    assert outcomes(check(SPEED), measured(None, error="RuntimeError: gone")) == [("cluster", Outcome.ERROR)]


@pytest.mark.parametrize(
    ("why", "outcome"),
    [
        (Why.DOES_NOT_APPLY, Outcome.SKIP),
        (Why.NOT_PERMITTED, Outcome.UNJUDGED),
        (Why.UNREADABLE, None),
        (Why.NOT_REQUESTED, None),
    ],
)
def test_what_a_check_answered_before_it_failed_stands(why: Why, outcome: Outcome | None) -> None:
    answer = Absent(metric="speed", why=why, reason="no cable")
    error, *answers = verdicts(check(SPEED), measured(None, absent=(answer,), error="RuntimeError: gone"))
    assert (error.outcome, error.reasons) == (Outcome.ERROR, (Reason.MEASUREMENT_FAILED,))
    assert [(verdict.outcome, verdict.detail) for verdict in answers] == ([(outcome, "no cable")] if outcome else [])


def test_skipped_check_has_its_reason_as_detail() -> None:
    (verdict,) = verdicts(check(SPEED), measured(None, skipped="no GPU"))
    assert (verdict.outcome, verdict.reasons) == (Outcome.SKIP, (Reason.NOT_APPLICABLE,))
    assert verdict.detail == "no GPU"


def test_check_without_rules_is_unjudged() -> None:
    assert outcomes(check(), measured(3)) == [("cluster", Outcome.UNJUDGED)]


def test_rule_when_its_facts_match() -> None:
    with_nccl = check(replace(SPEED, when="backend == nccl"))
    assert outcomes(with_nccl, measured(1, facts={"backend": "gloo"})) == [("cluster", Outcome.SKIP)]
    assert outcomes(with_nccl, measured(1, facts={"backend": "nccl"})) == [("cluster", Outcome.FAIL)]


BY_TRIAL = Basis(BasisKind.TRIAL, "mine", 5, "GB/s", ">")


@pytest.mark.parametrize(
    ("value", "by_rule", "by_trial"),
    [(11, Outcome.PASS, Outcome.PASS), (7, Outcome.FAIL, Outcome.PASS), (4, Outcome.FAIL, Outcome.FAIL)],
)
def test_threshold_of_the_trial_is_one_more_condition(value: float, by_rule: Outcome, by_trial: Outcome) -> None:
    expect = {"speed": Threshold.parse("> 5")}
    both = verdicts(check(SPEED), measured(value), expect=expect)
    assert [verdict.outcome for verdict in both] == [by_rule, by_trial]
    assert [verdict.basis for verdict in both] == [Basis(BasisKind.RULE, "", 10, "GB/s", ">="), BY_TRIAL]


def test_threshold_of_the_trial_replaces_the_rule_with_override_only() -> None:
    (verdict,) = verdicts(check(SPEED), measured(7), expect={"speed": Threshold.parse("> 5")}, override=True)
    assert (verdict.outcome, verdict.basis) == (Outcome.PASS, BY_TRIAL)
    other_metric = {"other": Threshold.parse("> 5")}
    assert Outcome.FAIL in {verdict.outcome for verdict in verdicts(check(SPEED), measured(7), expect=other_metric)}


@pytest.mark.parametrize(("value", "outcome"), [(401, Outcome.PASS), (399, Outcome.FAIL)])
@pytest.mark.parametrize("optional", [False, True])
def test_threshold_decides_alone_without_a_reference_value(value: float, outcome: Outcome, optional: bool) -> None:
    declared = replace(BY_REFERENCE, reference_optional=optional)
    unknown = measured(value, facts=UNKNOWN_GPU)
    (verdict,) = verdicts(check(declared), unknown, expect={"speed": Threshold.parse("> 400")})
    assert (verdict.outcome, verdict.basis and verdict.basis.kind) == (outcome, BasisKind.TRIAL)


def test_outlier_among_peers_fails_although_it_meets_the_threshold_of_the_trial() -> None:
    gpus = [measured(value, subject=f"n{n}", facts=UNKNOWN_GPU) for n, value in enumerate((100, 101, 99, 60))]
    results = verdicts(check(BY_REFERENCE, scope=Scope.NODE), *gpus, expect={"speed": Threshold.parse("> 50")})
    (failed,) = [verdict for verdict in results if verdict.outcome is Outcome.FAIL]
    assert (failed.subject, failed.basis and failed.basis.kind) == ("n3", BasisKind.PEERS)
    assert Outcome.UNJUDGED not in {verdict.outcome for verdict in results}


def test_missing_metric_of_a_rule_and_a_threshold_is_one_error() -> None:
    (verdict,) = verdicts(check(SPEED), measured(None), expect={"speed": Threshold.parse("> 5")})
    assert (verdict.outcome, verdict.reasons) == (Outcome.ERROR, (Reason.METRIC_MISSING,))


@pytest.mark.parametrize(
    ("options", "outcome"),
    [({}, Outcome.FAIL), ({"size": 8}, Outcome.FAIL), ({"size": None}, Outcome.FAIL), ({"size": 1}, Outcome.SKIP)],
)
def test_rule_with_default_options_is_skip_allowed_if_the_trial_changes_them(
    options: dict[str, JsonValue], outcome: Outcome
) -> None:
    class Sized(Options):
        size: int = 8

    sized = replace(check(SPEED), options=Sized, declared=(replace(SPEED, when="size is the default"),))
    (verdict,) = judge_check(sized, [measured(7)], {}, "mine", options=options)
    assert verdict.outcome is outcome


@pytest.mark.parametrize(
    ("value", "gpu", "outcome"),
    [(25, "NVIDIA Fast", Outcome.PASS), (19, "NVIDIA Fast", Outcome.FAIL), (19, "NVIDIA Test", Outcome.SKIP)],
)
def test_share_of_the_peak_speed(value: float, gpu: str, outcome: Outcome) -> None:
    fast = Sku(
        name="Fast", nvml_names=("NVIDIA Fast",), spec={"bf16": Spec(value=400, unit="TFLOP/s", source="a datasheet")}
    )
    name = "tokens_per_second_per_gpu"
    training = check(metric(name, ">= 0.05 bound", "waits", "look", unit="tokens/s/GPU"))
    work: JsonValue = {"precision": "bf16", "flops_per_token": 1e12}
    facts: dict[str, JsonValue] = {**FOUR, "gpu": gpu, "training": work}
    speed = Metric(name=name, value=value, unit="tokens/s/GPU", subject="cluster")
    measurement = Measurement(check="c", subject="cluster", metrics=(speed,), facts=facts)
    (verdict,) = judge_check(training, [measurement], {}, "mine", References(None, [SKU, fast]))
    assert verdict.outcome is outcome
    if verdict.basis:
        assert (verdict.basis.kind, verdict.basis.expected) == (BasisKind.PHYSICAL_LIMIT, 400)


@pytest.mark.parametrize("lost", ["run.native", "gpu", "world_size", "nodes"])
def test_training_without_a_fact_that_its_limits_need_is_an_error(lost: str) -> None:
    facts: dict[str, JsonValue] = {**FOUR, "run.native": {"precision": "bf16", "flops_per_token": 1e12}}
    assert {each.outcome for each in training_verdicts(".native", facts)} == {Outcome.FAIL}
    reasons = {each.reasons for each in training_verdicts(".native", {**facts, lost: None}) if is_error(each)}
    assert reasons == {(Reason.FACT_INVALID,)}


ENTRIES = {"gemm": ("precision", "flops_per_token"), "all_reduce": ("parameters", "batch", "seq_len")}
ENTRIES["bound"] = ENTRIES["gemm"]


@pytest.mark.parametrize(("base", "lost"), [(base, entry) for base, entries in ENTRIES.items() for entry in entries])
def test_training_without_an_entry_that_a_limit_is_computed_from_is_an_error(base: str, lost: str) -> None:
    work: dict[str, JsonValue] = {
        "precision": "bf16",
        "flops_per_token": 1e12,
        "parameters": 7,
        "batch": 1,
        "seq_len": 1,
    }
    assert not any(map(is_error, training_verdicts("", {**FOUR, "training": work}, base)))
    del work[lost]
    (error,) = filter(is_error, training_verdicts("", {**FOUR, "training": work}, base))
    assert lost in error.detail


def training_verdicts(run: str, facts: Mapping[str, JsonValue], base: str = "gemm") -> list[Verdict]:
    """The verdicts on a training at 19 tokens/s/GPU, where the GEMM rate of the run allows 60."""
    name = f"tokens_per_second_per_gpu{run}"
    speed = Metric(name=name, value=19, unit="tokens/s/GPU", subject="cluster")
    measurement = Measurement(check="c", subject="cluster", metrics=(speed,), facts=dict(facts))
    references = replace(References(None, [SKU]), gemm_rates={"bf16": {"n0/gpu0": 60.0}})
    rule = metric(name, f">= 0.65 {base}", "waits", "look", unit="tokens/s/GPU")
    return judge_check(check(rule), [measurement], {}, "mine", references)


def is_error(verdict: Verdict) -> bool:
    return verdict.outcome is Outcome.ERROR


def test_threshold_of_the_trial_on_a_missing_metric_is_an_error() -> None:
    assert ("cluster", Outcome.ERROR) in outcomes(
        check(SPEED), measured(11), expect={"speed.8GiB": Threshold.parse("> 12")}
    )


def test_shipped_reference_values_have_sources() -> None:
    values = [value for sku in skus() for values in sku.expected.values() for value in values]
    assert values
    assert all(value.source and value.value > 0 for value in values)
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 4, "nodes": 1}
    reference = References(None, skus()).site_or_sku_reference("all_reduce.busbw.8GiB", facts)
    assert isinstance(reference, Reference)
    assert reference.value == 363.3


FOUR: dict[str, JsonValue] = {"gpu": "NVIDIA Test", "world_size": 4, "nodes": 1}
UNKNOWN_GPU: dict[str, JsonValue] = {"gpu": "NVIDIA Unknown", "world_size": 1, "nodes": 1}
BY_REFERENCE = by_reference("all_reduce")
AMONG_PEERS = metric("speed", meaning="it shares a port", fix="look at the tree", warn=">= 0.75 peers", unit="GB/s")
BOTH_DIRECTIONS = metric(
    "speed",
    ">= 0.85 reference",
    "a degraded link",
    "nvlink -e",
    warn=(">= 0.95 reference", ">= 0.95 opposite"),
    unit="GB/s",
    reference="all_reduce",
)


def test_lax_threshold_of_a_trial_does_not_hide_corruption() -> None:
    """Nor with override. Such a threshold is rejected on load, so only an edited record can have it."""
    counts = check(metric("speed", "== 0 count", "corrupted"))
    wrong = Metric(name="speed", value=5, unit="count", subject="cluster")
    measurement = Measurement(check="c", subject="cluster", metrics=(wrong,))
    lax = {"speed": Threshold.parse("<= 1000000")}
    by_check, by_trial = verdicts(counts, measurement, expect=lax, override=True)
    assert by_check.basis is not None
    assert (by_check.outcome, by_check.basis.kind) == (Outcome.FAIL, BasisKind.RULE)
    assert by_trial.basis is not None
    assert (by_trial.outcome, by_trial.basis.kind) == (Outcome.PASS, BasisKind.TRIAL)
    assert "== 0" in by_trial.basis.lax_reason


def test_several_values_of_one_subject_are_an_error_unless_they_are_equal() -> None:
    def twice(first: float, second: float) -> list[Outcome]:
        metrics = tuple(Metric(name="speed", value=value, unit="GB/s", subject="cluster") for value in (first, second))
        judged = verdicts(check(SPEED), Measurement(check="c", subject="cluster", metrics=metrics))
        assert [verdict.reasons for verdict in judged if verdict.outcome is Outcome.ERROR] in (
            [],
            [(Reason.PLAN_MISMATCH,)],
        )
        return [verdict.outcome for verdict in judged]

    assert twice(20, 20) == [Outcome.PASS, Outcome.PASS]
    assert twice(20, 30) == [Outcome.ERROR, Outcome.PASS, Outcome.PASS]


def test_a_thousand_nodes_are_evaluated_in_seconds() -> None:
    gpu_check = check(BY_REFERENCE, scope=Scope.GPU)
    measurements = [
        measured(100 + index % 3, subject=f"n{index // 8}/gpu{index % 8}", facts=UNKNOWN_GPU) for index in range(8192)
    ]
    start = time.process_time()
    assert {verdict.outcome for verdict in verdicts(gpu_check, *measurements)} == {Outcome.UNJUDGED}
    assert time.process_time() - start < 5


AT_8GIB = by_reference("all_reduce.busbw.8GiB", name="busbw.8GiB", meaning="the links", fix="look at them")
ONLY_1GIB = "the trial's options ask for sizes of 1GiB"


def measured_at_1gib(not_requested: dict[str, str] | None = None) -> Measurement:
    metrics = (Metric(name="busbw.1GiB", value=350, unit="GB/s", subject="cluster"),)
    absent = tuple(
        Absent(metric=name, why=Why.NOT_REQUESTED, reason=reason) for name, reason in (not_requested or {}).items()
    )
    return Measurement(check="c", subject="cluster", metrics=metrics, absent=absent, facts=FOUR)


def verdict_at_8gib(measurement: Measurement, expect: Mapping[str, Threshold]) -> Verdict:
    all_verdicts = judge_check(check(AT_8GIB), [measurement], expect, "my trial")
    return next(verdict for verdict in all_verdicts if verdict.metric == "busbw.8GiB")


def test_size_that_is_not_requested_is_skip_allowed_if_the_trial_has_a_threshold_on_another_size() -> None:
    at_1gib = {"busbw.1GiB": Threshold.parse("> 300 GB/s")}
    verdict = verdict_at_8gib(measured_at_1gib({"busbw.8GiB": ONLY_1GIB}), expect=at_1gib)
    assert (verdict.outcome, verdict.reasons) == (Outcome.SKIP, (Reason.THRESHOLD_ON_OTHER_SIZE,))
    assert verdict.detail.startswith(ONLY_1GIB)
    assert verdict.detail.endswith("busbw.1GiB")
    assert verdict.basis, "the decision lists thresholds that were not evaluated"


def test_size_that_is_not_requested_is_an_error_without_a_threshold_on_another_size() -> None:
    on_latency = {"latency.1GiB": Threshold.parse("< 9000 us")}
    verdict = verdict_at_8gib(measured_at_1gib({"busbw.8GiB": ONLY_1GIB}), expect=on_latency)
    assert (verdict.outcome, verdict.reasons) == (Outcome.ERROR, (Reason.METRIC_MISSING,))
    assert verdict.detail.startswith(ONLY_1GIB)


@pytest.mark.parametrize(
    ("instead", "expect", "outcome"),
    [
        ("", {}, Outcome.SKIP),
        ("", {"busbw.8GiB": "> 300 GB/s"}, Outcome.ERROR),
        ("busbw.1GiB", {}, Outcome.SKIP),
        ("busbw.1GiB", {"busbw.8GiB": "> 300 GB/s"}, Outcome.ERROR),
    ],
)
def test_a_threshold_on_a_metric_that_does_not_apply_is_an_error(
    instead: str, expect: dict[str, str], outcome: Outcome
) -> None:
    absent = Absent(metric="busbw.8GiB", why=Why.DOES_NOT_APPLY, reason="the network is slow", instead=instead)
    measurement = measured_at_1gib().model_copy(update={"absent": (absent,)})
    thresholds = {metric: Threshold.parse(text) for metric, text in expect.items()}
    judged = judge_check(check(AT_8GIB), [measurement], thresholds, "my trial")
    of_8gib = {verdict.outcome: verdict.detail for verdict in judged if verdict.metric == "busbw.8GiB"}
    assert of_8gib.keys() == {Outcome.SKIP, outcome}
    assert "the network is slow" in of_8gib[outcome] or (instead and outcome is Outcome.SKIP)


def test_requested_size_without_a_value_is_an_error() -> None:
    at_1gib = {"busbw.1GiB": Threshold.parse("> 300 GB/s")}
    verdict = verdict_at_8gib(measured_at_1gib(), expect=at_1gib)
    assert (verdict.outcome, verdict.reasons) == (Outcome.ERROR, (Reason.METRIC_MISSING,))
