"""Ranks of one operation, required subjects and peer groups."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.hardware.links import Links, RdmaPorts
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Absent, BasisKind, Measurement, Metric, Outcome, Reason, Threshold, Verdict, Why

H100, H200, UNKNOWN = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA Unknown"


def rank(
    number: int, check: str, values: Mapping[str, float], *, node: str = "n0", unit: str = "GB/s", **facts: Any
) -> Measurement:
    """The measurement of one rank; keys of ``values``: ``copy`` (of its own GPU), ``unidirectional@gpu0->gpu1``."""
    all_facts: dict[str, JsonValue] = {"gpu": H200, "backend": "cuda", "world_size": 1, "nodes": 1, **facts}
    keys = ((*key.split("@"), f"gpu{number}")[:2] for key in values)
    metrics = tuple(
        Metric(name=name, value=value, unit=unit, subject=f"{node}/{subject}")
        for (name, subject), value in zip(keys, values.values(), strict=True)
    )
    return Measurement(check=check, subject=f"{node}/gpu{number}", rank=number, metrics=metrics, facts=all_facts)


def verdicts(check: str, *ranks: Measurement, expect: str = "", metric: str = "") -> list[Verdict]:
    thresholds = {metric: Threshold.parse(expect)} if expect else {}
    results = judge_check(catalog()[check], ranks, thresholds, "mine", References(None, skus()))
    return [verdict for verdict in results if not metric or verdict.metric == metric]


def absent(measurement: Measurement, metric: str, subject: str = "") -> Measurement:
    reason = Absent(metric=metric, why=Why.DOES_NOT_APPLY, reason="not supported", subject=subject)
    return measurement.model_copy(update={"absent": (reason,)})


def by_trial(results: list[Verdict]) -> list[Verdict]:
    """The verdicts on the threshold of the trial."""
    return [verdict for verdict in results if verdict.basis and verdict.basis.kind is BasisKind.TRIAL]


def missing(results: list[Verdict]) -> list[str]:
    """The details of the verdicts on missing subjects; there must be no other ERROR."""
    errors = [verdict for verdict in results if verdict.outcome is Outcome.ERROR]
    assert all(verdict.reasons == (Reason.METRIC_PARTLY_MISSING,) for verdict in errors)
    return [verdict.detail for verdict in errors]


def test_metric_required_per_rank() -> None:
    ranks = [rank(number, "transfer.host", {"h2d_single": 55, "d2h_single": 55}) for number in range(4)]
    assert missing(verdicts("transfer.host", *ranks, metric="h2d_single")) == []
    without_h2d = rank(2, "transfer.host", {"d2h_single": 55})
    (detail,) = missing(verdicts("transfer.host", *ranks[:2], without_h2d, ranks[3], metric="h2d_single"))
    assert "1 of 4" in detail
    assert detail.endswith(": n0/gpu2")


def test_metric_required_per_ordered_pair() -> None:
    name, metric = "transfer.peers", "unidirectional"
    pairs = {f"{metric}@gpu{a}->gpu{b}": 390.0 for a, b in permutations(range(3), 2)}
    others = [rank(number, name, {}) for number in (1, 2)]
    assert missing(verdicts(name, rank(0, name, pairs), *others, metric=metric)) == []
    del pairs[f"{metric}@gpu2->gpu0"]
    (detail,) = missing(verdicts(name, rank(0, name, pairs), *others, metric=metric))
    assert "1 of 6" in detail
    assert detail.endswith(": n0/gpu2->gpu0")


def test_metric_required_per_pair_in_either_order() -> None:
    name, metric = "collectives.gpu_pairs", "busbw.1GiB"
    pairs = {f"{metric}@{pair}": 359.0 for pair in ("gpu0->gpu1", "gpu2->gpu0", "gpu1->gpu2")}
    facts: dict[str, Any] = {"backend": "nccl", "world_size": 2}
    others = [rank(number, name, {}, **facts) for number in (1, 2)]
    assert missing(verdicts(name, rank(0, name, pairs, **facts), *others, metric=metric)) == []
    del pairs[f"{metric}@gpu2->gpu0"]
    (detail,) = missing(verdicts(name, rank(0, name, pairs, **facts), *others, metric=metric))
    assert "1 of 3" in detail
    assert detail.endswith(": n0/gpu0->gpu2")


def comparison(name: str, values: Mapping[str, float], **facts: Any) -> list[Measurement]:
    """Two nodes with three GPUs each; the first rank reports the metric ``name`` of all subjects in ``values``."""
    unit = {"rail_share": "of the median", "p2p_gain": "x"}[name]
    metrics = tuple(Metric(name=name, value=value, unit=unit, subject=subject) for subject, value in values.items())
    check = {"rail_share": "collectives.rails", "p2p_gain": "collectives.nccl_settings"}[name]
    ranks = [Measurement(check=check, subject=f"n{node}/gpu{gpu}") for node in (0, 1) for gpu in range(3)]
    return [ranks[0].model_copy(update={"metrics": metrics, "facts": facts}), *ranks[1:]]


P2P_FACTS = {"nvlink": "yes", "p2p_available": "yes"}


@pytest.mark.parametrize(
    ("name", "subjects", "facts"),
    [
        ("rail_share", ("rail0", "rail1", "rail2"), {"backend": "nccl"}),
        ("p2p_gain", ("n0", "n1"), P2P_FACTS),
    ],
)
def test_metric_required_per_rail_or_node(name: str, subjects: tuple[str, ...], facts: dict[str, Any]) -> None:
    complete = comparison(name, dict.fromkeys(subjects, 2.0), **facts)
    assert missing(verdicts(complete[0].check, *complete, metric=name)) == []
    incomplete = comparison(name, dict.fromkeys(subjects[:-1], 2.0), **facts)
    (detail,) = missing(verdicts(incomplete[0].check, *incomplete, metric=name))
    assert f"1 of {len(subjects)}" in detail
    assert detail.endswith(f": {subjects[-1]}")


def test_subject_of_a_single_node_is_the_cluster() -> None:
    one_node = comparison("p2p_gain", {"cluster": 2.0}, **P2P_FACTS)[:3]
    assert missing(verdicts(one_node[0].check, *one_node, metric="p2p_gain")) == []


def test_absent_subject_needs_no_metric() -> None:
    metric = "digest_mismatches"
    values = {f"{metric}@gpu0": 0.0, f"{metric}@gpu1": 0.0, "uncompared_devices": 1.0}
    others = [rank(number, "device.digests", {}) for number in (1, 2)]
    first = absent(rank(0, "device.digests", values, unit="rounds"), metric, "n0/gpu2")
    assert missing(verdicts("device.digests", first, *others, metric=metric)) == []
    fourth = rank(3, "device.digests", {})
    (detail,) = missing(verdicts("device.digests", first, *others, fourth, metric=metric))
    assert "1 of 4" in detail
    assert detail.endswith(": n0/gpu3")


def test_ranks_with_different_facts_are_an_error() -> None:
    """Otherwise one rank that reports gloo would make the rule not applicable for any value."""
    first = rank(0, "collectives.all_gather", {"busbw.1GiB": 0.01}, backend="nccl")
    other = rank(3, "collectives.all_gather", {}, backend="gloo")
    (verdict,) = verdicts("collectives.all_gather", first, other, metric="busbw.1GiB")
    assert (verdict.outcome, verdict.reasons) == (Outcome.ERROR, (Reason.FACT_INVALID,))
    for text in ("backend", "nccl on n0/gpu0", "gloo on n0/gpu3"):
        assert text in verdict.detail


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [({"backend": "cpu"}, Outcome.ERROR), ({"backend": "cpu", "gpu": None}, Outcome.ERROR), ({}, Outcome.PASS)],
)
def test_rule_applies_to_all_gpus_of_a_model(facts: dict[str, Any], outcome: Outcome) -> None:
    ranks = [rank(number, "device.memory", {"tested_share": 90}, unit="%") for number in range(2)]
    other = rank(2, "device.memory", {"tested_share": 90}, unit="%", **facts)
    results = verdicts("device.memory", *ranks, other, metric="tested_share")
    assert [verdict.outcome for verdict in results] == [Outcome.PASS, Outcome.PASS, outcome]
    assert (results[2].reasons == (Reason.FACT_INVALID,)) is (outcome is Outcome.ERROR)


def test_rule_may_not_apply_to_another_model_or_without_an_nvlink_bridge() -> None:
    ranks = [rank(number, "device.gemm", {}) for number in (0, 1)]
    without_bf16 = absent(rank(2, "device.gemm", {}, gpu=UNKNOWN), "tflops.bf16")
    results = verdicts("device.gemm", *ranks, without_bf16, metric="tflops.bf16")
    assert [verdict.outcome for verdict in results] == [Outcome.ERROR, Outcome.ERROR, Outcome.SKIP]
    burn = ("device.burn", {"new_errors.nvlinks_down": 0})
    bridged = [rank(number, *burn, unit="links") for number in (0, 1)]
    without_bridge = absent(rank(2, "device.burn", {}), "new_errors.nvlinks_down")
    results = verdicts("device.burn", *bridged, without_bridge, metric="new_errors.nvlinks_down")
    assert [verdict.outcome for verdict in results] == [Outcome.PASS, Outcome.PASS, Outcome.SKIP]


def gemm(node: str, *values: float) -> list[Measurement]:
    return [
        rank(number, "device.gemm", {"tflops.bf16": value}, node=node, unit="TFLOP/s", gpu=UNKNOWN)
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize("others", [[], ["n2"]])
def test_of_two_or_more_nodes_the_slower_one_is_at_fault(others: list[str]) -> None:
    eight, four = gemm("n0", *[300.0] * 8), gemm("n1", *[200.0] * 4)
    more = [each for node in others for each in gemm(node, *[300.0] * 4)]
    results = verdicts("device.gemm", *eight, *four, *more, metric="tflops.bf16")
    outcomes = {node: {each.outcome for each in results if each.subject.startswith(node)} for node in ("n0", "n1")}
    assert outcomes == {"n0": {Outcome.UNJUDGED}, "n1": {Outcome.FAIL}}


@pytest.mark.parametrize(("slower", "outcome"), [(265.0, Outcome.FAIL), (275.0, Outcome.UNJUDGED)])
def test_the_slower_of_two_gpus_is_at_fault(slower: float, outcome: Outcome) -> None:
    for gpus in (gemm("n0", 300.0, slower), [*gemm("n0", 300.0), *gemm("n1", slower)]):
        results = verdicts("device.gemm", *gpus, metric="tflops.bf16")
        assert [each.outcome for each in results] == [Outcome.UNJUDGED, outcome]


@pytest.mark.parametrize(
    ("check", "metric", "ports", "busbw", "outcome"),
    [
        ("collectives.rails", "rail_busbw", 8, 48.0, Outcome.PASS),
        ("collectives.rails", "rail_busbw", 8, 0.93 * 48, Outcome.WARN),
        ("collectives.rails", "rail_busbw", 8, 0.90 * 48, Outcome.FAIL),
        ("collectives.rails", "rail_busbw", 4, 10.0, Outcome.SKIP),  # GPUs share ports
        ("collectives.pairs", "best_busbw", 8, 48.0, Outcome.PASS),
        ("collectives.pairs", "best_busbw", 8, 0.88 * 48, Outcome.WARN),
        ("collectives.pairs", "best_busbw", 8, 32.0, Outcome.FAIL),
    ],
)
def test_two_nodes_are_judged_by_the_rate_of_the_ports_of_a_gpu(
    check: str, metric: str, ports: int, busbw: float, outcome: Outcome
) -> None:
    links = Links(network="rdma", ports=RdmaPorts("roce", ports, 400))
    subject = "rail3" if check == "collectives.rails" else "n0/gpu3"
    facts = {"backend": "nccl", "comparable": "no", "gpu": "NVIDIA H200", "world_size": 16, "nodes": 2}
    value = Metric(name=metric, value=busbw, unit="GB/s", subject=subject)
    measured = Measurement(check=check, subject="n0/gpu0", metrics=(value,), facts=facts)
    results = judge_check(catalog()[check], [measured], {}, "t", References(None, skus(), links=links))
    assert [each.outcome for each in results if each.metric == metric and each.value] == [outcome]


def test_with_two_nodes_each_node_is_a_peer_group() -> None:
    gpus = (*gemm("n0", *[300.0] * 4), *gemm("n1", 290, 290, 290, 90))
    results = verdicts("device.gemm", *gpus, metric="tflops.bf16")
    assert [verdict.subject for verdict in results if verdict.outcome is Outcome.FAIL] == ["n1/gpu3"]
    basis = results[-1].basis
    assert basis is not None
    assert (basis.name, basis.expected) == (f"4 subjects on {UNKNOWN} in n1", 290)


def test_low_outlier_warns_although_it_meets_the_threshold() -> None:
    gpus = gemm("n0", 664, 670, 677, 300)
    results = by_trial(verdicts("device.gemm", *gpus, metric="tflops.bf16", expect="> 280 TFLOP/s"))
    assert [verdict.outcome for verdict in results] == [Outcome.PASS] * 3 + [Outcome.WARN]
    assert (results[-1].value, results[-1].reasons) == (300, (Reason.BELOW_PEERS,))


def test_thousands_of_gpus_are_evaluated_in_linear_time() -> None:
    ranks = [rank(number, "device.gemm", {}, backend="cpu") for number in range(4000)]
    start = time.process_time()
    verdicts("device.gemm", *ranks)
    assert time.process_time() - start < 10, "a comparison of all pairs takes a minute"


EACH_NODE = "collectives.each_node"


def nodes(*busbw: float | None, gpu: str = H200, first: int = 0) -> list[Measurement]:
    """The all-reduce of each node on its eight GPUs, reported by its first rank; None: no metrics."""
    shape: dict[str, JsonValue] = {"gpu": gpu, "backend": "nccl", "world_size": 8, "nodes": 1}
    measurements = []
    for number, value in enumerate(busbw, first):
        metrics = (
            Metric(name="busbw.8GiB", value=value or 0, unit="GB/s", subject=f"n{number}"),
            Metric(name="wrong_elements", value=0, unit="count", subject=f"n{number}"),
        )
        reported: dict[str, Any] = {"metrics": metrics, "facts": shape} if value else {}
        subjects = [f"n{number}/gpu{index}" for index in range(8)]
        measurements += [Measurement(check=EACH_NODE, subject=subjects[0], **reported)]
        measurements += [Measurement(check=EACH_NODE, subject=subject) for subject in subjects[1:]]
    return measurements


def busbw_verdicts(*measured: Measurement) -> dict[str, Verdict]:
    return {verdict.subject: verdict for verdict in verdicts(EACH_NODE, *measured, metric="busbw.8GiB")}


def test_each_node_is_compared_with_the_reference_of_one_node() -> None:
    by_node = busbw_verdicts(*nodes(475, 300))
    assert {node: verdict.outcome for node, verdict in by_node.items()} == {"n0": Outcome.PASS, "n1": Outcome.FAIL}
    slow = by_node["n1"]
    assert slow.ratio == pytest.approx(0.634, abs=0.001)
    assert slow.basis is not None
    assert (slow.basis.name, slow.basis.expected) == ("NVIDIA H200 SXM", 473)


def test_node_that_passes_and_is_a_low_outlier_warns() -> None:
    by_node = busbw_verdicts(*nodes(475, 474, 476, 475, 452))
    warned = {node: verdict.reasons for node, verdict in by_node.items() if verdict.outcome is Outcome.WARN}
    assert warned == {"n4": (Reason.BELOW_PEERS,)}
    two_nodes = busbw_verdicts(*nodes(475, 452))
    assert {verdict.outcome for verdict in two_nodes.values()} == {Outcome.PASS}, "two nodes are not compared"


def test_nodes_with_unknown_gpus_are_compared_with_peers_only() -> None:
    by_node = busbw_verdicts(*nodes(100, 101, 99, 60, gpu=UNKNOWN))
    assert [verdict.outcome for verdict in by_node.values()] == [*[Outcome.UNJUDGED] * 3, Outcome.FAIL]
    basis = by_node["n3"].basis
    assert basis is not None
    assert basis.name == f"4 subjects on {UNKNOWN}"
    two_nodes = busbw_verdicts(*nodes(100, 60, gpu=UNKNOWN))
    assert [verdict.outcome for verdict in two_nodes.values()] == [Outcome.UNJUDGED] * 2


def test_nodes_with_different_models_have_their_own_reference() -> None:
    by_node = busbw_verdicts(*nodes(475), *nodes(400, gpu=H100, first=1))
    names = {node: verdict.basis.name for node, verdict in by_node.items() if verdict.basis}
    assert names == {"n0": "NVIDIA H200 SXM", "n1": "NVIDIA H100 SXM"}


def test_node_without_metrics_is_an_error_of_that_node() -> None:
    by_node = busbw_verdicts(*nodes(475, None, 474))
    assert by_node["n1"].outcome is Outcome.ERROR
    assert {by_node["n0"].outcome, by_node["n2"].outcome} == {Outcome.PASS}


def test_threshold_of_the_trial_applies_to_each_node() -> None:
    results = verdicts(EACH_NODE, *nodes(475, 440), expect="> 450 GB/s", metric="busbw.8GiB")
    outcomes = {verdict.subject: verdict.outcome for verdict in by_trial(results)}
    assert outcomes == {"n0": Outcome.PASS, "n1": Outcome.FAIL}
