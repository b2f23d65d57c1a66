"""Every two GPUs of a node: made-up nodes with known faults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.analysis import sensitivity
from seatrial.bench import collectives, subgroups
from seatrial.bench import rank as rank_
from seatrial.bench.data_check import Mismatch
from seatrial.bench.pairs import PairResults, PairTiming
from seatrial.checks.base import Context
from seatrial.checks.fabric import _nccl_log, gpu_pairs
from seatrial.checks.fabric.gpu_pairs import CHECK, GPU_SIZE, figures_by_node, max_distinguishable, merge_steps
from seatrial.diagnose.localize import localize
from seatrial.discover import gpu
from seatrial.discover.nvlinks import NVLINK, UNKNOWN_LINK
from seatrial.discover.nvml import Gpu, NvLink
from seatrial.hardware.links import Links
from seatrial.hardware.references import References, Sku
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Finding, Measurement, Metric, Outcome, ReferenceValue, Threshold
from seatrial.worker import measure

GOOD, BAD = 360.0, 180.0  # GB/s
MODEL, STRANGE = "NVIDIA Known", "NVIDIA Strange"
BUSBW = "busbw.1GiB"
TWO_OF_A_NODE = ReferenceValue(gpus=2, nodes=1, value=GOOD, unit="GB/s", source="a test")
KNOWN = References(None, [Sku(name="Known", nvml_names=(MODEL,), expected={f"gpu_pairs.{BUSBW}": (TWO_OF_A_NODE,)})])
WRONG = Mismatch(7, 5, "1.0", "2.0", "0x1")

Pair = frozenset[int]


def line(a: int, b: int, rate: float, wrong: Mismatch | None = None) -> PairTiming:
    """What rank ``a`` saw of exchanges with ``b``, of which each way went at ``rate`` GB/s."""
    return PairTiming(a, b, (GPU_SIZE / 1e9 / rate,) * 8, wrong)


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
    odd: str = "",
    model: str = MODEL,
    strange: str = "",
) -> list[Measurement]:
    """What the check brings of nodes with ``gpus`` each, some of which are ``bad``; a bad ``path``; ``shared`` links.

    ``odd``: what joins the GPUs of the second node, where it is not ``ways``; ``strange``: their model.
    ``wrong``: what was wrong of what the first rank sent to the second.
    """
    home = {f"n{node}": range(node * gpus, (node + 1) * gpus) for node in range(nodes)}
    subjects = [f"{name}/gpu{rank % gpus}" for name, ranks in home.items() for rank in ranks]
    met = [two for ranks in home.values() for two in permutations(ranks, 2)]

    def rate(a: int, b: int, contended: Collection[Pair]) -> float:
        return BAD if {a, b} & set(bad) or {a, b} == set(path) or frozenset((a, b)) in contended else GOOD

    lines = [line(a, b, rate(a, b, shared), (wrong or {}).get((b, a))) for a, b in met]
    first = figures_by_node(home, subjects, GPU_SIZE, lines)
    slow = {frozenset(partners) for figures in first.values() for partners in gpu_pairs._tries(figures)}
    alone = [line(a, b, rate(a, b, ()), (wrong_alone or {}).get((b, a))) for a, b in met if frozenset((a, b)) in slow]
    found = figures_by_node(home, subjects, GPU_SIZE, lines, alone)
    ranks = [Measurement(check=CHECK.name, subject=subject, rank=rank) for rank, subject in enumerate(subjects)]
    for number, (node, figures) in enumerate(found.items()):
        joined = odd if node == "n1" and odd else ways
        seen = list(gpu_pairs._figures(node, figures, joined))
        name = strange if node == "n1" and strange else model
        facts = {"backend": "nccl", "gpu": name, "world_size": 2, "nodes": 1}
        facts |= gpu_pairs._alike(figures, joined, again=True)
        facts |= {one.name: one.value for one in seen if isinstance(one, Fact)}
        told = tuple(one for one in seen if isinstance(one, Metric))
        ranks[number * gpus] = ranks[number * gpus].model_copy(update={"metrics": told, "facts": facts})
    return ranks


def verdicts(ranks: list[Measurement]) -> dict[tuple[str, str], Outcome]:
    return {(one.metric, one.subject): one.outcome for one in judge_check(CHECK, ranks, {}, "t", KNOWN)}


def located(ranks: list[Measurement]) -> list[Finding]:
    return list(localize(judge_check(CHECK, ranks, {}, "t", KNOWN), ranks, {CHECK.name: CHECK}))


def failed(ranks: list[Measurement], metric: str = "") -> set[str]:
    return {
        subject
        for (name, subject), outcome in verdicts(ranks).items()
        if outcome is Outcome.FAIL and metric in ("", name)
    }


def value(ranks: list[Measurement], name: str, subject: str) -> float:
    return next(one.value for one in ranks[0].metrics if (one.name, one.subject) == (name, subject))


def alone(measurements: list[Measurement]) -> dict[str, dict[str, float]]:
    told: Any = measurements[0].facts["alone"]
    return dict(told)


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
def test_a_good_node_passes(gpus: int) -> None:
    outcomes = verdicts(measured(gpus))
    assert {outcome for (metric, _), outcome in outcomes.items() if metric == BUSBW} == {Outcome.PASS}
    assert set(outcomes.values()) == ({Outcome.PASS} if gpus > 3 else {Outcome.PASS, Outcome.SKIP})
    assert (outcomes.get(("shared_links", "n0")) is Outcome.PASS) == (gpus > 3), "of three no other pair was at work"
    pairs = {subject for metric, subject in outcomes if metric == BUSBW}
    assert pairs == {f"n0/gpu{a}->gpu{b}" for a, b in combinations(range(gpus), 2)}


@pytest.mark.parametrize("gpus", range(3, 9))
def test_as_many_slow_gpus_as_promised_are_named_themselves(gpus: int) -> None:
    assert max_distinguishable(gpus) >= 1
    for count in range(1, max_distinguishable(gpus) + 1):
        for bad in combinations(range(gpus), count):
            ranks = measured(gpus, bad=bad)
            assert failed(ranks, "gpu_share") == {f"n0/gpu{one}" for one in bad}
            assert not failed(ranks, "path_share")
            assert {one.subject for one in located(ranks)} == {f"n0/gpu{one}" for one in bad}
            assert {one.confidence for one in located(ranks)} == {"medium"}


def test_the_pairs_of_a_slow_gpu_are_each_told_beside_what_is_known() -> None:
    assert failed(measured(8, bad=(3,)), BUSBW) == {
        f"n0/gpu{min(3, one)}->gpu{max(3, one)}" for one in {*range(8)} - {3}
    }


def test_of_more_slow_gpus_than_can_be_told_apart_it_is_said() -> None:
    slow = list(located(measured(4, bad=(1, 2))))
    assert {one.confidence for one in slow} == {"low"}


def test_a_slow_path_between_two_good_gpus_is_the_path() -> None:
    ranks = measured(8, path=(2, 5))
    assert failed(ranks) == {"n0/gpu2->gpu5"}
    (finding,) = located(ranks)
    assert (finding.subject, finding.confidence) == ("n0/gpu2->gpu5", "medium")
    assert alone(ranks) == {"n0/gpu2->gpu5": {"among others": pytest.approx(BAD), "alone": pytest.approx(BAD)}}


def test_what_is_slow_among_others_alone_shares_a_link_and_is_no_slow_path() -> None:
    contended = {frozenset((0, 7)), frozenset((1, 6))}
    ranks = measured(8, shared=contended)
    assert not failed(ranks)
    assert not list(located(ranks))
    outcomes = verdicts(ranks)
    assert outcomes["shared_links", "n0"] is Outcome.WARN
    assert value(ranks, "shared_links", "n0") == 2
    assert value(ranks, BUSBW, "n0/gpu0->gpu7") == pytest.approx(GOOD), "judged as it was alone"
    (warning,) = [one for one in judge_check(CHECK, ranks, {}, "t", KNOWN) if one.outcome is Outcome.WARN]
    assert '"n0/gpu0->gpu7": {"among others": 1' in warning.evidence


def test_on_pcie_to_share_a_link_is_the_rule() -> None:
    ranks = measured(8, shared={frozenset((0, 7))}, ways="PHB", model=STRANGE)
    assert verdicts(ranks)["shared_links", "n0"] is Outcome.SKIP
    assert not failed(ranks)
    assert failed(measured(8, path=(0, 7), ways="PHB", model=STRANGE)) == {"n0/gpu0->gpu7"}


@pytest.mark.parametrize("ways", ["NODE + SYS", "NVLink + SYS", UNKNOWN_LINK])
def test_gpus_that_are_joined_in_unlike_ways_are_not_compared(ways: str) -> None:
    """Two sockets: what goes from one to the other is slower on every such machine."""
    ranks = measured(8, path=(0, 7), ways=ways, model=STRANGE)
    assert verdicts(ranks)["path_share", "n0"] is Outcome.SKIP
    assert not failed(ranks)
    assert not list(located(ranks))
    assert ways in str(ranks[0].facts["comparable"])


@pytest.mark.parametrize("odd", ["NODE + SYS", UNKNOWN_LINK])
def test_an_odd_node_costs_no_other_one_its_comparison(odd: str) -> None:
    ranks = measured(8, nodes=3, bad=(3,), odd=odd, model=STRANGE)
    assert failed(ranks) == {"n0/gpu3"}
    said = {one.subject: one for one in judge_check(CHECK, ranks, {}, "t", KNOWN) if one.metric == "gpu_share"}
    assert said["n1"].outcome is Outcome.SKIP
    assert odd in said["n1"].message
    assert {one.partition("/")[0] for one in said} == {"n0", "n1", "n2"}
    assert failed(measured(8, nodes=3, bad=(11,), odd=odd), BUSBW), "what is known of its model judges it all the same"


def test_two_gpus_never_outvote_each_other_but_what_is_known_speaks() -> None:
    ranks = measured(2, nodes=4, path=(0, 1))
    assert failed(ranks) == {"n0/gpu0->gpu1"}
    assert verdicts(ranks)["gpu_share", "n0"] is Outcome.SKIP
    assert not failed(measured(2, nodes=4, path=(0, 1), model=STRANGE))
    assert not list(located(ranks))


def test_gpus_are_compared_with_those_of_their_own_node() -> None:
    ranks = measured(4, nodes=2, bad=(4, 5, 6, 7))
    assert not failed(ranks, "gpu_share")
    assert failed(ranks, BUSBW) == {f"n1/gpu{a}->gpu{b}" for a, b in combinations(range(4), 2)}
    assert failed(measured(4, nodes=2, bad=(6,)), "gpu_share") == {"n1/gpu2"}


def test_nodes_of_unlike_models_are_each_held_to_what_is_known_of_their_own() -> None:
    ranks = measured(4, nodes=2, path=(0, 1), strange=STRANGE)
    assert failed(ranks, BUSBW) == {"n0/gpu0->gpu1"}
    assert verdicts(ranks)[BUSBW, "n1/gpu0->gpu1"] is Outcome.SKIP


def test_a_node_whose_first_rank_brings_nothing_is_not_passed_over() -> None:
    ranks = measured(4, nodes=2)
    silent = [*ranks[:4], ranks[4].model_copy(update={"metrics": (), "facts": {}}), *ranks[5:]]
    assert {metric for (metric, where), outcome in verdicts(silent).items() if outcome is Outcome.ERROR} == {
        rule.metric for rule in CHECK.rules
    }
    assert {where for (_, where), outcome in verdicts(silent).items() if outcome is Outcome.ERROR} == {"n1"}


def test_a_model_of_which_nothing_is_known_is_recorded_and_not_blocked() -> None:
    outcomes = verdicts(measured(8, model=STRANGE))
    assert set(outcomes.values()) == {Outcome.PASS, Outcome.SKIP}
    assert {outcome for (metric, _), outcome in outcomes.items() if metric == BUSBW} == {Outcome.SKIP}
    assert failed(measured(8, bad=(3,), model=STRANGE)) == {"n0/gpu3"}


def test_data_that_arrives_wrong_names_sender_receiver_offset_and_bits() -> None:
    ranks = measured(4, wrong={(1, 2): WRONG})
    assert failed(ranks) == {"n0", "n0/gpu1->gpu2"}
    assert ranks[0].facts["wrong_data"] == [
        {"from": "n0/gpu1", "to": "n0/gpu2", "wrong": 7, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    ]


def test_data_that_arrives_wrong_when_a_pair_is_tried_alone_counts_as_any_other() -> None:
    ranks = measured(4, shared={frozenset((0, 3))}, wrong_alone={(3, 0): WRONG})
    assert {"n0", "n0/gpu0->gpu3"} <= failed(ranks)
    assert value(ranks, "shared_links", "n0") == 0, "it carries nothing"


def test_a_gpu_that_sends_wrong_data_to_all_is_named_however_fast_it_is() -> None:
    ranks = measured(4, wrong={(1, other): WRONG for other in (0, 2, 3)})
    assert failed(ranks, "gpu_share") == {"n0/gpu1"}
    assert [one.subject for one in located(ranks)] == ["n0/gpu1"]


def without(ranks: list[Measurement], name: str, subject: str) -> list[Measurement]:
    kept = [tuple(one for one in rank.metrics if (one.name, one.subject) != (name, subject)) for rank in ranks]
    assert sum(map(len, kept)) == sum(len(rank.metrics) for rank in ranks) - 1
    return [rank.model_copy(update={"metrics": own}) for rank, own in zip(ranks, kept, strict=True)]


@pytest.mark.parametrize(("name", "subject"), [(BUSBW, "n1/gpu0->gpu3"), ("gpu_share", "n1/gpu2")])
def test_what_was_not_measured_everywhere_is_an_error(name: str, subject: str) -> None:
    said = verdicts(without(measured(4, nodes=2), name, subject))
    assert [key for key, outcome in said.items() if outcome is Outcome.ERROR] == [(name, "n1")]


def test_another_size_is_an_error_unless_the_trial_judges_it_itself() -> None:
    ranks = measured(4)
    facts = {**ranks[0].facts, "left_out": {BUSBW: "the trial's options ask for 64MiB"}}
    renamed = tuple(replace(one, name="busbw.64MiB") if one.name == BUSBW else one for one in ranks[0].metrics)
    other = [ranks[0].model_copy(update={"metrics": renamed, "facts": facts}), *ranks[1:]]
    assert verdicts(other)[BUSBW, "n0"] is Outcome.ERROR
    said = judge_check(CHECK, other, {"busbw.64MiB": Threshold.parse("> 300 GB/s")}, "t", KNOWN)
    assert {one.outcome for one in said} == {Outcome.PASS, Outcome.SKIP}


def test_pairs_are_called_the_same_when_the_ranks_go_the_other_way_round() -> None:
    """As they do when a shortfall is measured a second time."""
    there = ["n0/gpu2", "n0/gpu10", "n0/gpu9"]
    for subjects in (there, there[::-1]):
        lines = [line(a, b, GOOD) for a, b in permutations(range(3), 2)]
        (figures,) = figures_by_node({"n0": (0, 1, 2)}, subjects, GPU_SIZE, lines).values()
        matrix, *seen = gpu_pairs._figures("n0", figures, NVLINK)
        named = {one.subject for one in seen if isinstance(one, Metric) and one.name == BUSBW}
        assert named == {"n0/gpu2->gpu9", "n0/gpu2->gpu10", "n0/gpu9->gpu10"}
        assert isinstance(matrix, Fact)
        assert isinstance(matrix.value, dict)
        assert matrix.value["gpus"] == ["gpu2", "gpu9", "gpu10"]


def test_nodes_go_side_by_side_and_one_with_fewer_gpus_is_done_earlier() -> None:
    plans = [gpu_pairs._rounds(ranks) for ranks in ((0, 1, 2, 3), (4, 5))]
    first, *others = merge_steps(plans)
    assert set(first) == {0, 1, 2, 3, 4, 5}
    assert [set(partners) for partners in others] == [{0, 1, 2, 3}] * 2


def test_of_three_gpus_no_pair_was_among_others() -> None:
    assert "alone" not in measured(3, path=(0, 1))[0].facts
    assert failed(measured(3, path=(0, 1)), "path_share") == {"n0/gpu0->gpu1"}


def test_what_the_gates_see_is_said_without_the_network() -> None:
    texts = [
        one.text
        for one in sensitivity.comparison_insights(measured(4, nodes=3), {CHECK.name: CHECK}, Links(network="rdma"))
    ]
    assert [text.partition(" slower")[0] for text in texts] == [
        "gpu_share >= 0.9 of the median: the least that it sees is a GPU's way to all others of its node 10%",
        "path_share >= 0.9 of the best: the least that it sees is the path between two GPUs of a node 10%",
    ]


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs behind switches, of which every pair exchanges as it should; this process is rank 0."""
    links = tuple(NvLink(link=number, active=True, remote="switch") for number in range(18))
    told = gpu.GpuFacts(gpus=tuple(Gpu(index=index, nvlinks=links) for index in range(4)))

    def gather(value: Any) -> list[Any]:
        return (
            [f"n0/gpu{one}" for one in range(4)] if value == "n0/gpu0" else [*range(4)] if value == 0 else [value] * 4
        )

    def exchanged(
        _place: Context, options: Any, nodes: Any, subjects: list[str], *, again: bool
    ) -> dict[str, PairResults]:
        assert again, "on GPUs"
        lines = [line(a, b, GOOD) for a, b in permutations(range(4), 2)]
        return figures_by_node(nodes, subjects, options.size or GPU_SIZE, lines)

    group = {"backend": "nccl", "gpu": f"{MODEL} + {STRANGE}", "nccl_version": "2.28.9", "world_size": 4}
    monkeypatch.setattr(subgroups, "ranks_by_node", lambda _node: {"n0": (0, 1, 2, 3)})
    monkeypatch.setattr(subgroups, "describe_device", lambda _device: {"gpu": MODEL})
    monkeypatch.setattr(subgroups, "gather", lambda _own: [MODEL] * 4 + [STRANGE] * 4)  # another node's are others
    monkeypatch.setattr(collectives, "describe_group", lambda: dict(group))
    monkeypatch.setattr(_nccl_log, "connections_by_transport", lambda _device, since: {"P2P/CUMEM": 96 - since})
    monkeypatch.setattr(gpu, "read", lambda _root: told)
    monkeypatch.setattr(rank_, "gather", gather)
    monkeypatch.setattr(gpu_pairs, "_exchanged", exchanged)


def a_place(tmp_path: Path) -> Context:
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
def test_on_gpus_the_way_and_what_joins_them_are_told(tmp_path: Path) -> None:
    lead = measure(CHECK, a_place(tmp_path), {})
    assert lead.error is None
    assert (lead.facts["joined"], lead.facts["comparable"]) == (NVLINK, "yes")
    assert lead.facts["gpu"] == MODEL, "of this node, whatever others have"
    assert (lead.facts["world_size"], lead.facts["nodes"]) == (2, 1), "of two GPUs of a node, however many there are"
    assert lead.facts["transports"] == {"P2P/CUMEM": 96}
    assert "left_out" not in lead.facts
    assert str(lead.facts["how"]).startswith(
        "NCCL 2.28.9 over P2P/CUMEM: 6 pairs of the 4 ranks of this node in 3 rounds"
    )
    others = [Measurement(check=CHECK.name, subject=f"n0/gpu{one}", rank=one) for one in (1, 2, 3)]
    assert set(verdicts([lead, *others]).values()) == {Outcome.PASS}


@pytest.mark.usefixtures("on_gpus")
def test_on_gpus_another_size_says_what_is_left_out(tmp_path: Path) -> None:
    lead = measure(CHECK, a_place(tmp_path), {"size": "64MiB"})
    assert lead.facts["left_out"] == {BUSBW: "the trial's options ask for 64MiB"}
    assert {one.name for one in lead.metrics if one.name.startswith("busbw")} == {"busbw.64MiB"}


def test_a_size_is_of_whole_elements() -> None:
    with pytest.raises(ValidationError, match="multiple of 4"):
        gpu_pairs.GpuPairOptions.model_validate({"size": "6B"})
