"""Who is judged together: no place may be missing, no rank may contradict another, and two nodes are no fleet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome, Threshold, Verdict

H100, H200, STRANGE = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA Strange"


def rank(  # "unidirectional@gpu0->gpu1" is a figure of that place, "copy" one of the rank's own GPU
    number: int, check: str, figures: Mapping[str, float], *, node: str = "n0", unit: str = "GB/s", **facts: Any
) -> Measurement:
    subject = f"{node}/gpu{number}"
    told: dict[str, JsonValue] = {"gpu": H200, "backend": "cuda", "world_size": 1, "nodes": 1, **facts}
    named = ((*key.split("@"), f"gpu{number}")[:2] for key in figures)
    metrics = tuple(
        Metric(name=name, value=value, unit=unit, subject=f"{node}/{where}")
        for (name, where), value in zip(named, figures.values(), strict=True)
    )
    return Measurement(check=check, subject=subject, rank=number, metrics=metrics, facts=told)


def judged(check: str, *ranks: Measurement, expect: str = "", metric: str = "") -> list[Verdict]:
    limits = {metric: Threshold.parse(expect)} if expect else {}
    said = judge_check(catalog()[check], ranks, limits, "mine", References(None, skus()))
    return [one for one in said if not metric or one.metric == metric]


def errors(said: list[Verdict]) -> list[str]:
    return [one.message for one in said if one.outcome is Outcome.ERROR]


def test_a_figure_of_each_gpu_is_missing_where_one_gpu_has_none() -> None:
    ranks = [rank(number, "transfer.host", {"h2d_single": 55, "d2h_single": 55}) for number in range(4)]
    assert errors(judged("transfer.host", *ranks, metric="h2d_single")) == []
    alone = rank(2, "transfer.host", {"d2h_single": 55})
    (missing,) = errors(judged("transfer.host", *ranks[:2], alone, ranks[3], metric="h2d_single"))
    assert missing == "h2d_single was not measured everywhere; not of 1 of 4: n0/gpu2"


def test_a_figure_of_each_pair_is_missing_where_one_pair_has_none() -> None:
    pairs = {f"unidirectional@gpu{a}->gpu{b}": 390.0 for a, b in permutations(range(3), 2)}
    others = [rank(number, "transfer.peers", {}) for number in (1, 2)]
    assert errors(judged("transfer.peers", rank(0, "transfer.peers", pairs), *others, metric="unidirectional")) == []
    del pairs["unidirectional@gpu2->gpu0"]
    (missing,) = errors(judged("transfer.peers", rank(0, "transfer.peers", pairs), *others, metric="unidirectional"))
    assert missing == "unidirectional was not measured everywhere; not of 1 of 6: n0/gpu2->gpu0"


def test_a_pair_that_has_one_figure_for_both_ways_may_name_either_first() -> None:
    pairs = {f"busbw.1GiB@{pair}": 359.0 for pair in ("gpu0->gpu1", "gpu2->gpu0", "gpu1->gpu2")}
    name = "collectives.gpu_pairs"
    others = [rank(number, name, {}, backend="nccl") for number in (1, 2)]
    assert errors(judged(name, rank(0, name, pairs, backend="nccl"), *others, metric="busbw.1GiB")) == []
    del pairs["busbw.1GiB@gpu2->gpu0"]
    (missing,) = errors(judged(name, rank(0, name, pairs, backend="nccl"), *others, metric="busbw.1GiB"))
    assert missing == "busbw.1GiB was not measured everywhere; not of 1 of 3: n0/gpu0->gpu2"


def shares(name: str, places: Mapping[str, float], **facts: Any) -> list[Measurement]:
    """Two nodes of three GPUs; the first rank tells of all ``places``."""
    unit = {"rail_share": "of the median", "p2p_gain": "x"}[name]
    told = tuple(Metric(name=name, value=value, unit=unit, subject=place) for place, value in places.items())
    check = {"rail_share": "collectives.rails", "p2p_gain": "collectives.nccl_settings"}[name]
    others = [Measurement(check=check, subject=f"n{node}/gpu{gpu}") for node in (0, 1) for gpu in range(3)]
    return [others[0].model_copy(update={"metrics": told, "facts": facts}), *others[1:]]


@pytest.mark.parametrize(
    ("name", "places", "facts"),
    [
        ("rail_share", ("rail0", "rail1", "rail2"), {"backend": "nccl", "comparable": "yes"}),
        ("p2p_gain", ("n0", "n1"), {"nvlink": "yes", "peers": "yes"}),
    ],
)
def test_a_figure_of_each_rail_or_node_is_missing_where_one_has_none(
    name: str, places: tuple[str, ...], facts: dict[str, Any]
) -> None:
    whole = shares(name, dict.fromkeys(places, 2.0), **facts)
    assert errors(judged(whole[0].check, *whole, metric=name)) == []
    less = shares(name, dict.fromkeys(places[:-1], 2.0), **facts)
    (missing,) = errors(judged(less[0].check, *less, metric=name))
    assert missing == f"{name} was not measured everywhere; not of 1 of {len(places)}: {places[-1]}"


def test_a_node_by_itself_is_the_cluster() -> None:
    whole = shares("p2p_gain", {"cluster": 2.0}, nvlink="yes", peers="yes")[:3]
    assert errors(judged(whole[0].check, *whole, metric="p2p_gain")) == []


def test_who_has_no_twin_is_excused_and_nobody_else() -> None:
    twins = {"digest_mismatches@gpu0": 0.0, "digest_mismatches@gpu1": 0.0, "uncompared_devices": 1.0}
    others = [rank(number, "device.digests", {}) for number in (1, 2)]
    first = rank(0, "device.digests", twins, unit="rounds", excused={"n0/gpu2": "nothing like it"})
    assert errors(judged("device.digests", first, *others, metric="digest_mismatches")) == []
    (missing,) = errors(
        judged("device.digests", first, *others, rank(3, "device.digests", {}), metric="digest_mismatches")
    )
    assert missing.endswith("not of 1 of 4: n0/gpu3")


def test_ranks_that_contradict_each_other_prove_nothing() -> None:
    """The last rank's word was everybody's: one that said gloo let any figure pass."""
    ranks = [rank(0, "collectives.all_gather", {"busbw.1GiB": 0.01}, backend="nccl")]
    liar = rank(3, "collectives.all_gather", {}, backend="gloo")
    (said,) = judged("collectives.all_gather", *ranks, liar, metric="busbw.1GiB")
    assert said.outcome is Outcome.ERROR
    assert said.message.endswith("backend is nccl at n0/gpu0, gloo at n0/gpu3")


@pytest.mark.parametrize(
    ("odd", "outcome"),
    [({"backend": "cpu"}, Outcome.ERROR), ({"backend": "cpu", "gpu": None}, Outcome.ERROR), ({}, Outcome.PASS)],
)
def test_what_applies_to_a_gpu_applies_to_its_like(odd: dict[str, Any], outcome: Outcome) -> None:
    ranks = [rank(number, "device.memory", {"tested_share": 90}, unit="%") for number in range(3)]
    ranks[2] = rank(2, "device.memory", {"tested_share": 90}, unit="%", **odd)
    said = judged("device.memory", *ranks, metric="tested_share")
    assert [one.outcome for one in said] == [Outcome.PASS, Outcome.PASS, outcome]


def test_unlike_gpus_and_bridges_may_differ() -> None:
    """A model without bf16 beside one with it; a card with an NVLink bridge beside one without."""
    ranks = [rank(number, "device.gemm", {}, has_bf16="yes") for number in (0, 1)]
    other = rank(2, "device.gemm", {}, has_bf16="no", gpu=STRANGE)
    said = judged("device.gemm", *ranks, other, metric="tflops.bf16")
    assert [one.outcome for one in said] == [Outcome.ERROR, Outcome.ERROR, Outcome.SKIP]  # those two were not measured
    burnt = [rank(number, "device.burn", {"new_errors.nvlinks_down": 0}, unit="links") for number in (0, 1)]
    bare = rank(2, "device.burn", {}, reads_nvlinks_down="no: no NVLink")
    said = judged("device.burn", *burnt, bare, metric="new_errors.nvlinks_down")
    assert [one.outcome for one in said] == [Outcome.PASS, Outcome.PASS, Outcome.SKIP]


def gemm(node: str, *values: float) -> list[Measurement]:
    return [
        rank(number, "device.gemm", {"tflops.bf16": value}, node=node, unit="TFLOP/s", gpu=STRANGE, has_bf16="yes")
        for number, value in enumerate(values)
    ]


def test_two_nodes_never_outvote_each_other() -> None:
    eight, four = gemm("n0", *[300.0] * 8), gemm("n1", *[200.0] * 4)
    said = judged("device.gemm", *eight, *four, metric="tflops.bf16")
    assert {one.outcome for one in said} == {Outcome.UNJUDGED}, "either node may be the good one"
    three = judged("device.gemm", *eight, *four, *gemm("n2", *[300.0] * 4), metric="tflops.bf16")
    assert {one.outcome for one in three if one.subject.startswith("n1")} == {Outcome.FAIL}


def test_of_two_nodes_each_tells_who_is_slower_in_it() -> None:
    said = judged("device.gemm", *gemm("n0", *[300.0] * 4), *gemm("n1", 200, 200, 200, 90), metric="tflops.bf16")
    assert [one.subject for one in said if one.outcome is Outcome.FAIL] == ["n1/gpu3"]
    assert said[-1].basis_text.startswith("median of 4 subjects on NVIDIA Strange in n1: 200 TFLOP/s")


def test_a_threshold_of_the_trial_does_not_hide_who_is_far_behind() -> None:
    said = judged("device.gemm", *gemm("n0", 664, 670, 677, 300), metric="tflops.bf16", expect="> 280 TFLOP/s")
    assert [one.outcome for one in said] == [Outcome.PASS] * 3 + [Outcome.WARN]
    assert said[-1].message.startswith("tflops.bf16 is 300 TFLOP/s, and far under the others of this trial")


def test_thousands_of_gpus_are_not_each_compared_with_each() -> None:
    ranks = [rank(number, "device.gemm", {}, backend="cpu", has_bf16="yes") for number in range(4000)]
    began = time.process_time()
    judged("device.gemm", *ranks)
    assert time.process_time() - began < 10, "each of each took a minute"


EACH_NODE = "collectives.each_node"


def nodes(*busbw: float | None, gpu: str = H200, first: int = 0) -> list[Measurement]:
    """Every node's own all-reduce on eight GPUs, told by the first of its ranks; None: it told nothing."""
    shape: dict[str, JsonValue] = {"gpu": gpu, "backend": "nccl", "world_size": 8, "nodes": 1}
    found = []
    for number, value in enumerate(busbw, first):
        metrics = (
            Metric(name="busbw.8GiB", value=value or 0, unit="GB/s", subject=f"n{number}"),
            Metric(name="wrong_elements", value=0, unit="count", subject=f"n{number}"),
        )
        told: dict[str, Any] = {"metrics": metrics, "facts": shape} if value else {}
        places = [f"n{number}/gpu{one}" for one in range(8)]
        found += [Measurement(check=EACH_NODE, subject=places[0], **told)]
        found += [Measurement(check=EACH_NODE, subject=place) for place in places[1:]]
    return found


def on_busbw(*measured: Measurement) -> dict[str, Verdict]:
    return {one.subject: one for one in judged(EACH_NODE, *measured, metric="busbw.8GiB")}


def test_each_node_is_held_to_what_one_node_of_its_gpus_reaches() -> None:
    said = on_busbw(*nodes(475, 300))
    assert {node: one.outcome for node, one in said.items()} == {"n0": Outcome.PASS, "n1": Outcome.FAIL}
    assert "63.4% of the 473 GB/s of SKU NVIDIA H200 SXM" in said["n1"].message


def test_a_node_that_passes_and_is_far_under_the_others_is_told() -> None:
    said = on_busbw(*nodes(475, 474, 476, 475, 452))
    assert {node: one.outcome for node, one in said.items() if one.outcome is not Outcome.PASS} == {"n4": Outcome.WARN}
    assert "far under the others of this trial" in said["n4"].message
    assert {one.outcome for one in on_busbw(*nodes(475, 452)).values()} == {Outcome.PASS}  # of two nobody knows


def test_of_unknown_gpus_the_other_nodes_tell_who_is_slow_and_not_whether_all_are() -> None:
    said = on_busbw(*nodes(100, 101, 99, 60, gpu=STRANGE))
    assert [one.outcome for one in said.values()] == [*[Outcome.UNJUDGED] * 3, Outcome.FAIL]
    assert "median of 4 subjects on NVIDIA Strange" in said["n3"].basis_text
    assert [one.outcome for one in on_busbw(*nodes(100, 60, gpu=STRANGE)).values()] == [Outcome.UNJUDGED] * 2


def test_unlike_nodes_are_each_held_to_their_own() -> None:
    said = on_busbw(*nodes(475), *nodes(400, gpu=H100, first=1))
    assert "SKU NVIDIA H200 SXM" in said["n0"].basis_text
    assert "SKU NVIDIA H100 SXM" in said["n1"].basis_text


def test_a_node_that_told_nothing_is_an_error_of_its_own() -> None:
    said = on_busbw(*nodes(475, None, 474))
    assert said["n1"].outcome is Outcome.ERROR
    assert {said["n0"].outcome, said["n2"].outcome} == {Outcome.PASS}


def test_a_threshold_is_asked_of_each_node() -> None:
    said = judged(EACH_NODE, *nodes(475, 440), expect="> 450 GB/s", metric="busbw.8GiB")
    assert {one.subject: one.outcome for one in said} == {"n0": Outcome.PASS, "n1": Outcome.FAIL}
    assert {one.basis_text for one in said} == {"trial mine: > 450 GB/s"}
