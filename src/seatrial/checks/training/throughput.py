"""How fast does a GPU train alone, a node by itself, the whole cluster? The same batch a GPU, so that only it changes.

The native stack on the shapes of a 7B, with as many layers as one GPU can hold: what is lost from stage to stage is
lost to the exchange of weights and gradients, and to the slowest GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from pydantic import Field

from seatrial.checks.base import Check, Place
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._workload import Trained, WorkloadOptions
from seatrial.model import CLUSTER, Fact, Metric, Observation, Phase, Scope, Series

NAME = "throughput"
GPU, NODE, ALL = "gpu", "node", "cluster"
STAGES = (GPU, NODE, ALL)
SPEED = "tokens_per_second_per_gpu"
GPU_OVERRIDES = ("max_steps=20", "settle_steps=8")
SAMPLES = 256  # at least, and so many a rank as two batches take: made in seconds, and speed does not depend on them
LAYERS = 8  # of 32: 2.0 of 7.2 billion parameters, 32 GB of weights, gradients and Adam on one GPU


class ThroughputOptions(WorkloadOptions):
    """``layers``: of the shipped model, on GPUs; with a config of yours, or 0, all of its own."""

    layers: int = Field(default=LAYERS, ge=0)


def measure(place: Place, options: ThroughputOptions) -> Iterator[Observation]:
    """Yields on rank 0. Raises SeatrialError where a stage cannot train here at all."""
    from seatrial.bench import rank, subgroups
    from seatrial.train import train_config

    facts, subjects = _results.here(place), rank.gather(place.subject)
    nodes = subgroups.ranks_by_node(place.node)
    config = options.config or _workload.config_for(place, NAME)
    shipped = place.device.startswith("cuda") and not options.config
    samples = f"data.samples={max(SAMPLES, 4 * place.world_size)}"
    overrides = (*((*cut(options), *GPU_OVERRIDES, samples) if shipped else ()), *options.overrides)
    if place.rank == 0:
        yield from facts
        yield Fact(name="how", value=_how(config, overrides))
        yield Fact(name="offload", value="yes" if train_config.load(config, overrides).parallel.cpu_offload else "no")
    runs: dict[str, list[Trained]] = {}
    for stage, groups in stages(nodes).items():
        runs[stage] = _workload.train(place, stage, config, overrides, groups, options.limit_s)
        if place.rank == 0:
            for number, one in enumerate(runs[stage]):
                yield from _results.each(place, one, stage, _subject(stage, one, subjects), brief=number > 0)
    if place.rank == 0:
        named = {
            stage if stage == ALL else f"{stage} {_subject(stage, one, subjects)}": one
            for stage, found in runs.items()
            for one in found
        }
        yield from _results.judged(named)
        yield from _scaling(runs)
        every = [one for found in runs.values() for one in found]
        yield Fact(name="spread", value=" and ".join(sorted({str(one.value("strategy")) for one in every})))
        yield from _results.memory(every)


def cut(options: ThroughputOptions) -> tuple[str, ...]:
    """The overrides that leave so many layers of the shipped model on GPUs."""
    return (f"model.layers={options.layers}",) if options.layers and not options.config else ()


def stages(nodes: Mapping[str, Sequence[int]]) -> dict[str, list[list[int]]]:
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


def _subject(stage: str, one: Trained, subjects: Sequence[str]) -> str:
    first = subjects[one.ranks[0]]
    return {GPU: first, NODE: first.partition("/")[0]}.get(stage, CLUSTER)


def _scaling(runs: Mapping[str, Sequence[Trained]]) -> Iterator[Observation]:
    """Each stage's speed a GPU as a share of what GPUs reach alone, and of what nodes reach by themselves."""
    speeds = {stage: [speed for one in found if (speed := one.value(SPEED))] for stage, found in runs.items()}
    middle = {stage: (median(own), len(runs[stage][0].ranks)) for stage, own in speeds.items() if own}
    for stage, base in ((NODE, GPU), (ALL, GPU), (ALL, NODE)):
        if stage in middle and base in middle:
            value = 100 * middle[stage][0] / middle[base][0]
            yield Metric(name=f"efficiency.{stage}_of_{base}", value=value, unit="%", subject=CLUSTER)
    baseline = "median tokens/s/GPU of a stage over that of another, at the same batch a GPU: STAGE_of_BASELINE"
    yield Fact(name="efficiency_baseline", value=baseline)
    if len(middle) > 1:
        y, x = (tuple(map(float, axis)) for axis in zip(*middle.values(), strict=True))
        yield Series(name=SPEED, subject=CLUSTER, x=x, y=y, x_unit="GPUs", y_unit="tokens/s/GPU")


def _how(config: str, overrides: Sequence[str]) -> str:
    return (
        f"{config} ({', '.join(overrides) or 'as it is'}), once in each stage: every GPU alone, all at the same time; "
        "each node by itself, all at the same time; all together. Speed is of the steps after settle_steps; "
        "memory_excess is of weights and Adam on the fullest GPU of any stage, over their share by arithmetic"
    )


CHECK = Check(
    name="train.throughput",
    title="Training speed: a GPU, a node, the cluster",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    metrics={
        **_results.units(*STAGES),
        "efficiency.node_of_gpu": "%",
        "efficiency.cluster_of_gpu": "%",
        "efficiency.cluster_of_node": "%",
        "memory_excess": "%",
    },
    rules=(*_results.RULES, _results.memory_rule(spread="fsdp2", offload="no")),
    measure=measure,
    foretold=lambda options: _results.foretold(options, NAME, *STAGES, own=cut(options)),
    limit_s=900.0,
    options=ThroughputOptions,
    performance=(*_results.PERFORMANCE, "efficiency.*"),
)
