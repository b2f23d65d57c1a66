"""Compares the number of nodes in the process group with the expected number of nodes."""

from __future__ import annotations

from collections import Counter

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answers, metric, value
from seatrial.model import Phase, Scope


def measure(context: Context, _options: Options) -> Answers:
    """Yield from rank 0 the number of nodes in the process group, and the number of missing nodes."""
    from seatrial.bench import rank

    ranks_by_node = dict(sorted(Counter(rank.gather(context.node)).items()))
    if context.rank == 0:
        yield value("nodes", len(ranks_by_node))
        missing = context.expected_nodes - len(ranks_by_node)
        yield value("nodes_missing", missing, evidence={"ranks_by_node": ranks_by_node})


CHECK = Check(
    name="nodes.reachable",
    title="All expected nodes in one process group",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    measure=measure,
    limit_s=120,
    declared=(
        metric("nodes", unit="nodes", meaning="nodes in the process group"),
        metric(
            "nodes_missing",
            "== 0 nodes",
            "Fewer nodes than expected are in the process group (negative: more nodes).",
            "Bring the missing nodes back (scontrol update nodename=NODE state=resume), or start with fewer --nodes. "
            "ranks_by_node lists the nodes that joined. Two nodes with the same host name count as one: run `hostname` "
            "on each node.",
            signed=True,
            cause=Cause(
                id="nodes_missing",
                title="nodes are missing",
                place="cluster",
                wrong_results=True,
                explains=("collectives.*", "train.*"),
                first_command="sinfo --Node --long",
                action="reboot-node",
            ),
        ),
    ),
)
