"""slurm.nodes: number of usable nodes for the trial's jobs, and the state of each of these nodes."""

from __future__ import annotations

from pydantic import Field

from seatrial.checks.check import Check, Context, Options, SkipIf
from seatrial.checks.declare import Answers, fact, metric, unreadable, value, warning
from seatrial.checks.slurm._probe_jobs import needs_slurm
from seatrial.config.schema import JobPlacement
from seatrial.discover.slurm_nodes import candidate_nodes
from seatrial.model import Phase, Scope


class NodesOptions(Options):
    """The nodes that are counted, and the reservation of the trial's jobs; by default those of the trial (slurm.*)."""

    partition: str | None = Field(default=None, description="default: Slurm's default partition")
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = Field(default=None, description="default: all nodes of the partition")
    exclude: str | None = None


@needs_slurm
def measure(context: Context, options: NodesOptions) -> Answers:
    """Yield the node counts, and the state of each node.

    Raises NotApplicable without Slurm client or configuration, SlurmUnavailable if the controller does not answer.
    """
    candidates = candidate_nodes(JobPlacement.model_validate(options.model_dump()))
    unusable = {node.name: str(node) for node in candidates.unusable}
    yield fact("nodes", [node.model_dump(mode="json") for node in candidates.nodes])
    yield value("nodes", len(candidates.nodes))
    yield value(
        "nodes_missing",
        max(0, context.expected_nodes - len(candidates.nodes) + len(unusable)),
        evidence={"partition": candidates.partition, "unusable": unusable},
    )
    for node in candidates.nodes:
        state = unusable.get(node.name)
        yield value("up", node.up, node.name, evidence=state)
        yield value("in_service", not node.not_in_service, node.name, evidence=state)
        yield value("free_of_reservations", not candidates.blocked(node), node.name, evidence=state)
    yield unreadable("*", "no nodes in the partition and the node list of the trial")


CHECK = Check(
    name="slurm.nodes",
    title="Slurm nodes: up, in service, not reserved",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    measure=measure,
    limit_s=300,
    options=NodesOptions,
    skip_if=(SkipIf.NO_SLURM,),
    declared=(
        metric("nodes", unit="nodes", meaning="nodes on which Slurm may run the trial's jobs"),
        metric(
            "nodes_missing",
            "== 0 nodes",
            "fewer usable nodes in the trial's partition and node list than expected",
            "sinfo -R lists the reasons; when a node is repaired: scontrol update nodename=NODE state=resume",
        ),
        warning(
            "up",
            "yes",  # only WARN, as the trial can run on other nodes; nodes_missing FAILs if too few are left
            "the node is DOWN, failing, or does not answer the controller",
            "scontrol show node NODE; on the node: systemctl status slurmd; journalctl -u slurmd -n 50. INVALID_REG: "
            "the node has fewer resources than slurm.conf configures, see slurmd -C on the node",
        ),
        warning(
            "in_service",
            "yes",
            "the node is drained or rebooting (by an administrator or a health check); it gets no new jobs",
            "sinfo -R; when the reason is resolved: scontrol update nodename=NODE state=resume",
        ),
        warning(
            "free_of_reservations",
            "yes",
            "the node is reserved: only jobs with --reservation run there",
            "scontrol show reservations; set the reservation in the trial (--set slurm.reservation=NAME), or: "
            "scontrol delete reservation NAME",
        ),
    ),
)
