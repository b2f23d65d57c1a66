from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from pydantic import JsonValue

from seatrial.checks.gpu.transfer_host import CHECK
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome
from tests.bench.cluster import TWO, Scenario, run
from tests.checks.gpu import driver


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="module")
def measured(out: Path) -> list[Measurement]:
    scenario = Scenario(CHECK.name, nodes=TWO, options={"seconds": 0.1}, faults=("pinned", "as_declared"))
    return run(out, driver.__name__, {"two": scenario})["two"]


def test_every_rank_tells_of_every_way_alone_and_together(measured: list[Measurement]) -> None:
    for one, subject in zip(measured, ("node0/rank0", "node0/rank1", "node1/rank2"), strict=True):
        assert one.error is None
        found = {metric.name: metric for metric in one.metrics}
        assert {name: metric.unit for name, metric in found.items()} == dict(CHECK.metrics)
        assert {metric.subject for metric in found.values()} == {subject}


def test_bytes_are_counted_for_each_way(measured: list[Measurement]) -> None:
    """1 MB in 1 ms is 1 GB/s; both ways move 2 MB in the same 2 ms that one takes back."""
    figures = {metric.name: metric.value for metric in measured[0].metrics}
    for when in ("alone", "together"):
        assert [figures[f"{way}_{when}"] for way in ("h2d", "d2h", "both")] == pytest.approx([1, 0.5, 1])


def test_it_is_told_whether_all_copied_in_every_window_and_where_the_memory_is(measured: list[Measurement]) -> None:
    for one in measured:
        told = one.facts["concurrent"]
        assert isinstance(told, dict)
        assert {way: type(value) for way, value in told.items()} == dict.fromkeys(("h2d", "d2h", "both"), bool)
        assert one.facts["host_memory"] == "asked for beside the CPU"


def test_nobody_of_the_node_copies_while_one_copies_alone(measured: list[Measurement], out: Path) -> None:
    """The first third of the copies of each rank are before anybody copies together."""
    spans = [alone_span(out / f"copies{rank}") for rank in range(2)]
    assert all(first[1] <= second[0] for first, second in combinations(sorted(spans), 2))


def test_together_only_the_siblings_judge_and_only_far_under_them() -> None:
    def outcomes(*values: float) -> list[Outcome]:
        facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 1, "nodes": 1}
        metrics = [
            tuple(Metric(name=name, value=value, unit="GB/s", subject=f"n/gpu{gpu}") for name in CHECK.metrics)
            for gpu, value in enumerate(values)
        ]
        all_of_them = [
            Measurement(check=CHECK.name, subject=f"n/gpu{gpu}", metrics=one, facts=facts)
            for gpu, one in enumerate(metrics)
        ]
        found = judge_check(CHECK, all_of_them, {}, "t", References(None, skus()))
        return [one.outcome for one in found if one.metric == "h2d_concurrent"]

    assert outcomes(36.6, 38.3, 36.3, 36.3) == [Outcome.PASS] * 4  # a host whose memory is shared with others
    assert outcomes(55.4, 55.3, 55.4, 27.7) == [*[Outcome.PASS] * 3, Outcome.WARN]
    assert outcomes(55.4, 27.7) == [Outcome.SKIP] * 2


def alone_span(path: Path) -> tuple[float, float]:
    """When the copies began and ended that came before the second turn of h2d."""
    entries = [line.split() for line in path.read_text().splitlines()]
    ways = [way for way, _, _ in entries]
    last = next(i for i in range(ways.index("both"), len(ways)) if ways[i] != "both")
    return float(entries[0][1]), float(entries[last - 1][2])
