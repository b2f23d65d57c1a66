"""slurm.partitions: states, default, nodes and time limits of the partitions."""

from __future__ import annotations

from pydantic import Field

from seatrial.checks.check import Check, Context, Options, SkipIf
from seatrial.checks.declare import Answers, metric, value, warning
from seatrial.checks.slurm._probe_jobs import needs_slurm
from seatrial.discover import slurm
from seatrial.model import Phase, Scope


class PartitionsOptions(Options):
    """The partition of the trial's jobs; by default slurm.partition of the trial, else Slurm's default partition."""

    partition: str | None = Field(default=None, description="several are separated by commas")


@needs_slurm
def measure(_context: Context, options: PartitionsOptions) -> Answers:
    """Yield the partition counts, and the number of nodes that are in no partition in state UP.

    ``partitions_up`` counts the partitions of the trial; without any, all partitions.

    Raises NotApplicable without Slurm client or configuration, SlurmUnavailable if the controller does not answer.
    """
    partitions, nodes = slurm.partitions(), slurm.nodes()
    names_up = {partition.name for partition in partitions if partition.up}
    default = {partition.name for partition in partitions if partition.default}
    of_trial = set((options.partition or "").split(",")) - {""} or default or names_up
    without_partition = [node.name for node in nodes if not names_up & set(node.partitions)]
    # the limit of jobs without --time is DefaultTime, or, if unset, MaxTime
    limits = {each.name: each.max_time_s if each.default_time_s is None else each.default_time_s for each in partitions}
    without_limit = [name for name in limits if name in names_up and limits[name] in (None, "unlimited")]
    states = [partition.model_dump(mode="json") for partition in partitions]
    yield value("partitions_up", len(names_up & of_trial), evidence=states)
    yield value("default_partitions", len(default))
    yield value("nodes_without_partition", len(without_partition), evidence=without_partition)
    yield value("partitions_without_limit", len(without_limit), evidence=without_limit)


CHECK = Check(
    name="slurm.partitions",
    title="Slurm partitions: states, nodes and time limits",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    measure=measure,
    limit_s=300,
    options=PartitionsOptions,
    skip_if=(SkipIf.NO_SLURM,),
    declared=(
        metric(
            "partitions_up",
            ">= 1 partitions",
            "no partition of the trial is UP: its jobs stay pending",
            "scontrol update partitionname=NAME state=up; permanently: State=UP on its line in slurm.conf",
        ),
        warning(
            "default_partitions",
            "== 1 partitions",
            "no default partition: jobs without --partition are rejected",
            "Default=YES on the PartitionName line of one partition; workaround: --partition with every job",
        ),
        warning(
            "nodes_without_partition",
            "== 0 nodes",
            "nodes that belong to no partition in state UP: no job can run there",
            "add these nodes to Nodes= of a partition in slurm.conf, then: scontrol reconfigure",
        ),
        warning(
            "partitions_without_limit",
            "== 0 partitions",
            "no time limit for jobs without --time: a hung job holds its GPUs indefinitely, and the backfill "
            "scheduler has no end times",
            "DefaultTime=01:00:00 (and MaxTime) on the PartitionName line; scontrol reconfigure",
        ),
    ),
)
