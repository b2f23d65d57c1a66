"""slurm.nodes: number of usable nodes for the trial's jobs, and the state of each of these nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import Field

from seatrial.checks.base import Check, Context, Options, SkipIf, facts, metrics
from seatrial.checks.slurm._probe_jobs import needs_slurm
from seatrial.config.schema import JobPlacement
from seatrial.discover.slurm_facts import SlurmNode
from seatrial.discover.slurm_nodes import candidate_nodes
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
        evidence_facts=("partition", "unusable"),
        expect="== 0 nodes",
        meaning="fewer usable nodes in the trial's partition and node list than expected",
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
    """The nodes that are counted, and the reservation of the trial's jobs; by default those of the trial (slurm.*)."""

    partition: str | None = Field(default=None, description="default: Slurm's default partition")
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = Field(default=None, description="default: all nodes of the partition")
    exclude: str | None = None


@needs_slurm
def measure(context: Context, options: NodesOptions) -> Iterator[Observation]:
    """Yield the node counts, and the state of each node.

    Raises NotApplicable without Slurm client or configuration, SlurmUnavailable if the controller does not answer.
    """
    candidates = candidate_nodes(JobPlacement.model_validate(options.model_dump()))
    nodes, unusable = candidates.nodes, candidates.unusable
    usable_count = len(nodes) - len(unusable)

    def states_of(condition: Callable[[SlurmNode], bool]) -> dict[str, str]:
        return {node.name: str(node) for node in nodes if condition(node)}

    yield from facts(
        {
            "partition": candidates.partition,
            "nodes": [node.model_dump(mode="json") for node in nodes],
            "unusable": {node.name: str(node) for node in unusable},
            "not_up": states_of(lambda node: not node.up),
            "not_in_service": states_of(lambda node: node.not_in_service),
            "reserved": states_of(candidates.blocked),
        }
    )
    missing_count = max(0, context.expected_nodes - usable_count)
    yield from metrics(METRICS, {"nodes": len(nodes), "nodes_usable": usable_count, "nodes_missing": missing_count})
    for node in nodes:
        values = {
            "up": node.up,
            "in_service": not node.not_in_service,
            "free_of_reservations": not candidates.blocked(node),
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
    skip_if=(SkipIf.NO_SLURM,),
)
