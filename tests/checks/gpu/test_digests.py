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
    "healthy": (),
    "one_wrong": ("wrong_rank_2",),
    "transient": ("transient",),
    "all_differ": ("different_digests",),
    "two_differ": ("unique_model", "wrong_rank_1"),
    "unique_model": ("unique_model",),
    "other_libraries": ("other_libraries",),
    "different_models": ("different_models",),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    small = {"products": 3, "size": 64}
    scenarios = {name: Scenario(CHECK.name, options=small, faults=faults) for name, faults in FAULTS.items()}
    return run(tmp_path_factory.mktemp("digests"), driver.__name__, scenarios)


def judged(measurements: list[Measurement], metric: str = "digest_mismatches") -> dict[str, Outcome]:
    assert [measurement.error for measurement in measurements] == [None] * 3
    verdicts = judge_check(CHECK, measurements, {}, "t")
    return {verdict.subject: verdict.outcome for verdict in verdicts if verdict.metric == metric}


def mismatches(measurements: list[Measurement]) -> dict[str, float]:
    return {metric.subject: metric.value for metric in measurements[0].metrics if metric.name == "digest_mismatches"}


def test_equal_digests_need_one_round(runs: Runs) -> None:
    assert mismatches(runs["healthy"]) == {"node0/rank0": 0, "node1/rank1": 0, "node2/rank2": 0}
    assert set(judged(runs["healthy"]).values()) == {Outcome.PASS}
    facts = runs["healthy"][0].facts
    assert (facts["rounds"], facts["dtypes"]) == (1, ["fp32"])
    assert {metric.evidence for metric in runs["healthy"][0].metrics} == {None}
    assert [len(measurement.metrics) for measurement in runs["healthy"]] == [4, 0, 0]


def matching_digests(measurements: list[Measurement]) -> dict[str, dict[str, str | None]]:
    return cast("dict[str, dict[str, str | None]]", measurements[0].facts["matching_digests"])


def test_majority_digest_per_model(runs: Runs) -> None:
    (digests,) = matching_digests(runs["healthy"]).values()
    assert set(digests) == {"fp32"}
    assert len(digests["fp32"] or "") == 64
    assert list(matching_digests(runs["one_wrong"]).values()) == [digests]  # the wrong digest is the minority
    # also for the model of a single device
    assert list(matching_digests(runs["unique_model"]).values()).count(digests) == 2
    assert {"fp32": None} in matching_digests(runs["two_differ"]).values()  # no majority


def test_unsupported_dtype_is_not_listed() -> None:
    first_round: dict[str, tuple[str, ...]] = {"bf16": ("", "", "b", "b"), "fp32": ("a", "a", "c", "c")}
    observations = _compare_digests("XXYY", "wxyz", [first_round])
    two_models = {fact.name: fact.value for fact in observations if isinstance(fact, Fact)}
    assert two_models["matching_digests"] == {"X": {"fp32": "a"}, "Y": {"bf16": "b", "fp32": "c"}}
    assert two_models["dtypes"] == ["bf16", "fp32"]
    observations = _compare_digests("XX", "yz", [{"bf16": ("", ""), "fp32": ("a", "a")}])
    facts = {fact.name: fact.value for fact in observations if isinstance(fact, Fact)}
    assert facts["dtypes"] == ["fp32"]
    assert "products in fp32;" in str(facts["method"])


def test_one_wrong_device_of_three(runs: Runs) -> None:
    assert mismatches(runs["one_wrong"]) == {"node0/rank0": 0, "node1/rank1": 0, "node2/rank2": 2}
    assert judged(runs["one_wrong"])["node2/rank2"] is Outcome.FAIL
    assert judged(runs["one_wrong"])["node0/rank0"] is Outcome.PASS
    evidence = {metric.subject: metric.evidence for metric in runs["one_wrong"][0].metrics}
    assert evidence.pop("node2/rank2") == [{"fp32": "wrong"}, {"fp32": "wrong"}]
    assert set(evidence.values()) == {None}


def test_transient_mismatch_counts_one_round(runs: Runs) -> None:
    assert mismatches(runs["transient"]) == {"node0/rank0": 0, "node1/rank1": 0, "node2/rank2": 1}
    assert judged(runs["transient"])["node2/rank2"] is Outcome.FAIL
    evidence = next(each.evidence for each in runs["transient"][0].metrics if each.subject == "node2/rank2")
    first, second = cast("list[dict[str, str]]", evidence)
    assert first["fp32"] == "wrong" != second["fp32"]


def test_two_different_digests_have_no_majority(runs: Runs) -> None:
    assert mismatches(runs["two_differ"]) == {"node0/rank0": 2, "node1/rank1": 2}
    assert judged(runs["two_differ"]) == {
        "node0/rank0": Outcome.FAIL,
        "node1/rank1": Outcome.FAIL,
        "node2/rank2": Outcome.SKIP,  # unique model
    }


def test_three_different_digests_have_no_majority(runs: Runs) -> None:
    assert set(mismatches(runs["all_differ"]).values()) == {2}


@pytest.mark.parametrize(("name", "unique"), [("unique_model", "node2/rank2"), ("other_libraries", "node0/rank0")])
def test_device_without_peer_is_a_warning(runs: Runs, name: str, unique: str) -> None:
    assert unique not in mismatches(runs[name])
    assert len(mismatches(runs[name])) == 2
    assert judged(runs[name], "uncompared_devices") == {"cluster": Outcome.WARN}
    assert [each.evidence for each in runs[name][0].metrics if each.name == "uncompared_devices"] == [[unique]]
    assert [(each.metric, each.subject) for each in runs[name][0].absent] == [("digest_mismatches", unique)]


def test_all_ranks_skip_without_peers(runs: Runs) -> None:
    for measurement in runs["different_models"]:
        assert "node0/rank0 is model 0, torch" in str(measurement.skipped)
        assert measurement.metrics == ()


@pytest.mark.parametrize(
    ("models", "digests", "ranks"),
    [
        ("AAAA", "xxxx", ""),
        ("AAAA", "xxyx", "2"),
        ("AA", "xy", "01"),
        ("AAAA", "xxyy", "0123"),  # half is not a majority
        ("AAAAA", "xxxyy", "34"),
        ("AAABBB", "xxxyzy", "4"),  # models are not compared with each other
        ("AAB", "xxz", ""),
        ("AAAA", "xxyz", "0123"),
    ],
)
def test_majority_of_a_model(models: str, digests: str, ranks: str) -> None:
    assert mismatching_ranks(models, {"fp32": tuple(digests)}) == set(map(int, ranks))
