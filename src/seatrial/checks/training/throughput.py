"""How fast does a GPU train alone, a node by itself, the whole cluster? The same batch a GPU, so that only it changes.

The native stack on the shapes of a 7B, with as many layers as one GPU can hold: what is lost from stage to stage is
lost to the exchange of weights and gradients, and to the slowest GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from pydantic import Field

from seatrial.checks.base import Check, Context
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._results import TOKENS_PER_GPU, Stage
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import CLUSTER, Fact, Observation, Phase, Scope, Series

NAME = "throughput"
GPU, NODE, ALL = "gpu", "node", "cluster"
STAGES = (GPU, NODE, ALL)
GPU_OVERRIDES = ("max_steps=20", "untimed_steps=8")
SAMPLES = 256  # at least, and so many a rank as two batches take: made in seconds, and speed does not depend on them
LAYERS = 8  # of 32: 2.0 of 7.2 billion parameters, 32 GB of weights, gradients and Adam on one GPU


class ThroughputOptions(WorkloadOptions):
    """``layers``: of the shipped model, on GPUs; with a config of yours, or 0, all of its own."""

    layers: int = Field(default=LAYERS, ge=0)


def measure(context: Context, options: ThroughputOptions) -> Iterator[Observation]:
    from seatrial.bench import rank, subgroups
    from seatrial.train import train_config

    facts, subjects = _results.device_facts(context), rank.gather(context.subject)
    nodes = subgroups.ranks_by_node(context.node)
    samples = f"data.samples={max(SAMPLES, 4 * context.world_size)}"
    config, own = _workload.config_and_overrides(
        context, options, NAME, *layers_override(options), *GPU_OVERRIDES, samples
    )
    overrides = (*own, *options.overrides)
    if context.rank == 0:
        yield from facts
        yield Fact(name="how", value=_how(config, overrides))
        yield Fact(name="offload", value="yes" if train_config.load(config, overrides).parallel.cpu_offload else "no")
    wanted = []
    for stage, groups in groups_by_stage(nodes).items():
        firsts = [subjects[ranks[0]] for ranks in groups]
        names = {GPU: firsts, NODE: [first.partition("/")[0] for first in firsts], ALL: []}
        wanted.append(Stage(stage, overrides, groups, names[stage]))
    runs = yield from _results.run_stages(context, config, wanted, options.limit_s)
    if context.rank == 0:
        yield from _scaling(runs)
        every = [one for found in runs.values() for one in found]
        yield Fact(name="spread", value=" and ".join(sorted({str(one.value("strategy")) for one in every})))
        yield from _results.memory_excess(every)


def layers_override(options: ThroughputOptions) -> tuple[str, ...]:
    """The overrides that leave so many layers of the shipped model on GPUs."""
    return (f"model.layers={options.layers}",) if options.layers and not options.config else ()


def groups_by_stage(nodes: Mapping[str, Sequence[int]]) -> dict[str, list[list[int]]]:
    """Stage → the ranks that train together: each alone, each node by itself, all. What is the same is not repeated."""
    every = [one for ranks in nodes.values() for one in ranks]
    found = {
        GPU: [[one] for one in sorted(every)],
        NODE: [list(ranks) for ranks in nodes.values()],
        ALL: [sorted(every)],
    }
    if len(nodes) == 1:
        del found[ALL]
    if len(nodes) == len(every):
        del found[NODE]
    return found


def _scaling(runs: Mapping[str, Sequence[TrainingResult]]) -> Iterator[Observation]:
    """Each stage's speed a GPU as a share of what GPUs reach alone, and of what nodes reach by themselves."""
    for stage, base in ((NODE, GPU), (ALL, GPU), (ALL, NODE)):
        yield from _results.efficiency(f"{stage}_vs_{base}", runs.get(stage, ()), runs.get(base, ()))
    baseline = "median tokens/s/GPU of a stage over that of another, at the same batch a GPU: STAGE_vs_BASELINE"
    yield Fact(name="efficiency_baseline", value=baseline)
    speeds = {stage: [speed for one in found if (speed := one.value(TOKENS_PER_GPU))] for stage, found in runs.items()}
    points = [(float(len(runs[stage][0].ranks)), median(known)) for stage, known in speeds.items() if known]
    if len(points) > 1:
        x, y = zip(*points, strict=True)
        yield Series(name=TOKENS_PER_GPU, subject=CLUSTER, x=x, y=y, x_unit="GPUs", y_unit="tokens/s/GPU")


def _how(config: str, overrides: Sequence[str]) -> str:
    return (
        f"{config} ({', '.join(overrides) or 'as it is'}), once in each stage: every GPU alone, all at the same time; "
        "each node by itself, all at the same time; all together. Speed is of the steps after untimed_steps; "
        "memory_excess is of weights and Adam on the fullest GPU of any stage, over their share by arithmetic"
    )


CHECK = Check(
    name="train.throughput",
    title="Training speed: a GPU, a node, the cluster",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    metrics={
        **_results.metric_units(*STAGES),
        "efficiency.node_vs_gpu": "%",
        "efficiency.cluster_vs_gpu": "%",
        "efficiency.cluster_vs_node": "%",
        "memory_excess": "%",
    },
    rules=(*_results.RULES, _results.memory_rule(spread="fsdp2", offload="no")),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(
        options, NAME, *STAGES, check_overrides=layers_override(options)
    ),
    limit_s=900.0,
    options=ThroughputOptions,
    performance_metrics=(*_results.PERFORMANCE, "efficiency.*"),
)
