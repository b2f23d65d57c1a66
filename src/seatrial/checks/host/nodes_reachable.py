"""Compares the number of nodes in the process group with the expected number of nodes."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Context, Options, metric
from seatrial.model import Fact, Observation, Phase, Rule, Scope


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield from rank 0 the number of nodes in the process group, and the number of missing nodes."""
    from seatrial.bench import rank

    node_of_each_rank = rank.gather(context.node)
    if context.rank == 0:
        nodes = sorted(set(node_of_each_rank))
        yield Fact(name="ranks_by_node", value={node: node_of_each_rank.count(node) for node in nodes})
        yield metric("nodes", len(nodes), "nodes")
        yield metric("nodes_missing", context.expected_nodes - len(nodes), "nodes")


CHECK = Check(
    name="nodes.reachable",
    title="All expected nodes in one process group",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    metrics={"nodes": "nodes", "nodes_missing": "nodes"},
    rules=(
        Rule(
            metric="nodes_missing",
            evidence_facts=("ranks_by_node",),
            expect="== 0 nodes",
            may_be_negative=True,
            meaning="Fewer nodes than expected are in the process group (negative: more nodes).",
            fix="Fact ranks_by_node lists the nodes that joined. Two nodes with the same host name count as one: run "
            "`hostname` on each node.",
        ),
    ),
    measure=measure,
    limit_s=120,
)
