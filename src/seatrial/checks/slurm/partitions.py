"""slurm.partitions: can jobs get to the nodes, by a queue that is open, and will a forgotten one ever end?"""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Context, Options, facts, metrics
from seatrial.checks.slurm._probe_jobs import require_client
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Partition
from seatrial.model import Observation, Outcome, Phase, Rule, Scope

METRICS = {
    "partitions_up": "partitions",
    "default_partitions": "partitions",
    "nodes_without_partition": "nodes",
    "partitions_without_limit": "partitions",
}

RULES = (
    Rule(
        metric="partitions_up",
        evidence_facts=("partitions",),
        expect=">= 1 partitions",
        meaning="no partition is UP: jobs are queued, and none is started",
        fix="scontrol update partitionname=NAME state=up; for good, State=UP on its line in slurm.conf",
    ),
    Rule(
        metric="default_partitions",
        expect="== 1 partitions",
        outcome_if_violated=Outcome.WARN,
        meaning="a job that names no partition is refused",
        fix="Default=YES on the PartitionName line of one partition; until then give --partition with every job",
    ),
    Rule(
        metric="nodes_without_partition",
        evidence_facts=("out_of_reach",),
        expect="== 0 nodes",
        outcome_if_violated=Outcome.WARN,
        meaning="these nodes are in no partition that is UP, so that no job ever gets there",
        fix="Put them on a PartitionName line of slurm.conf (Nodes=…), then: scontrol reconfigure",
    ),
    Rule(
        metric="partitions_without_limit",
        evidence_facts=("without_limit",),
        expect="== 0 partitions",
        outcome_if_violated=Outcome.WARN,
        meaning="a job without --time runs there for ever: one that hangs holds its GPUs until someone looks, and Slurm "
        "cannot let small jobs in before large ones (backfill), as it does not know when anything ends",
        fix="DefaultTime=01:00:00 (and MaxTime) on the PartitionName line; scontrol reconfigure",
    ),
)


def measure(context: Context, options: Options) -> Iterator[Observation]:
    """Raises NotApplicable without a Slurm client, SlurmUnavailable where the controller cannot be asked."""
    require_client()
    partitions, nodes = slurm.partitions(), slurm.nodes()
    up = {partition.name for partition in partitions if partition.up}
    out_of_reach = [node.name for node in nodes if not up & set(node.partitions)]
    without_limit = [partition.name for partition in partitions if partition.up and _endless(partition)]
    listed = [partition.model_dump(mode="json") for partition in partitions]
    yield from facts({"partitions": listed, "out_of_reach": out_of_reach, "without_limit": without_limit})
    counts = {
        "partitions_up": len(up),
        "default_partitions": sum(partition.default for partition in partitions),
        "nodes_without_partition": len(out_of_reach),
        "partitions_without_limit": len(without_limit),
    }
    yield from metrics(METRICS, counts)


def _endless(partition: Partition) -> bool:
    """Whether a job without --time has no limit. DefaultTime counts; where none is set, MaxTime does."""
    limit = partition.max_time_s if partition.default_time_s is None else partition.default_time_s
    return limit in (None, "unlimited")


CHECK = Check(
    name="slurm.partitions",
    title="Slurm's partitions are open, and reach every node",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=300,
)
