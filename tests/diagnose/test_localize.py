"""Fabrics with known faults, measured as collectives.pairs does, without noise but where it is said."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from itertools import chain, combinations

import pytest

from seatrial.bench.data_check import Mismatch
from seatrial.bench.pairs import PairResults, PairTiming, round_robin
from seatrial.checks import catalog
from seatrial.checks.fabric import pairs
from seatrial.checks.fabric.pairs import CHECK, MIN_SHARE
from seatrial.config.schema import CheckSettings, Config
from seatrial.diagnose import diagnose, refreshed_findings
from seatrial.diagnose.localize import localize
from seatrial.judge import judge
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Finding, Measurement, Metric, Outcome, Threshold, Verdict
from tests.report import samples

SIZE = 2**28
GOOD, BAD = 45.0, 22.0  # GB/s: a network card at its rate, and at half of it
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
    alone: float | None = None,
    noise: float = 0.0,
) -> Measurement:
    """What collectives.pairs brings of ``nodes`` with ``GPUS`` each, of which some are ``bad``.

    ``rail``: the GPU to which a bad path is confined. ``alone``: GB/s of slow paths when they are tried again.
    """
    chance = random.Random(1)

    def path_is_bad(a: int, b: int, gpu: int) -> bool:
        return {a, b} == set(bad_path or ()) and rail in (None, gpu)

    def line(a: int, b: int, gpu: int) -> PairTiming:
        rank, partner = a * GPUS + gpu, b * GPUS + gpu
        slow = {a, b} & set(bad) or {rank, partner} & set(bad_ranks) or path_is_bad(a, b, gpu)
        seconds = tuple(SIZE / 1e9 / (BAD if slow else GOOD) * (1 + noise * chance.gauss()) for _ in range(12))
        wrong = Mismatch(1, 7, "1.0", "2.0", "0x1") if corrupt == b else None
        return PairTiming(rank, partner, seconds, wrong)

    met = chain.from_iterable(round_robin(nodes, rounds))
    lines = tuple(line(x, y, gpu) for a, b in met for x, y in ((a, b), (b, a)) for gpu in range(GPUS))
    names = {f"node{node}": tuple(range(node * GPUS, (node + 1) * GPUS)) for node in range(nodes)}
    subjects = [f"{name}/gpu{rank % GPUS}" for name, ranks in names.items() for rank in ranks]
    figures = PairResults(lines, SIZE, names, subjects)
    if alone:
        again = {f"node{node}": node for node in range(nodes)}
        met_again = [(again[a], again[b]) for a, b in figures.slow_paths(MIN_SHARE)]
        seconds = (SIZE / 1e9 / alone,) * 12
        more = (
            PairTiming(x * GPUS + gpu, y * GPUS + gpu, seconds, None)
            for a, b in met_again
            for x, y in ((a, b), (b, a))
            for gpu in range(GPUS)
        )
        figures = replace(figures, retries=tuple(more))
    seen = list(pairs._figures(figures, rounds, "nccl"))
    return Measurement(
        check=CHECK.name,
        subject=subjects[0],
        rank=0,
        metrics=tuple(one for one in seen if isinstance(one, Metric)),
        facts={"backend": "nccl"} | {one.name: one.value for one in seen if isinstance(one, Fact)},
    )


def found(measured: Measurement, second: Measurement | None = None, **expect: str) -> list[Finding]:
    """What is located by the verdicts on a first and a ``second`` measurement; ``expect``: thresholds of the trial."""
    return list(localize(judged(measured, second, **expect), [measured], catalog()))


def judged(measured: Measurement, second: Measurement | None = None, **expect: str) -> tuple[Verdict, ...]:
    limits = {metric: Threshold.parse(limit) for metric, limit in expect.items()}
    config = Config(name="t", checks={CHECK.name: CheckSettings(expect=limits)})
    repeats = [second.model_copy(update={"retry": True})] if second else []
    return judge(config, [], [measured], catalog(), {}, retries=repeats)


def where(measured: Measurement) -> list[str]:
    return [finding.subject for finding in found(measured)]


def failed(measured: Measurement) -> set[str]:
    return {one.subject for one in judge_check(CHECK, [measured], {}, "t") if one.outcome is Outcome.FAIL}


def test_a_good_fabric_has_no_culprit() -> None:
    measured = fabric(8, 7, noise=0.01)
    assert not found(measured)
    assert {one.outcome for one in judge_check(CHECK, [measured], {}, "t")} == {Outcome.PASS}


@pytest.mark.parametrize(("nodes", "rounds"), [(3, 3), (4, 3), (5, 5), (7, 7), (8, 7), (9, 4), (12, 4), (16, 3)])
def test_as_many_bad_nodes_as_promised_are_found_exactly(nodes: int, rounds: int) -> None:
    promised = fabric(nodes, rounds).facts["distinguishable"]
    assert isinstance(promised, int)
    assert promised >= 1
    for count in range(1, promised + 1):
        for bad in list(combinations(range(nodes), count))[:: max(1, nodes // 4)]:
            measured = fabric(nodes, rounds, bad=bad)
            assert sorted(where(measured)) == sorted(f"node{node}" for node in bad)
            assert {finding.confidence for finding in found(measured)} == {"medium"}, "measured once"
            assert {finding.confidence for finding in found(measured, measured)} == {"high"}
            assert failed(measured) == {f"node{node}/gpu{gpu}" for node in bad for gpu in range(GPUS)}


def test_two_nodes_never_outvote_each_other() -> None:
    measured = fabric(2, 1, bad=(1,))
    assert not found(measured)
    assert not failed(measured)
    assert measured.facts["distinguishable"] == 0
    assert "cannot outvote" in str(measured.facts["guarantee"])


def test_with_one_partner_each_nobody_is_told_apart_from_its_partner() -> None:
    slow = found(fabric(8, 1, bad=(2,)))
    assert {finding.subject for finding in slow} == {"node2", "node5"}
    assert {finding.confidence for finding in slow} == {"low"}


def test_the_path_between_two_good_nodes() -> None:
    measured = fabric(6, 5, bad_path=(1, 4), noise=0.01)
    assert where(measured) == sorted(failed(measured)) == ["node1->node4"]
    (finding,) = found(measured)
    assert "pair_share 0.4863 of the best at node1->node4" in finding.evidence
    assert finding.confidence == "medium"


@pytest.mark.parametrize("rail", range(GPUS))
def test_a_path_is_as_good_as_its_slowest_rail(rail: int) -> None:
    assert where(fabric(6, 5, bad_path=(1, 4), rail=rail)) == ["node1->node4"]


def test_a_path_that_is_slow_alone_too_is_at_fault() -> None:
    measured = fabric(6, 5, bad_path=(1, 4), alone=BAD)
    (finding,) = found(measured)
    assert finding.subject == "node1->node4"
    assert failed(measured) == {"node1->node4"}
    assert measured.facts["single_pair"] == {"node1->node4": {"concurrent": BAD, "single": BAD}}


def test_a_path_that_is_good_alone_shares_an_uplink() -> None:
    measured = fabric(6, 5, bad_path=(1, 4), alone=GOOD)
    assert not found(measured)
    assert not failed(measured)
    (verdict,) = [one for one in judge_check(CHECK, [measured], {}, "t") if one.outcome is Outcome.WARN]
    assert verdict.metric == "shared_paths"
    assert "node1->node4" in verdict.evidence


def test_a_bad_node_beside_a_bad_path() -> None:
    assert where(fabric(8, 7, bad=(3,), bad_path=(0, 5))) == ["node3", "node0->node5"]


def test_one_gpus_way_out_of_its_node_is_not_the_whole_node() -> None:
    measured = fabric(4, 3, bad_ranks=(5,))
    (finding,) = found(measured)
    assert (finding.subject, finding.title) == ("node2/gpu1", "GPUs of a node are slow to every other node")
    assert failed(measured) == {"node2/gpu1"}


def test_a_node_that_sends_wrong_data_is_found_however_fast_it_is() -> None:
    measured = fabric(4, 3, corrupt=3)
    assert where(measured) == ["node3"]
    assert "cluster" in failed(measured)


def test_nothing_but_wrong_data_names_nobody_and_fails() -> None:
    measured = fabric(2, 1, corrupt=0)
    assert not {metric.name for metric in measured.metrics} & {"best_share", "pair_share"}  # shares of nothing
    assert failed(measured) == {"cluster"}
    assert not found(measured)


def test_findings_come_with_those_of_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    measured = fabric(4, 3, bad=(0,))
    error = Measurement(check="train.cnn", subject="node1/gpu0", error="CUDA error: out of memory")
    findings = diagnose([], [error, measured], [], judged(measured), catalog(), tmp_path_factory.mktemp("run"))
    assert [one.subject for one in findings][-1] == "node0"


def test_figures_of_cpus_accuse_nobody() -> None:
    measured = fabric(4, 3, bad=(0,))
    assert not found(measured.model_copy(update={"facts": {**measured.facts, "backend": "gloo"}}))


def test_without_the_fact_that_says_how_many_are_told_apart_nobody_is_sure() -> None:
    metric = Metric(name="best_share", value=0.1, unit="of the median", subject="node0/gpu0")
    measured = Measurement(check=CHECK.name, subject="node0", metrics=(metric,))
    assert failed(measured) == {"node0/gpu0"}
    assert [one.confidence for one in found(measured, measured)] == ["low"]


def outcomes(verdicts: tuple[Verdict, ...], subject: str) -> set[Outcome]:
    return {one.outcome for one in verdicts if one.subject == subject}


def test_what_a_retry_does_not_reproduce_is_no_sure_finding() -> None:
    bad, good = fabric(6, 5, bad_path=(1, 4)), fabric(6, 5)
    assert outcomes(judged(bad, good), "node1->node4") == {Outcome.WARN}
    assert [(one.subject, one.confidence) for one in found(bad, good)] == [("node1->node4", "low")]


def test_what_the_trial_passes_is_no_finding() -> None:
    measured = fabric(6, 5, bad_path=(1, 4))
    assert outcomes(judged(measured, pair_share=">= 0.4 of the best"), "node1->node4") == {Outcome.PASS}
    assert not found(measured, pair_share=">= 0.4 of the best")


def test_what_a_retry_reproduces_is_one_finding() -> None:
    bad = fabric(6, 5, bad_path=(1, 4))
    assert [(one.subject, one.confidence) for one in found(bad, bad)] == [("node1->node4", "high")]
    node = fabric(6, 5, bad=(2,))
    assert [(one.subject, one.confidence) for one in found(node, node)] == [("node2", "high")]


def test_a_record_judged_anew_has_one_finding_a_place() -> None:
    bad = fabric(6, 5, bad_path=(1, 4))
    log = Finding(title="out of memory", subject="node0", confidence="medium", evidence="", source="jobs/a.log:1")
    old = Finding(
        title="slow", subject="node1->node4", confidence="high", evidence="", source=f"pair_share of {CHECK.name}"
    )
    trial = samples.accepted().model_copy(update={"measurements": (bad,), "findings": (old, log)})
    assert refreshed_findings(trial, judged(bad, bad), catalog()) == (log, *found(bad, bad))
    assert refreshed_findings(trial, judged(bad, pair_share=">= 0.4 of the best"), catalog()) == (log,)
