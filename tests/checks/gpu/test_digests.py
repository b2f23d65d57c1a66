from __future__ import annotations

from typing import cast

import pytest

from seatrial.checks.gpu.digests import CHECK, _compare_digests, mismatching_ranks
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Measurement, Outcome
from tests.bench.cluster import Scenario, run
from tests.checks.gpu import driver

Runs = dict[str, list[Measurement]]
FAULTS: dict[str, tuple[str, ...]] = {
    "honest": (),
    "odd_one": ("odd_one",),
    "upset": ("upset",),
    "all_differ": ("own_digests",),
    "two_differ": ("stranger", "odd_second"),
    "stranger": ("stranger",),
    "other_libraries": ("other_libraries",),
    "own_models": ("own_models",),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    small = {"links": 3, "size": 64}
    scenarios = {name: Scenario(CHECK.name, options=small, faults=faults) for name, faults in FAULTS.items()}
    return run(tmp_path_factory.mktemp("digests"), driver.__name__, scenarios)


def judged(measurements: list[Measurement], metric: str = "digest_mismatches") -> dict[str, Outcome]:
    assert [one.error for one in measurements] == [None] * 3
    verdicts = judge_check(CHECK, measurements, {}, "t")
    return {verdict.subject: verdict.outcome for verdict in verdicts if verdict.metric == metric}


def rounds(measurements: list[Measurement]) -> dict[str, float]:
    return {metric.subject: metric.value for metric in measurements[0].metrics if metric.name == "digest_mismatches"}


def test_equal_bits_pass_after_one_round(runs: Runs) -> None:
    assert rounds(runs["honest"]) == {"node0/rank0": 0, "node1/rank1": 0, "node2/rank2": 0}
    assert set(judged(runs["honest"]).values()) == {Outcome.PASS}
    facts = runs["honest"][0].facts
    assert (facts["rounds"], facts["kinds"], facts["digests"], facts["unique_models"]) == (1, ["fp32"], [], [])
    assert [len(one.metrics) for one in runs["honest"]] == [4, 0, 0]


def agreed(measurements: list[Measurement]) -> dict[str, dict[str, str | None]]:
    return cast("dict[str, dict[str, str | None]]", measurements[0].facts["agreed"])


def test_what_most_agree_on_is_kept_for_each_model_to_compare_nodes_and_runs_by(runs: Runs) -> None:
    (digests,) = agreed(runs["honest"]).values()
    assert set(digests) == {"fp32"}
    assert len(digests["fp32"] or "") == 64
    assert list(agreed(runs["odd_one"]).values()) == [digests]  # the odd one is outvoted
    assert list(agreed(runs["stranger"]).values()).count(digests) == 2  # of each model its own, alone or not
    assert {"fp32": None} in agreed(runs["two_differ"]).values()  # nobody knows which is right


def test_a_kind_that_no_device_multiplies_is_not_listed() -> None:
    rounds: list[list[tuple[str, ...]]] = [[("", "a"), ("", "a"), ("b", "c"), ("b", "c")]]
    found = {
        one.name: one.value
        for one in _compare_digests("XXYY", "wxyz", ("bf16", "fp32"), rounds)
        if isinstance(one, Fact)
    }
    assert found["agreed"] == {"X": {"fp32": "a"}, "Y": {"bf16": "b", "fp32": "c"}}
    assert found["kinds"] == ["bf16", "fp32"]
    plain = _compare_digests("XX", "yz", ("bf16", "fp32"), [[("", "a"), ("", "a")]])
    facts = {one.name: one.value for one in plain if isinstance(one, Fact)}
    assert facts["kinds"] == ["fp32"]
    assert "in fp32; SHA-256 over the sums of the bits of every product" in str(facts["how"])


def test_the_odd_one_of_three_is_named_and_tried_again(runs: Runs) -> None:
    assert rounds(runs["odd_one"]) == {"node0/rank0": 0, "node1/rank1": 0, "node2/rank2": 2}
    assert judged(runs["odd_one"])["node2/rank2"] is Outcome.FAIL
    assert judged(runs["odd_one"])["node0/rank0"] is Outcome.PASS
    first, second = cast("list[dict[str, list[str]]]", runs["odd_one"][0].facts["digests"])
    assert first == second
    assert first["node2/rank2"] == ["wrong"] != first["node0/rank0"]


def test_an_upset_in_one_round_is_told_from_a_fault_that_stays(runs: Runs) -> None:
    assert rounds(runs["upset"]) == {"node0/rank0": 0, "node1/rank1": 0, "node2/rank2": 1}
    assert judged(runs["upset"])["node2/rank2"] is Outcome.FAIL


def test_of_two_that_differ_neither_outvotes_the_other(runs: Runs) -> None:
    assert rounds(runs["two_differ"]) == {"node0/rank0": 2, "node1/rank1": 2}
    assert judged(runs["two_differ"]) == {
        "node0/rank0": Outcome.FAIL,
        "node1/rank1": Outcome.FAIL,
        "node2/rank2": Outcome.SKIP,  # nothing is like it, and it is said so
    }


def test_where_none_agree_all_are_named(runs: Runs) -> None:
    assert set(rounds(runs["all_differ"]).values()) == {2}


@pytest.mark.parametrize(("name", "alone"), [("stranger", "node2/rank2"), ("other_libraries", "node0/rank0")])
def test_a_device_that_nobody_is_like_is_not_passed(runs: Runs, name: str, alone: str) -> None:
    assert alone not in rounds(runs[name])
    assert len(rounds(runs[name])) == 2
    assert judged(runs[name], "uncompared_devices") == {"cluster": Outcome.WARN}
    assert runs[name][0].facts["unique_models"] == [alone]


def test_no_two_alike_is_said_by_all(runs: Runs) -> None:
    for one in runs["own_models"]:
        assert one.skipped
        assert one.skipped.startswith("no two devices are alike: node0/rank0 is model 0, torch")
        assert one.metrics == ()


@pytest.mark.parametrize(
    ("models", "digests", "ranks"),
    [
        ("AAAA", "xxxx", ""),
        ("AAAA", "xxyx", "2"),
        ("AA", "xy", "01"),
        ("AAAA", "xxyy", "0123"),  # half is no majority
        ("AAAAA", "xxxyy", "34"),
        ("AAABBB", "xxxyzy", "4"),  # models are not compared with each other
        ("AAB", "xxz", ""),
        ("AAAA", "xxyz", "0123"),
    ],
)
def test_majority_of_a_model(models: str, digests: str, ranks: str) -> None:
    assert mismatching_ranks(models, digests) == set(map(int, ranks))
