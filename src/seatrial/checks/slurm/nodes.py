"""slurm.nodes: number of usable nodes, and the state of every node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from seatrial.checks.base import Check, Context, Options, facts, metrics
from seatrial.checks.slurm._probe_jobs import needs_slurm
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import SlurmNode
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
        evidence_facts=("unusable",),
        expect="== 0 nodes",
        meaning="fewer usable nodes than expected",
        fix="sinfo -R lists the reasons; when a node is repaired: scontrol update nodename=NODE state=resume",
    ),
    Rule(
        metric="up",
        evidence_facts=("not_up",),
        expect="== 1 bool",
        # only WARN, as the trial can run on other nodes; nodes_missing FAILs if too few usable nodes are left
        outcome_if_violated=Outcome.WARN,
        meaning="the node is DOWN, failing, or does not answer the controller",
        fix="scontrol show node NODE; on the node: systemctl status slurmd; journalctl -u slurmd -n 50. INVALID_REG: "
        "the node has fewer resources than slurm.conf configures, see slurmd -C on the node",
    ),
    Rule(
        metric="in_service",
        evidence_facts=("not_in_service",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="the node is drained or rebooting (by an administrator or a health check); it gets no new jobs",
        fix="sinfo -R; when the reason is resolved: scontrol update nodename=NODE state=resume",
    ),
    Rule(
        metric="free_of_reservations",
        evidence_facts=("reserved",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="the node is reserved: only jobs with --reservation run there",
        fix="scontrol show reservations; set the reservation in the trial (--set slurm.reservation=NAME), or: "
        "scontrol delete reservation NAME",
    ),
)


class NodesOptions(Options):
    """``reservation``: reservation of the trial's jobs; default: the trial's slurm.reservation."""

    reservation: str | None = None


@needs_slurm
def measure(context: Context, options: NodesOptions) -> Iterator[Observation]:
    """Yield the node counts, and the state of each node.

    Raises NotApplicable without Slurm client or configuration, SlurmUnavailable if the controller does not answer.
    """
    nodes = slurm.nodes()
    # names of the nodes in a reservation that keeps the trial's jobs off
    reserved = {node.name for node in nodes if node.blocked_by_reservation(options.reservation)}
    usable_count = sum(node.usable and node.name not in reserved for node in nodes)

    def states_of(condition: Callable[[SlurmNode], bool]) -> dict[str, str]:
        return {node.name: str(node) for node in nodes if condition(node)}

    yield from facts(
        {
            "nodes": [node.model_dump(mode="json") for node in nodes],
            "unusable": states_of(lambda node: not node.usable or node.name in reserved),
            "not_up": states_of(lambda node: not node.up),
            "not_in_service": states_of(lambda node: node.not_in_service),
            "reserved": states_of(lambda node: node.name in reserved),
        }
    )
    missing_count = max(0, context.expected_nodes - usable_count)
    yield from metrics(METRICS, {"nodes": len(nodes), "nodes_usable": usable_count, "nodes_missing": missing_count})
    for node in nodes:
        values = {
            "up": node.up,
            "in_service": not node.not_in_service,
            "free_of_reservations": node.name not in reserved,
        }
        yield from metrics(METRICS, values, node.name)


CHECK = Check(
    name="slurm.nodes",
    title="Slurm nodes: up, in service, not reserved",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=300,
    options=NodesOptions,
    skip_allowed_if=("no Slurm",),
)
