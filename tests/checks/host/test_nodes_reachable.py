from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.bench import rank
from seatrial.checks.check import Context, Options
from seatrial.checks.host.nodes_reachable import CHECK
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Measurement, Metric, Outcome


def measured(monkeypatch: pytest.MonkeyPatch, nodes: Sequence[str], expected: int, rank_index: int = 0) -> Measurement:
    """Run the check on one rank; ``nodes`` are the nodes of all ranks."""
    monkeypatch.setattr(rank, "gather", lambda node: list(nodes))
    context = Context(
        node=nodes[rank_index],
        rank=rank_index,
        world_size=len(nodes),
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        expected_nodes=expected,
        artifacts_dir=Path("/nowhere"),
        run_dir=Path("/nowhere"),
    )
    observations = list(CHECK.observe(context, Options()))
    return Measurement(
        check=CHECK.name,
        subject=context.subject,
        metrics=tuple(metric for metric in observations if isinstance(metric, Metric)),
        facts={fact.name: fact.value for fact in observations if isinstance(fact, Fact)},
    )


@pytest.mark.parametrize(
    ("nodes", "expected", "outcome"),
    [
        (["a", "a", "b", "b"], 2, Outcome.PASS),
        (["a", "a", "a", "a"], 2, Outcome.FAIL),  # same result as two nodes with one host name
        (["a", "b"], 3, Outcome.FAIL),
        (["a", "b", "c"], 2, Outcome.FAIL),  # more nodes than expected
    ],
)
def test_number_of_nodes(nodes: list[str], expected: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measured(monkeypatch, nodes, expected)
    assert [verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t")] == [outcome]
    evidence = {metric.name: metric.evidence for metric in measurement.metrics}["nodes_missing"]
    assert evidence == {"ranks_by_node": {node: nodes.count(node) for node in nodes}}


def test_only_rank_0_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    other = measured(monkeypatch, ["a", "b"], 2, rank_index=1)
    assert (other.metrics, other.facts) == ((), {})
