"""Localization of known faults in simulated fabrics, as collectives.pairs measures them."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from itertools import chain, combinations

import pytest
from pydantic import JsonValue

from seatrial.bench.data_check import Mismatch
from seatrial.bench.pairs import PairResults, PairTiming
from seatrial.checks import catalog
from seatrial.checks.fabric import pairs
from seatrial.checks.fabric.pairs import CHECK, MIN_SHARE
from seatrial.config.schema import CheckSettings, Config
from seatrial.diagnose import diagnose, refreshed_findings
from seatrial.diagnose.causes import Run
from seatrial.diagnose.localize import finding_source, localize
from seatrial.hardware.pair_search import round_robin
from seatrial.judge import judge
from seatrial.judge.rules import judge_check
from seatrial.model import Finding, Measurement, Metric, Outcome, Threshold, Verdict
from tests.checks.fabric.verdicts import measurement
from tests.report import samples

SIZE = 2**28
GOOD, BAD = 45.0, 22.0  # GB/s of a NIC at full and at half rate
GPUS = 2


def fabric(
    nodes: int,
    rounds: int,
    *,
    bad: Collection[int] = (),
    bad_path: tuple[int, int] | None = None,
    rail: int | None = None,
    corrupt: int | None = None,
    bad_ranks: Collection[int] = (),
    single_rate: float | None = None,
    noise: float = 0.0,
) -> Measurement:
    """The measurement of collectives.pairs on ``nodes`` nodes with ``GPUS`` GPUs each, with the given faults.

    ``bad``: slow nodes. ``rail``: the only GPU that uses the bad path. ``single_rate``: GB/s of slow paths when they
    are retried without concurrent pairs. ``noise``: relative standard deviation of the times.
    """
    random_source = random.Random(1)

    def path_is_bad(a: int, b: int, gpu: int) -> bool:
        return {a, b} == set(bad_path or ()) and rail in (None, gpu)

    def timing(a: int, b: int, gpu: int) -> PairTiming:
        rank, partner = a * GPUS + gpu, b * GPUS + gpu
        slow = {a, b} & set(bad) or {rank, partner} & set(bad_ranks) or path_is_bad(a, b, gpu)
        base = SIZE / 1e9 / (BAD if slow else GOOD)
        seconds = tuple(base * (1 + noise * random_source.gauss()) for _ in range(12))
        mismatch = Mismatch(1, 7, "1.0", "2.0", "0x1") if corrupt == b else None
        return PairTiming(rank, partner, seconds, mismatch)

    pairings = chain.from_iterable(round_robin(nodes, rounds))
    timings = tuple(timing(x, y, gpu) for a, b in pairings for x, y in ((a, b), (b, a)) for gpu in range(GPUS))
    names = {f"node{node}": tuple(range(node * GPUS, (node + 1) * GPUS)) for node in range(nodes)}
    subjects = [f"{name}/gpu{rank % GPUS}" for name, ranks in names.items() for rank in ranks]
    results = PairResults(timings, SIZE, names, subjects)
    if single_rate:
        index = {f"node{node}": node for node in range(nodes)}
        slow_pairs = [(index[a], index[b]) for a, b in results.pairs_below(MIN_SHARE, results.pair_shares)]
        seconds = (SIZE / 1e9 / single_rate,) * 12
        retries = (
            PairTiming(x * GPUS + gpu, y * GPUS + gpu, seconds, None)
            for a, b in slow_pairs
            for x, y in ((a, b), (b, a))
            for gpu in range(GPUS)
        )
        results = replace(results, retries=tuple(retries))
    return measurement(CHECK, pairs._answers(results, rounds, "nccl", {}), subjects[0], backend="nccl")


def verdicts(measured: Measurement, retry: Measurement | None = None, **expect: str) -> tuple[Verdict, ...]:
    thresholds = {metric: Threshold.parse(threshold) for metric, threshold in expect.items()}
    setting = CheckSettings(expect=thresholds, override=bool(thresholds))
    config = Config(name="t", checks={CHECK.name: setting})
    retries = [retry.model_copy(update={"retry": number}) for number in (1, 2)] if retry else []
    return judge(config, [], [measured], catalog(), {}, retries=retries)


def findings(measured: Measurement, retry: Measurement | None = None, **expect: str) -> list[Finding]:
    return list(localize(Run(verdicts(measured, retry, **expect), [measured], catalog())))


def located(measured: Measurement) -> list[str]:
    return [finding.subject for finding in findings(measured)]


def failed(measured: Measurement) -> set[str]:
    results = judge_check(CHECK, [measured], {}, "t")
    return {verdict.subject for verdict in results if verdict.outcome is Outcome.FAIL}


def test_good_fabric_has_no_finding() -> None:
    measured = fabric(8, 7, noise=0.01)
    assert not findings(measured)
    results = judge_check(CHECK, [measured], {}, "t")
    # the limit of best_busbw needs the facts of the GPUs and of their ports
    assert {each.outcome for each in results if each.metric == "best_busbw"} == {Outcome.ERROR}
    assert {each.outcome for each in results if each.metric != "best_busbw"} == {Outcome.PASS}


@pytest.mark.parametrize(("nodes", "rounds"), [(3, 3), (4, 3), (5, 5), (7, 7), (8, 7), (9, 4), (12, 4), (16, 3)])
def test_as_many_bad_nodes_as_the_fact_states_are_located(nodes: int, rounds: int) -> None:
    locatable = fabric(nodes, rounds).facts["max_locatable_nodes"]
    assert isinstance(locatable, int)
    assert locatable >= 1
    for count in range(1, locatable + 1):
        for bad in list(combinations(range(nodes), count))[:: max(1, nodes // 4)]:
            measured = fabric(nodes, rounds, bad=bad)
            assert sorted(located(measured)) == sorted(f"node{node}" for node in bad)
            assert {finding.confidence for finding in findings(measured)} == {"medium"}, "without a retry"
            assert {finding.confidence for finding in findings(measured, measured)} == {"high"}
            assert failed(measured) == {f"node{node}/gpu{gpu}" for node in bad for gpu in range(GPUS)}


def test_two_nodes_are_not_compared_with_each_other() -> None:
    measured = fabric(2, 1, bad=(1,))
    assert not findings(measured)
    assert not failed(measured)
    assert measured.facts["max_locatable_nodes"] == 0
    assert measured.facts["comparable"] == "no"


def test_with_one_round_a_node_and_its_partner_are_findings_with_low_confidence() -> None:
    both = findings(fabric(8, 1, bad=(2,)))
    assert {finding.subject for finding in both} == {"node2", "node5"}
    assert {finding.confidence for finding in both} == {"low"}


def test_bad_path_between_two_good_nodes() -> None:
    measured = fabric(6, 5, bad_path=(1, 4), noise=0.01)
    assert located(measured) == sorted(failed(measured)) == ["node1->node4"]
    (finding,) = findings(measured)
    assert "path_share 0.4863" in finding.evidence
    assert finding.confidence == "medium"


@pytest.mark.parametrize("rail", range(GPUS))
def test_path_with_one_bad_rail_is_located(rail: int) -> None:
    assert located(fabric(6, 5, bad_path=(1, 4), rail=rail)) == ["node1->node4"]


def test_path_that_is_slow_without_concurrent_pairs_is_at_fault() -> None:
    measured = fabric(6, 5, bad_path=(1, 4), single_rate=BAD)
    assert located(measured) == ["node1->node4"]
    assert failed(measured) == {"node1->node4"}
    retried = {metric.subject: metric.evidence for metric in measured.metrics if metric.name == "path_share"}
    assert retried["node1->node4"] == {"switches": None, "single_pair": {"concurrent": BAD, "single": BAD}}
    assert retried["node0->node1"] is None


def test_path_that_is_fast_without_concurrent_pairs_shares_a_link() -> None:
    measured = fabric(6, 5, bad_path=(1, 4), single_rate=GOOD)
    assert not findings(measured)
    assert not failed(measured)
    results = judge_check(CHECK, [measured], {}, "t")
    (verdict,) = [verdict for verdict in results if verdict.outcome is Outcome.WARN]
    assert verdict.metric == "shared_paths"
    assert "node1->node4" in verdict.evidence


def test_bad_node_and_bad_path_are_both_located() -> None:
    assert located(fabric(8, 7, bad=(3,), bad_path=(0, 5))) == ["node3", "node0->node5"]


def test_one_bad_gpu_of_a_node_is_not_the_whole_node() -> None:
    declared = CHECK.declaration("gpu_share")
    assert declared is not None
    template = declared.finding
    assert template is not None
    (finding,) = findings(fabric(4, 3, bad_ranks=(5,)))
    assert (finding.subject, finding.title) == ("node2/gpu1", template.title)
    (whole_node,) = findings(fabric(4, 3, bad=(2,)))
    assert (whole_node.subject, whole_node.title) == ("node2", template.whole_node_title)


def test_node_that_sends_wrong_data_is_located() -> None:
    measured = fabric(4, 3, corrupt=3)
    assert located(measured) == ["node3"]
    assert "cluster" in failed(measured)


def test_wrong_data_on_all_pairs_fails_without_a_finding() -> None:
    measured = fabric(2, 1, corrupt=0)
    assert not {metric.name for metric in measured.metrics} & {"gpu_share", "path_share"}
    assert failed(measured) == {"cluster"}
    assert not findings(measured)


def test_findings_of_verdicts_follow_those_of_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    measured = fabric(4, 3, bad=(0,))
    error = Measurement(check="train.cnn", subject="node1/gpu0", error="CUDA error: out of memory")
    results = diagnose(Run(verdicts(measured), [error, measured], catalog()), [], [], tmp_path_factory.mktemp("run"))
    assert [finding.subject for finding in results][-1] == "node0"


def test_cpu_measurements_have_no_finding() -> None:
    measured = fabric(4, 3, bad=(0,))
    assert not findings(measured.model_copy(update={"facts": {**measured.facts, "backend": "gloo"}}))


def test_confidence_is_low_without_the_fact_max_locatable_nodes() -> None:
    metric = Metric(name="gpu_share", value=0.1, unit="of the median", subject="node0/gpu0")
    facts: dict[str, JsonValue] = {"backend": "nccl", "comparable": "yes"}
    measured = Measurement(check=CHECK.name, subject="node0", metrics=(metric,), facts=facts)
    assert failed(measured) == {"node0/gpu0"}
    assert [finding.confidence for finding in findings(measured, measured)] == ["low"]


def outcomes(results: tuple[Verdict, ...], subject: str) -> set[Outcome]:
    return {verdict.outcome for verdict in results if verdict.subject == subject}


def located_with_confidence(measured: Measurement, retry: Measurement) -> list[tuple[str, str]]:
    return [(finding.subject, finding.confidence) for finding in findings(measured, retry)]


def test_fault_that_a_retry_does_not_reproduce_has_low_confidence() -> None:
    bad, good = fabric(6, 5, bad_path=(1, 4)), fabric(6, 5)
    assert outcomes(verdicts(bad, good), "node1->node4") == {Outcome.WARN}
    assert located_with_confidence(bad, good) == [("node1->node4", "low")]


def test_value_that_meets_the_overriding_threshold_of_the_trial_is_no_finding() -> None:
    measured, threshold = fabric(6, 5, bad_path=(1, 4)), ">= 0.4 of the best"
    assert outcomes(verdicts(measured, path_share=threshold), "node1->node4") == {Outcome.PASS}
    assert not findings(measured, path_share=threshold)


def test_reproduced_fault_is_one_finding_with_high_confidence() -> None:
    path, node = fabric(6, 5, bad_path=(1, 4)), fabric(6, 5, bad=(2,))
    assert located_with_confidence(path, path) == [("node1->node4", "high")]
    assert located_with_confidence(node, node) == [("node2", "high")]


def test_refreshed_findings_replace_those_of_verdicts_only() -> None:
    bad = fabric(6, 5, bad_path=(1, 4))
    log = Finding(title="out of memory", subject="node0", confidence="medium", evidence="", source="jobs/a.log:1")
    source = finding_source(CHECK, "path_share")
    old = Finding(title="slow", subject="node1->node4", confidence="high", evidence="", source=source)
    trial = samples.accepted().model_copy(update={"measurements": (bad,), "findings": (old, log)})
    assert refreshed_findings(trial, Run(verdicts(bad, bad), trial.measurements, catalog())) == (
        log,
        *findings(bad, bad),
    )
    assert refreshed_findings(
        trial,
        Run(verdicts(bad, path_share=">= 0.4 of the best"), trial.measurements, catalog()),
    ) == (log,)
