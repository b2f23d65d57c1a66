from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.bench import rank
from seatrial.checks.base import Context, Options
from seatrial.checks.host.nodes_reachable import CHECK
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Measurement, Metric, Outcome


def measured(monkeypatch: pytest.MonkeyPatch, nodes: Sequence[str], promised: int, of_rank: int = 0) -> Measurement:
    """What a rank yields when ``nodes`` are those of all ranks."""
    monkeypatch.setattr(rank, "gather", lambda node: list(nodes))
    context = Context(
        node=nodes[of_rank],
        rank=of_rank,
        world_size=len(nodes),
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        expected_nodes=promised,
        artifacts_dir=Path("/nowhere"),
        run_dir=Path("/nowhere"),
    )
    seen = list(CHECK.measure(context, Options()))
    return Measurement(
        check=CHECK.name,
        subject=context.subject,
        metrics=tuple(one for one in seen if isinstance(one, Metric)),
        facts={one.name: one.value for one in seen if isinstance(one, Fact)},
    )


@pytest.mark.parametrize(
    ("nodes", "promised", "outcome"),
    [
        (["a", "a", "b", "b"], 2, Outcome.PASS),
        (["a", "a", "a", "a"], 2, Outcome.FAIL),  # also what two nodes of one host name look like
        (["a", "b"], 3, Outcome.FAIL),
        (["a", "b", "c"], 2, Outcome.FAIL),  # more than were promised is not what was ordered either
    ],
)
def test_every_promised_node_answers(
    nodes: list[str], promised: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = measured(monkeypatch, nodes, promised)
    assert [verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t")] == [outcome]
    assert measurement.facts["ranks_by_node"] == {node: nodes.count(node) for node in nodes}


def test_only_the_first_rank_yields_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    other = measured(monkeypatch, ["a", "b"], 2, of_rank=1)
    assert (other.metrics, other.facts) == ((), {})
