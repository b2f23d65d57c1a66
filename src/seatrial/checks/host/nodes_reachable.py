"""Are all the nodes that were promised really in the job?"""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Options, Place
from seatrial.model import CLUSTER, Fact, Metric, Observation, Phase, Rule, Scope


def measure(place: Place, options: Options) -> Iterator[Observation]:
    from seatrial.bench import rank

    nodes = rank.gather(place.node)
    if place.rank == 0:
        yield Fact(name="ranks_by_node", value={node: nodes.count(node) for node in sorted(set(nodes))})
        yield Metric(name="nodes", value=len(set(nodes)), unit="nodes", subject=CLUSTER)
        yield Metric(name="nodes_missing", value=place.promised_nodes - len(set(nodes)), unit="nodes", subject=CLUSTER)


CHECK = Check(
    name="nodes.reachable",
    title="Every promised node takes part",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    metrics={"nodes": "nodes", "nodes_missing": "nodes"},
    rules=(
        Rule(
            metric="nodes_missing",
            shows=("ranks_by_node",),
            expect="== 0 nodes",
            why="each node that was promised must answer in one process group with all others",
            fix="Look at ranks_by_node for the nodes that answered; two nodes of one host name count as one: "
            "run `hostname` on each.",
        ),
    ),
    measure=measure,
    limit_s=120,
)
