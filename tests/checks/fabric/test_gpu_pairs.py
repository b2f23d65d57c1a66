"""GPU pairs of synthetic nodes with known faults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import collectives, subgroups
from seatrial.bench import rank as rank_
from seatrial.bench.data_check import Mismatch
from seatrial.bench.pairs import PairResults, PairTiming
from seatrial.checks.check import Context
from seatrial.checks.fabric import _nccl_log, gpu_pairs
from seatrial.checks.fabric.gpu_pairs import CHECK, GPU_SIZE, merge_steps, results_by_node
from seatrial.diagnose.causes import Run
from seatrial.diagnose.localize import localize
from seatrial.discover import gpu
from seatrial.discover.nvlinks import NVLINK, UNKNOWN_LINK
from seatrial.discover.nvml import Gpu, NvLink
from seatrial.hardware.links import Links
from seatrial.hardware.references import References, Sku
from seatrial.judge.insights import sensitivity
from seatrial.judge.rules import judge_check
from seatrial.model import Absent, Finding, Measurement, Outcome, ReferenceValue, Threshold, Why
from seatrial.worker import measure
from tests.checks.fabric.verdicts import measurement

GOOD, BAD = 360.0, 180.0  # GB/s
MODEL, UNKNOWN_MODEL = "NVIDIA Known", "NVIDIA Unknown"
BUSBW = "busbw.1GiB"
TWO_OF_A_NODE = ReferenceValue(gpus=2, nodes=1, value=GOOD, unit="GB/s", source="a test")
KNOWN = References(None, [Sku(name="Known", nvml_names=(MODEL,), expected={f"gpu_pairs.{BUSBW}": (TWO_OF_A_NODE,)})])
WRONG = Mismatch(7, 5, "1.0", "2.0", "0x1")

Pair = frozenset[int]


def timing(a: int, b: int, rate: float, wrong: Mismatch | None = None) -> PairTiming:
    """Timing of rank ``a`` with partner ``b`` at ``rate`` GB/s per direction."""
    return PairTiming(a, b, (GPU_SIZE / 1e9 / rate,) * 8, wrong)


def measured(
    gpus: int = 8,
    *,
    nodes: int = 1,
    bad: Collection[int] = (),
    path: Collection[int] = (),
    shared: Collection[Pair] = (),
    wrong: Mapping[tuple[int, int], Mismatch] | None = None,
    wrong_retry: Mapping[tuple[int, int], Mismatch] | None = None,
    link: str = NVLINK,
    second_link: str = "",
    model: str = MODEL,
    second_model: str = "",
) -> list[Measurement]:
    """Measurements of nodes with ``gpus`` each: slow GPUs ``bad``, a slow ``path``, pairs that have ``shared`` links.

    ``second_link``, ``second_model``: link and model of the second node if they differ from ``link`` and ``model``.
    ``wrong``: mismatches by (sender, receiver); ``wrong_retry``: the same for retries.
    """
    ranks_by_node = {f"n{node}": range(node * gpus, (node + 1) * gpus) for node in range(nodes)}
    subjects = [f"{name}/gpu{rank % gpus}" for name, ranks in ranks_by_node.items() for rank in ranks]
    rank_pairs = [pair for ranks in ranks_by_node.values() for pair in permutations(ranks, 2)]

    def rate(a: int, b: int, contended: Collection[Pair]) -> float:
        return BAD if {a, b} & set(bad) or {a, b} == set(path) or frozenset((a, b)) in contended else GOOD

    timings = [timing(a, b, rate(a, b, shared), (wrong or {}).get((b, a))) for a, b in rank_pairs]
    first = results_by_node(ranks_by_node, subjects, GPU_SIZE, timings)
    slow = {frozenset(partners) for results in first.values() for partners in gpu_pairs._retry_steps(results)}
    retries = [
        timing(a, b, rate(a, b, ()), (wrong_retry or {}).get((b, a)))
        for a, b in rank_pairs
        if frozenset((a, b)) in slow
    ]
    by_node = results_by_node(ranks_by_node, subjects, GPU_SIZE, timings, retries)
    ranks = [Measurement(check=CHECK.name, subject=subject, rank=rank) for rank, subject in enumerate(subjects)]
    for number, (node, results) in enumerate(by_node.items()):
        node_link = second_link if node == "n1" and second_link else link
        name = second_model if node == "n1" and second_model else model
        facts = {"backend": "nccl", "gpu": name, "world_size": 2, "nodes": 1, "link": node_link}
        answers = gpu_pairs._answers(node, results, node_link, retry=True)
        first_rank = number * gpus
        measured_by_rank = measurement(CHECK, answers, subjects[first_rank], **facts)
        ranks[first_rank] = measured_by_rank.model_copy(update={"rank": first_rank})
    return ranks


def verdicts(ranks: list[Measurement]) -> dict[tuple[str, str], Outcome]:
    return {(verdict.metric, verdict.subject): verdict.outcome for verdict in judge_check(CHECK, ranks, {}, "t", KNOWN)}


def located(ranks: list[Measurement]) -> list[Finding]:
    return list(localize(Run(judge_check(CHECK, ranks, {}, "t", KNOWN), ranks, {CHECK.name: CHECK})))


def failed(ranks: list[Measurement], metric: str = "") -> set[str]:
    return {
        subject
        for (name, subject), outcome in verdicts(ranks).items()
        if outcome is Outcome.FAIL and metric in ("", name)
    }


def value(ranks: list[Measurement], name: str, subject: str) -> float:
    return next(metric.value for metric in ranks[0].metrics if (metric.name, metric.subject) == (name, subject))


def retry_rates(measurements: list[Measurement]) -> dict[str, dict[str, float]]:
    """Pair → the rates in the evidence of its busbw, for the pairs that were retried."""
    evidence: dict[str, Any] = {
        metric.subject: metric.evidence
        for metric in measurements[0].metrics
        if metric.name.startswith("busbw.") and metric.evidence
    }
    return {pair: rates["single_pair"] for pair, rates in evidence.items()}


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
def test_good_node_passes(gpus: int) -> None:
    outcomes = verdicts(measured(gpus))
    assert {outcome for (metric, _), outcome in outcomes.items() if metric == BUSBW} == {Outcome.PASS}
    assert set(outcomes.values()) == ({Outcome.PASS} if gpus > 3 else {Outcome.PASS, Outcome.SKIP})
    assert (outcomes.get(("shared_links", "n0")) is Outcome.PASS) == (gpus > 3), (
        "with three GPUs no pairs run concurrently"
    )
    pairs = {subject for metric, subject in outcomes if metric == BUSBW}
    assert pairs == {f"n0/gpu{a}->gpu{b}" for a, b in combinations(range(gpus), 2)}


@pytest.mark.parametrize("gpus", range(3, 9))
def test_slow_gpus_are_located_up_to_the_maximum(gpus: int) -> None:
    max_locatable: Any = measured(gpus)[0].facts["max_locatable_gpus"]
    assert max_locatable == (gpus - 1) // 2 >= 1, "a majority must be good"
    for count in range(1, max_locatable + 1):
        for bad in combinations(range(gpus), count):
            ranks = measured(gpus, bad=bad)
            assert failed(ranks, "gpu_share") == {f"n0/gpu{gpu}" for gpu in bad}
            assert not failed(ranks, "path_share")
            assert {finding.subject for finding in located(ranks)} == {f"n0/gpu{gpu}" for gpu in bad}
            assert {finding.confidence for finding in located(ranks)} == {"medium"}


def test_all_pairs_of_a_slow_gpu_fail_the_reference() -> None:
    assert failed(measured(8, bad=(3,)), BUSBW) == {
        f"n0/gpu{min(3, gpu)}->gpu{max(3, gpu)}" for gpu in {*range(8)} - {3}
    }


def test_more_slow_gpus_than_the_maximum_give_low_confidence() -> None:
    slow = list(located(measured(4, bad=(1, 2))))
    assert {finding.confidence for finding in slow} == {"low"}


def test_slow_path_between_good_gpus_is_located() -> None:
    ranks = measured(8, path=(2, 5))
    assert failed(ranks) == {"n0/gpu2->gpu5"}
    (finding,) = located(ranks)
    assert (finding.subject, finding.confidence) == ("n0/gpu2->gpu5", "medium")
    assert retry_rates(ranks) == {"n0/gpu2->gpu5": {"concurrent": pytest.approx(BAD), "single": pytest.approx(BAD)}}


def test_pairs_that_are_slow_only_concurrently_share_a_link() -> None:
    contended = {frozenset((0, 7)), frozenset((1, 6))}
    ranks = measured(8, shared=contended)
    assert not failed(ranks)
    assert not list(located(ranks))
    outcomes = verdicts(ranks)
    assert outcomes["shared_links", "n0"] is Outcome.WARN
    assert value(ranks, "shared_links", "n0") == 2
    assert value(ranks, BUSBW, "n0/gpu0->gpu7") == pytest.approx(GOOD), "the retry is judged"
    (warning,) = [verdict for verdict in judge_check(CHECK, ranks, {}, "t", KNOWN) if verdict.outcome is Outcome.WARN]
    assert "n0/gpu0->gpu7" in warning.evidence


def test_shared_links_are_not_judged_on_pcie() -> None:
    ranks = measured(8, shared={frozenset((0, 7))}, link="PHB", model=UNKNOWN_MODEL)
    assert verdicts(ranks)["shared_links", "n0"] is Outcome.SKIP
    assert not failed(ranks)
    assert failed(measured(8, path=(0, 7), link="PHB", model=UNKNOWN_MODEL)) == {"n0/gpu0->gpu7"}


@pytest.mark.parametrize("link", ["NODE + SYS", "NVLink + SYS", UNKNOWN_LINK])
def test_gpus_with_different_links_are_not_compared(link: str) -> None:
    """Paths between CPU sockets are slower on every such machine."""
    ranks = measured(8, path=(0, 7), link=link, model=UNKNOWN_MODEL)
    assert verdicts(ranks)["path_share", "n0"] is Outcome.SKIP
    assert not failed(ranks)
    assert not list(located(ranks))
    assert all(link in absent.reason for absent in ranks[0].absent)
    assert {absent.metric for absent in ranks[0].absent} == {"path_share", "gpu_share"}


@pytest.mark.parametrize("second_link", ["NODE + SYS", UNKNOWN_LINK])
def test_node_with_different_links_does_not_affect_other_nodes(second_link: str) -> None:
    ranks = measured(8, nodes=3, bad=(3,), second_link=second_link, model=UNKNOWN_MODEL)
    assert failed(ranks) == {"n0/gpu3"}
    by_subject = {
        verdict.subject: verdict
        for verdict in judge_check(CHECK, ranks, {}, "t", KNOWN)
        if verdict.metric == "gpu_share"
    }
    assert by_subject["n1"].outcome is Outcome.SKIP
    assert second_link in by_subject["n1"].message
    assert {subject.partition("/")[0] for subject in by_subject} == {"n0", "n1", "n2"}
    assert failed(measured(8, nodes=3, bad=(11,), second_link=second_link), BUSBW), (
        "the reference value of its model still applies"
    )


def test_two_gpus_are_judged_only_by_the_reference() -> None:
    ranks = measured(2, nodes=4, path=(0, 1))
    assert failed(ranks) == {"n0/gpu0->gpu1"}
    assert verdicts(ranks)["gpu_share", "n0"] is Outcome.SKIP
    assert not failed(measured(2, nodes=4, path=(0, 1), model=UNKNOWN_MODEL))
    assert not list(located(ranks))


def test_gpus_are_compared_within_their_node() -> None:
    ranks = measured(4, nodes=2, bad=(4, 5, 6, 7))
    assert not failed(ranks, "gpu_share")
    assert failed(ranks, BUSBW) == {f"n1/gpu{a}->gpu{b}" for a, b in combinations(range(4), 2)}
    assert failed(measured(4, nodes=2, bad=(6,)), "gpu_share") == {"n1/gpu2"}


def test_each_node_is_judged_by_the_reference_of_its_model() -> None:
    ranks = measured(4, nodes=2, path=(0, 1), second_model=UNKNOWN_MODEL)
    assert failed(ranks, BUSBW) == {"n0/gpu0->gpu1"}
    assert verdicts(ranks)[BUSBW, "n1/gpu0->gpu1"] is Outcome.UNJUDGED


def test_node_without_results_is_an_error() -> None:
    ranks = measured(4, nodes=2)
    without_results = [*ranks[:4], ranks[4].model_copy(update={"metrics": (), "absent": (), "facts": {}}), *ranks[5:]]
    assert {metric for (metric, subject), outcome in verdicts(without_results).items() if outcome is Outcome.ERROR} == {
        rule.metric for rule in CHECK.rules
    }
    assert {subject for (_, subject), outcome in verdicts(without_results).items() if outcome is Outcome.ERROR} == {
        "n1"
    }


def test_rate_on_a_model_without_sku_data_is_unjudged() -> None:
    outcomes = verdicts(measured(8, model=UNKNOWN_MODEL))
    assert {metric for (metric, _), outcome in outcomes.items() if outcome is not Outcome.PASS} == {BUSBW}
    assert {outcome for (metric, _), outcome in outcomes.items() if metric == BUSBW} == {Outcome.UNJUDGED}
    assert failed(measured(8, bad=(3,), model=UNKNOWN_MODEL)) == {"n0/gpu3"}


def test_wrong_data_names_sender_receiver_offset_and_bits() -> None:
    ranks = measured(4, wrong={(1, 2): WRONG})
    assert failed(ranks) == {"n0", "n0/gpu1->gpu2"}
    wrong = {"from": "n0/gpu1", "to": "n0/gpu2", "wrong": 7, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    (evidence,) = (metric.evidence for metric in ranks[0].metrics if metric.name == "wrong_elements")
    assert evidence == {"wrong_data": [wrong]}


def test_wrong_data_in_a_retry_counts() -> None:
    ranks = measured(4, shared={frozenset((0, 3))}, wrong_retry={(3, 0): WRONG})
    assert {"n0", "n0/gpu0->gpu3"} <= failed(ranks)
    assert value(ranks, "shared_links", "n0") == 0, "wrong data counts as a rate of 0"


def test_gpu_that_sends_wrong_data_to_all_is_located() -> None:
    ranks = measured(4, wrong={(1, other): WRONG for other in (0, 2, 3)})
    assert failed(ranks, "gpu_share") == {"n0/gpu1"}
    assert [finding.subject for finding in located(ranks)] == ["n0/gpu1"]


def without(ranks: list[Measurement], name: str, subject: str) -> list[Measurement]:
    remaining = [
        tuple(metric for metric in rank.metrics if (metric.name, metric.subject) != (name, subject)) for rank in ranks
    ]
    assert sum(map(len, remaining)) == sum(len(rank.metrics) for rank in ranks) - 1
    return [rank.model_copy(update={"metrics": metrics}) for rank, metrics in zip(ranks, remaining, strict=True)]


@pytest.mark.parametrize(("name", "subject"), [(BUSBW, "n1/gpu0->gpu3"), ("gpu_share", "n1/gpu2")])
def test_missing_metric_is_an_error(name: str, subject: str) -> None:
    outcomes = verdicts(without(measured(4, nodes=2), name, subject))
    assert [key for key, outcome in outcomes.items() if outcome is Outcome.ERROR] == [(name, "n1")]


def test_other_size_is_an_error_without_a_trial_threshold() -> None:
    ranks = measured(4)
    absent = Absent(metric=BUSBW, why=Why.NOT_REQUESTED, reason="the trial's options set size 64MiB")
    renamed = tuple(
        replace(metric, name="busbw.64MiB") if metric.name == BUSBW else metric for metric in ranks[0].metrics
    )
    other = [ranks[0].model_copy(update={"metrics": renamed, "absent": (absent,)}), *ranks[1:]]
    assert verdicts(other)[BUSBW, "n0"] is Outcome.ERROR
    judged = judge_check(CHECK, other, {"busbw.64MiB": Threshold.parse("> 300 GB/s")}, "t", KNOWN)
    assert {verdict.outcome for verdict in judged} == {Outcome.PASS, Outcome.SKIP}


def test_pair_names_do_not_depend_on_the_order_of_ranks() -> None:
    """The order of ranks may differ in a retry of the check."""
    in_order = ["n0/gpu2", "n0/gpu10", "n0/gpu9"]
    for subjects in (in_order, in_order[::-1]):
        timings = [timing(a, b, GOOD) for a, b in permutations(range(3), 2)]
        (results,) = results_by_node({"n0": (0, 1, 2)}, subjects, GPU_SIZE, timings).values()
        found = measurement(CHECK, gpu_pairs._answers("n0", results, NVLINK, retry=True), "n0/gpu2")
        pairs = {metric.subject for metric in found.metrics if metric.name == BUSBW}
        assert pairs == {"n0/gpu2->gpu9", "n0/gpu2->gpu10", "n0/gpu9->gpu10"}
        matrix: Any = found.facts["matrix"]
        assert matrix["gpus"] == ["gpu2", "gpu9", "gpu10"]


def test_steps_of_nodes_are_merged_and_smaller_nodes_end_earlier() -> None:
    rounds = [{0: 3, 3: 0, 1: 2, 2: 1}, {0: 2, 2: 0, 1: 3, 3: 1}, {0: 1, 1: 0, 2: 3, 3: 2}]
    first, *others = merge_steps([rounds, [{4: 5, 5: 4}]])
    assert set(first) == {0, 1, 2, 3, 4, 5}
    assert [set(partners) for partners in others] == [{0, 1, 2, 3}] * 2


def test_three_gpus_have_no_retries() -> None:
    assert retry_rates(measured(3, path=(0, 1))) == {}
    assert failed(measured(3, path=(0, 1)), "path_share") == {"n0/gpu0->gpu1"}


def test_detectable_faults_do_not_mention_the_network() -> None:
    texts = [
        insight.text
        for insight in sensitivity.comparison_insights(measured(4, nodes=3), {CHECK.name: CHECK}, Links(network="rdma"))
    ]
    assert [text.partition(":")[0] for text in texts] == [
        "gpu_share >= 0.9 of the median",
        "path_share >= 0.9 of the best",
    ]
    assert all("10% slower" in text and "Gb/s" not in text for text in texts)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four good GPUs behind NVLink switches; this process is rank 0."""
    links = tuple(NvLink(link=number, active=True, remote="switch") for number in range(18))
    gpu_facts = gpu.GpuFacts(gpus=tuple(Gpu(index=index, nvlinks=links) for index in range(4)))

    def gather(value: Any) -> list[Any]:
        if value == "n0/gpu0":
            return [f"n0/gpu{index}" for index in range(4)]
        return [*range(4)] if value == 0 else [value] * 4

    def measure_rounds(
        _context: Context, options: Any, nodes: Any, subjects: list[str], *, retry: bool
    ) -> dict[str, PairResults]:
        assert retry, "on GPUs"
        timings = [timing(a, b, GOOD) for a, b in permutations(range(4), 2)]
        return results_by_node(nodes, subjects, options.size or GPU_SIZE, timings)

    group = {"backend": "nccl", "gpu": f"{MODEL} + {UNKNOWN_MODEL}", "nccl_version": "2.28.9", "world_size": 4}
    monkeypatch.setattr(subgroups, "ranks_by_node", lambda _node: {"n0": (0, 1, 2, 3)})
    monkeypatch.setattr(subgroups, "describe_device", lambda _device: {"gpu": MODEL})
    # another node has another model
    monkeypatch.setattr(subgroups, "gather", lambda _model: [MODEL] * 4 + [UNKNOWN_MODEL] * 4)
    monkeypatch.setattr(collectives, "describe_group", lambda: dict(group))
    monkeypatch.setattr(_nccl_log, "connections_by_transport", lambda offset: {"P2P/CUMEM": 96 - offset})
    monkeypatch.setattr(gpu, "read", lambda _root: gpu_facts)
    monkeypatch.setattr(rank_, "gather", gather)
    monkeypatch.setattr(gpu_pairs, "_measure_rounds", measure_rounds)


def make_context(tmp_path: Path) -> Context:
    return Context(
        node="n0",
        rank=0,
        world_size=4,
        local_rank=0,
        device="cuda:0",
        nvml_index=0,
        expected_gpus=4,
        artifacts_dir=tmp_path,
        run_dir=tmp_path,
    )


@pytest.mark.usefixtures("on_gpus")
def test_transports_and_link_are_recorded_on_gpus(tmp_path: Path) -> None:
    first_rank = measure(CHECK, make_context(tmp_path), {})
    assert first_rank.error is None
    assert (first_rank.facts["link"], first_rank.absent) == (NVLINK, ())
    assert first_rank.facts["gpu"] == MODEL, "of this node"
    assert (first_rank.facts["world_size"], first_rank.facts["nodes"]) == (2, 1), "of two GPUs of a node"
    assert first_rank.facts["transports"] == {"P2P/CUMEM": 96}
    method = str(first_rank.facts["method"])
    for value in ("NCCL 2.28.9 over P2P/CUMEM", "6 pairs", "4 ranks", "3 rounds"):
        assert value in method
    others = [Measurement(check=CHECK.name, subject=f"n0/gpu{rank}", rank=rank) for rank in (1, 2, 3)]
    assert set(verdicts([first_rank, *others]).values()) == {Outcome.PASS}


@pytest.mark.usefixtures("on_gpus")
def test_other_size_is_recorded_as_not_requested(tmp_path: Path) -> None:
    first_rank = measure(CHECK, make_context(tmp_path), {"size": "64MiB"})
    reason = "the trial's options set size 64MiB"
    assert first_rank.absent == (Absent(metric=BUSBW, why=Why.NOT_REQUESTED, reason=reason),)
    assert {metric.name for metric in first_rank.metrics if metric.name.startswith("busbw")} == {"busbw.64MiB"}
