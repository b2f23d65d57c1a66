"""slurm.nodes: are enough of Slurm's nodes in service, and what is wrong with the others?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from seatrial.checks.base import Check, Context, Options, facts, metrics
from seatrial.checks.slurm._probe_jobs import require_client
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Node
from seatrial.model import Observation, Outcome, Phase, Rule, Scope

METRICS = {
    "nodes": "nodes",
    "nodes_usable": "nodes",
    "nodes_missing": "nodes",
    "up": "bool",
    "in_service": "bool",
    "free_of_reservations": "bool",
}

RULES = (
    Rule(
        metric="nodes_missing",
        evidence_facts=("out_of_service",),
        expect="== 0 nodes",
        meaning="fewer nodes can take jobs than were promised",
        fix="sinfo -R names the reasons; when a node is mended: scontrol update nodename=NODE state=resume",
    ),
    Rule(
        metric="up",
        evidence_facts=("not_up",),
        expect="== 1 bool",
        meaning="the node is DOWN, marked as failing, or does not answer the controller",
        fix="scontrol show node NODE; on it: systemctl status slurmd; journalctl -u slurmd -n 50. INVALID_REG: "
        "the node has less than slurm.conf says, see slurmd -C on it",
    ),
    Rule(
        metric="in_service",
        evidence_facts=("held_back",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="somebody, or a health check, took the node out; it gets no new jobs",
        fix="sinfo -R; when the reason is gone: scontrol update nodename=NODE state=resume",
    ),
    Rule(
        metric="free_of_reservations",
        evidence_facts=("reserved",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="a reservation holds the node: only jobs that name it run there",
        fix="scontrol show reservations; name it to the trial (--set slurm.reservation=NAME), or: "
        "scontrol delete reservation NAME",
    ),
)


class NodesOptions(Options):
    """``reservation``: the one that the trial's jobs name; by default the trial's own, slurm.reservation."""

    reservation: str | None = None


def measure(context: Context, options: NodesOptions) -> Iterator[Observation]:
    """Raises NotApplicable without a Slurm client, SlurmUnavailable where the controller cannot be asked."""
    require_client()
    nodes = slurm.nodes()
    kept = {node.name for node in nodes if node.blocked_by_reservation(options.reservation)}
    usable = sum(node.usable and node.name not in kept for node in nodes)

    def states(chosen: Callable[[Node], bool]) -> dict[str, str]:
        return {node.name: str(node) for node in nodes if chosen(node)}

    yield from facts(
        {
            "nodes": [node.model_dump(mode="json") for node in nodes],
            "out_of_service": states(lambda node: not node.usable or node.name in kept),
            "not_up": states(lambda node: not node.up),
            "held_back": states(lambda node: node.not_in_service),
            "reserved": states(lambda node: node.name in kept),
        }
    )
    missing = max(0, context.expected_nodes - usable)
    yield from metrics(METRICS, {"nodes": len(nodes), "nodes_usable": usable, "nodes_missing": missing})
    for node in nodes:
        free = node.name not in kept
        values = {"up": node.up, "in_service": not node.not_in_service, "free_of_reservations": free}
        yield from metrics(METRICS, values, node.name)


CHECK = Check(
    name="slurm.nodes",
    title="Slurm's nodes are up and in service",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=300,
    options=NodesOptions,
)
