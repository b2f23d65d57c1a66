"""Every two GPUs of a node: made-up nodes with known faults, and real ones among four processes over gloo."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import combinations, permutations
from typing import Any

import pytest

from seatrial.bench.exact import Mismatch
from seatrial.bench.pairs import Line
from seatrial.checks import collectives_gpu_pairs as gpu_pairs
from seatrial.checks.collectives_gpu_pairs import CHECK, GPU_SIZE, by_node, side_by_side, told_apart
from seatrial.diagnose.localize import localize
from seatrial.discover.nvlinks import NVLINK, UNTOLD
from seatrial.judge import gates
from seatrial.judge.baselines import Known, Sku
from seatrial.judge.links import Links
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Expected, Fact, Limit, Measurement, Metric, Outcome
from tests.bench.cluster import Scenario, run
from tests.checks import scenes_driver

GOOD, BAD = 360.0, 180.0  # GB/s
MODEL, STRANGE = "NVIDIA Known", "NVIDIA Strange"
BUSBW = "busbw.1GiB"
TWO_OF_A_NODE = Expected(gpus=2, nodes=1, value=GOOD, unit="GB/s", source="a test")
KNOWN = Known(None, [Sku(name="Known", nvml_names=(MODEL,), expected={f"gpu_pairs.{BUSBW}": (TWO_OF_A_NODE,)})])
WRONG = Mismatch(7, 5, "1.0", "2.0", "0x1")

Pair = frozenset[int]


def line(a: int, b: int, rate: float, wrong: Mismatch | None = None) -> Line:
    """What rank ``a`` saw of exchanges with ``b``, of which each way went at ``rate`` GB/s."""
    return Line(a, b, (GPU_SIZE / 1e9 / rate,) * 8, wrong)


def measured(
    gpus: int = 8,
    *,
    nodes: int = 1,
    bad: Collection[int] = (),
    path: Collection[int] = (),
    shared: Collection[Pair] = (),
    wrong: Mapping[tuple[int, int], Mismatch] | None = None,
    wrong_alone: Mapping[tuple[int, int], Mismatch] | None = None,
    ways: str = NVLINK,
    model: str = MODEL,
) -> list[Measurement]:
    """What the check brings of nodes with ``gpus`` each, some of which are ``bad``; a bad ``path``; ``shared`` links.

    ``wrong``: what was wrong of what the first rank sent to the second.
    """
    home = {f"n{node}": range(node * gpus, (node + 1) * gpus) for node in range(nodes)}
    subjects = [f"{name}/gpu{rank % gpus}" for name, ranks in home.items() for rank in ranks]
    met = [two for ranks in home.values() for two in permutations(ranks, 2)]

    def rate(a: int, b: int, contended: Collection[Pair]) -> float:
        return BAD if {a, b} & set(bad) or {a, b} == set(path) or frozenset((a, b)) in contended else GOOD

    lines = [line(a, b, rate(a, b, shared), (wrong or {}).get((b, a))) for a, b in met]
    first = by_node(home, subjects, GPU_SIZE, lines)
    slow = {frozenset(partners) for figures in first.values() for partners in gpu_pairs._tries(figures)}
    alone = [line(a, b, rate(a, b, ()), (wrong_alone or {}).get((b, a))) for a, b in met if frozenset((a, b)) in slow]
    found = by_node(home, subjects, GPU_SIZE, lines, alone)
    seen = list(gpu_pairs._figures(list(found.values()), subjects))
    facts = {"backend": "nccl", "gpu": model, "world_size": 2, "nodes": 1, "joined": ways}
    facts |= {"comparable": gpu_pairs._comparable(found, ways)}
    facts |= {one.name: one.value for one in seen if isinstance(one, Fact)}
    lead = tuple(one for one in seen if isinstance(one, Metric))
    return [
        Measurement(
            check=CHECK.name,
            subject=subject,
            rank=rank,
            metrics=() if rank else lead,
            facts={} if rank else facts,
        )
        for rank, subject in enumerate(subjects)
    ]


def verdicts(ranks: list[Measurement]) -> dict[tuple[str, str], Outcome]:
    return {(one.metric, one.subject): one.outcome for one in judge_check(CHECK, ranks, {}, "t", KNOWN)}


def failed(ranks: list[Measurement], metric: str = "") -> set[str]:
    return {
        subject
        for (name, subject), outcome in verdicts(ranks).items()
        if outcome is Outcome.FAIL and metric in ("", name)
    }


def value(ranks: list[Measurement], name: str, subject: str) -> float:
    return next(one.value for one in ranks[0].metrics if (one.name, one.subject) == (name, subject))


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
def test_a_good_node_passes(gpus: int) -> None:
    outcomes = verdicts(measured(gpus))
    assert {outcome for (metric, _), outcome in outcomes.items() if metric == BUSBW} == {Outcome.PASS}
    assert set(outcomes.values()) == ({Outcome.PASS} if gpus > 2 else {Outcome.PASS, Outcome.SKIP})
    pairs = {subject for metric, subject in outcomes if metric == BUSBW}
    assert pairs == {f"n0/gpu{a}->gpu{b}" for a, b in combinations(range(gpus), 2)}


@pytest.mark.parametrize("gpus", range(3, 9))
def test_as_many_slow_gpus_as_promised_are_named_themselves(gpus: int) -> None:
    assert told_apart(gpus) >= 1
    for count in range(1, told_apart(gpus) + 1):
        for bad in combinations(range(gpus), count):
            ranks = measured(gpus, bad=bad)
            assert failed(ranks, "gpu_share") == {f"n0/gpu{one}" for one in bad}
            assert not failed(ranks, "path_share")
            assert {one.where for one in localize(ranks)} == {f"n0/gpu{one}" for one in bad}
            assert {one.confidence for one in localize(ranks)} == {"high"}


def test_the_pairs_of_a_slow_gpu_are_each_told_beside_what_is_known() -> None:
    assert failed(measured(8, bad=(3,)), BUSBW) == {
        f"n0/gpu{min(3, one)}->gpu{max(3, one)}" for one in {*range(8)} - {3}
    }


def test_of_more_slow_gpus_than_can_be_told_apart_it_is_said() -> None:
    slow = list(localize(measured(4, bad=(1, 2))))
    assert {one.confidence for one in slow} == {"low"}


def test_a_slow_path_between_two_good_gpus_is_the_path() -> None:
    ranks = measured(8, path=(2, 5))
    assert failed(ranks) == {"n0/gpu2->gpu5"}
    (finding,) = localize(ranks)
    assert (finding.where, finding.confidence) == ("n0/gpu2->gpu5", "high")
    assert alone(ranks) == {"n0/gpu2->gpu5": {"among others": pytest.approx(BAD), "alone": pytest.approx(BAD)}}


def test_what_is_slow_among_others_alone_shares_a_link_and_is_no_slow_path() -> None:
    contended = {frozenset((0, 7)), frozenset((1, 6))}
    ranks = measured(8, shared=contended)
    assert not failed(ranks)
    assert not list(localize(ranks))
    outcomes = verdicts(ranks)
    assert outcomes["shared_links", "n0"] is Outcome.WARN
    assert value(ranks, "shared_links", "n0") == 2
    assert value(ranks, BUSBW, "n0/gpu0->gpu7") == pytest.approx(GOOD), "judged as it was alone"
    (warning,) = [one for one in judge_check(CHECK, ranks, {}, "t", KNOWN) if one.outcome is Outcome.WARN]
    assert '"n0/gpu0->gpu7": {"among others": 1' in warning.evidence


def test_on_pcie_to_share_a_link_is_the_rule() -> None:
    ranks = measured(8, shared={frozenset((0, 7))}, ways="PHB", model=STRANGE)
    assert verdicts(ranks)["shared_links", CLUSTER] is Outcome.SKIP
    assert not failed(ranks)
    assert failed(measured(8, path=(0, 7), ways="PHB", model=STRANGE)) == {"n0/gpu0->gpu7"}


@pytest.mark.parametrize("ways", ["NODE + SYS", "NVLink + SYS", UNTOLD])
def test_gpus_that_are_joined_in_unlike_ways_are_not_compared(ways: str) -> None:
    """Two sockets: what goes from one to the other is slower on every such machine."""
    ranks = measured(8, path=(0, 7), ways=ways, model=STRANGE)
    assert verdicts(ranks)["path_share", CLUSTER] is Outcome.SKIP
    assert not failed(ranks)
    assert not list(localize(ranks))
    assert ways in str(ranks[0].facts["comparable"])


def test_two_gpus_never_outvote_each_other_but_what_is_known_speaks() -> None:
    ranks = measured(2, nodes=4, path=(0, 1))
    assert failed(ranks) == {"n0/gpu0->gpu1"}
    assert verdicts(ranks)["gpu_share", CLUSTER] is Outcome.SKIP
    assert not failed(measured(2, nodes=4, path=(0, 1), model=STRANGE))
    assert not list(localize(ranks))


def test_gpus_are_compared_with_those_of_their_own_node() -> None:
    ranks = measured(4, nodes=2, bad=(4, 5, 6, 7))
    assert not failed(ranks, "gpu_share")
    assert failed(ranks, BUSBW) == {f"n1/gpu{a}->gpu{b}" for a, b in combinations(range(4), 2)}
    assert failed(measured(4, nodes=2, bad=(6,)), "gpu_share") == {"n1/gpu2"}


def test_a_model_of_which_nothing_is_known_is_recorded_and_not_blocked() -> None:
    outcomes = verdicts(measured(8, model=STRANGE))
    assert set(outcomes.values()) == {Outcome.PASS, Outcome.SKIP}
    assert {outcome for (metric, _), outcome in outcomes.items() if metric == BUSBW} == {Outcome.SKIP}
    assert failed(measured(8, bad=(3,), model=STRANGE)) == {"n0/gpu3"}


def test_data_that_arrives_wrong_names_sender_receiver_offset_and_bits() -> None:
    ranks = measured(4, wrong={(1, 2): WRONG})
    assert failed(ranks) == {CLUSTER, "n0/gpu1->gpu2"}
    assert ranks[0].facts["wrong_data"] == [
        {"from": "n0/gpu1", "to": "n0/gpu2", "wrong": 7, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    ]


def test_data_that_arrives_wrong_when_a_pair_is_tried_alone_counts_as_any_other() -> None:
    ranks = measured(4, shared={frozenset((0, 3))}, wrong_alone={(3, 0): WRONG})
    assert {CLUSTER, "n0/gpu0->gpu3"} <= failed(ranks)
    assert value(ranks, "shared_links", "n0") == 0, "it carries nothing"


def test_a_gpu_that_sends_wrong_data_to_all_is_named_however_fast_it_is() -> None:
    ranks = measured(4, wrong={(1, other): WRONG for other in (0, 2, 3)})
    assert failed(ranks, "gpu_share") == {"n0/gpu1"}
    assert [one.where for one in localize(ranks)] == ["n0/gpu1"]


def without(ranks: list[Measurement], name: str, subject: str) -> list[Measurement]:
    kept = tuple(one for one in ranks[0].metrics if (one.name, one.subject) != (name, subject))
    assert len(kept) < len(ranks[0].metrics)
    return [ranks[0].model_copy(update={"metrics": kept}), *ranks[1:]]


@pytest.mark.parametrize(("name", "subject"), [(BUSBW, "n1/gpu0->gpu3"), ("gpu_share", "n1/gpu2")])
def test_what_was_not_measured_everywhere_is_an_error(name: str, subject: str) -> None:
    assert verdicts(without(measured(4, nodes=2), name, subject))[name, CLUSTER] is Outcome.ERROR


def test_another_size_is_an_error_unless_the_trial_judges_it_itself() -> None:
    ranks = measured(4)
    facts = {**ranks[0].facts, "left_out": {BUSBW: "the trial's options ask for 64MiB"}}
    renamed = tuple(
        one.model_copy(update={"name": "busbw.64MiB"}) if one.name == BUSBW else one for one in ranks[0].metrics
    )
    other = [ranks[0].model_copy(update={"metrics": renamed, "facts": facts}), *ranks[1:]]
    assert verdicts(other)[BUSBW, CLUSTER] is Outcome.ERROR
    said = judge_check(CHECK, other, {"busbw.64MiB": Limit.parse("> 300 GB/s")}, "t", KNOWN)
    assert {one.outcome for one in said} == {Outcome.PASS, Outcome.SKIP}


def test_pairs_are_called_the_same_when_the_ranks_go_the_other_way_round() -> None:
    """As they do when a shortfall is measured a second time."""
    there = ["n0/gpu2", "n0/gpu10", "n0/gpu9"]
    for subjects in (there, there[::-1]):
        lines = [line(a, b, GOOD) for a, b in permutations(range(3), 2)]
        (figures,) = by_node({"n0": (0, 1, 2)}, subjects, GPU_SIZE, lines).values()
        named = {one.subject for one in gpu_pairs.metrics(figures) if one.name == BUSBW}
        assert named == {"n0/gpu2->gpu9", "n0/gpu2->gpu10", "n0/gpu9->gpu10"}
        assert gpu_pairs._matrix(figures)["gpus"] == ["gpu2", "gpu9", "gpu10"]


def test_nodes_go_side_by_side_and_one_with_fewer_gpus_is_done_earlier() -> None:
    plans = [gpu_pairs._rounds(ranks) for ranks in ((0, 1, 2, 3), (4, 5))]
    first, *others = side_by_side(plans)
    assert set(first) == {0, 1, 2, 3, 4, 5}
    assert [set(partners) for partners in others] == [{0, 1, 2, 3}] * 2


def test_of_three_gpus_no_pair_was_among_others() -> None:
    assert "alone" not in measured(3, path=(0, 1))[0].facts
    assert failed(measured(3, path=(0, 1)), "path_share") == {"n0/gpu0->gpu1"}


def test_what_the_gates_see_is_said_without_the_network() -> None:
    texts = [one.text for one in gates.relative(measured(4), {CHECK.name: CHECK}, Links(network="rdma"))]
    assert [text.partition(" slower")[0] for text in texts] == [
        "gpu_share >= 0.9 of the median: the least that it sees is a GPU's way to all others of its node 10%",
        "path_share >= 0.9 of the best: the least that it sees is the path between two GPUs of a node 10%",
    ]


# Real processes

Runs = dict[str, list[Measurement]]
ONE, TWO, FOUR = ("node0",) * 4, ("node0", "node0", "node1", "node1"), ("node0", "node1", "node2", "node3")
BRIEF = {"size": "64KiB", "seconds": 0.1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    scenarios = {
        "no_memory": Scenario(CHECK.name, ONE, BRIEF, faults=("no_memory",)),
        "one_node": Scenario(CHECK.name, ONE, BRIEF),
        "two_nodes": Scenario(CHECK.name, TWO, BRIEF),
        "late": Scenario(CHECK.name, ONE, {**BRIEF, "again": True}, faults=("late",)),
        "late_path": Scenario(CHECK.name, ONE, {**BRIEF, "again": True}, faults=("late_between_one_and_two",)),
        "shared": Scenario(CHECK.name, ONE, {**BRIEF, "again": True}, faults=("shared_link",)),
        "corrupt": Scenario(CHECK.name, ONE, BRIEF, faults=("corrupt",)),
        "corrupt_of_two_nodes": Scenario(CHECK.name, TWO, BRIEF, faults=("corrupt",)),
        "alone": Scenario(CHECK.name, FOUR, BRIEF),
    }
    return run(tmp_path_factory.mktemp("pairs"), scenes_driver.__name__, scenarios, scenes_driver.RANKS)


def values(measurements: list[Measurement], name: str) -> dict[str, float]:
    assert [one.error for one in measurements] == [None] * len(measurements)
    return {metric.subject: metric.value for metric in measurements[0].metrics if metric.name == name}


def as_on_gpus(measurements: list[Measurement]) -> list[Measurement]:
    """The same figures as if NCCL had brought them: those of CPUs that share two cores are not judged."""
    lead, *others = measurements
    facts = {**lead.facts, "backend": "nccl", "joined": NVLINK}
    metrics = tuple(
        one.model_copy(update={"name": BUSBW}) if one.name == "busbw.64KiB" else one for one in lead.metrics
    )
    return [lead.model_copy(update={"facts": facts, "metrics": metrics}), *others]


def test_every_pair_of_a_node_has_its_figure_from_the_first_rank(runs: Runs) -> None:
    lead, *others = runs["one_node"]
    pairs = {f"node0/rank{a}->rank{b}" for a, b in combinations(range(4), 2)}
    assert set(values(runs["one_node"], "busbw.64KiB")) == set(values(runs["one_node"], "path_share")) == pairs
    assert set(values(runs["one_node"], "gpu_share")) == {f"node0/rank{rank}" for rank in range(4)}
    for metric in lead.metrics:
        assert CHECK.metrics[re.sub(r"\..*", ".*", metric.name)] == metric.unit
        assert metric.name in ("shared_links", "wrong_elements") or metric.samples
    assert all(not one.metrics and not one.facts for one in others)
    assert "6 pairs on 1 node of up to 4 ranks in 3 rounds" in str(lead.facts["how"])
    assert Outcome.ERROR not in verdicts(as_on_gpus(runs["one_node"])).values()


def test_every_node_has_its_own_pairs_and_its_own_matrix(runs: Runs) -> None:
    measurements = runs["two_nodes"]
    assert list(values(measurements, "busbw.64KiB")) == ["node0/rank0->rank1", "node1/rank2->rank3"]
    told: list[Any] = [one.facts.get("matrix", {}) for one in measurements]
    assert [one.get("gpus") for one in told] == [["rank0", "rank1"], None, ["rank2", "rank3"], None]
    (forth, back) = told[2]["gb_s"]
    assert forth[0] is None
    assert forth[1] == back[0] > 0
    assert {measurements[0].facts[name] for name in ("world_size", "nodes")} == {1, 2}, "of two GPUs of a node"
    assert {outcome for (metric, _), outcome in verdicts(measurements).items() if metric != "wrong_elements"} == {
        Outcome.SKIP
    }


def test_a_rank_that_is_late_with_every_partner_is_named(runs: Runs) -> None:
    shares = values(runs["late"], "gpu_share")
    assert min(shares, key=lambda subject: shares[subject]) == "node0/rank2"
    assert shares["node0/rank2"] < 0.5
    assert "node0/rank2" in failed(as_on_gpus(runs["late"]), "gpu_share")
    assert {f"node0/rank{min(2, one)}->rank{max(2, one)}" for one in (0, 1, 3)} <= {*alone(runs["late"])}


def test_a_path_that_is_late_is_tried_alone_and_named(runs: Runs) -> None:
    shares = values(runs["late_path"], "path_share")
    assert min(shares, key=lambda subject: shares[subject]) == "node0/rank1->rank2"
    assert shares["node0/rank1->rank2"] < 0.5
    assert "node0/rank1->rank2" in alone(runs["late_path"])
    assert "node0/rank1->rank2" in [one.where for one in localize(as_on_gpus(runs["late_path"]))]


def test_two_pairs_on_one_link_are_good_alone(runs: Runs) -> None:
    for pair in ("node0/rank0->rank3", "node0/rank1->rank2"):
        rates = alone(runs["shared"])[pair]
        assert rates["alone"] > 1.5 * rates["among others"]
        assert values(runs["shared"], "busbw.64KiB")[pair] == rates["alone"]
    assert values(runs["shared"], "shared_links")["node0"] >= 1


def alone(measurements: list[Measurement]) -> dict[str, dict[str, float]]:
    told: Any = measurements[0].facts["alone"]
    return dict(told)


@pytest.mark.parametrize(("name", "received"), [("corrupt", (0, 1, 2)), ("corrupt_of_two_nodes", (2,))])
def test_changed_data_names_who_sent_it_and_who_received_it(runs: Runs, name: str, received: tuple[int, ...]) -> None:
    measurements = runs[name]
    assert values(measurements, "wrong_elements") == {CLUSTER: len(received)}
    told: Any = measurements[0].facts["wrong_data"]
    home = "node1" if len(received) == 1 else "node0"
    assert {(one["from"], one["to"]) for one in told} == {(f"{home}/rank3", f"{home}/rank{one}") for one in received}
    assert {one["offset"] for one in told} == {scenes_driver.WRONG_OFFSET}
    assert all(int(one["xor"], 16) for one in told)
    assert CLUSTER in failed(measurements, "wrong_elements")


def test_what_does_not_fit_on_one_rank_is_told_on_all_of_them(runs: Runs) -> None:
    assert {one.error for one in runs["no_memory"]} == {
        "SeatrialError: no memory for two buffers of 64KiB: rank 1: CUDA out of memory. Tried to allocate 1.00 GiB"
    }


def test_nodes_with_one_gpu_have_no_pairs(runs: Runs) -> None:
    assert {one.skipped for one in runs["alone"]} == {"nodes with one GPU have no pair of them"}
