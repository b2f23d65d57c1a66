"""Training speed of one GPU, one node and the whole cluster with the same batch per GPU.

The native stack trains a 7B model that is reduced to LAYERS layers, so that one GPU can hold it. The loss of speed from
stage to stage is the cost of communication and of the slowest GPU. Each efficiency must exceed ``MIN_EFFICIENCY``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answers, absent, fact, metric
from seatrial.checks.training import _ranks, _results, _workload
from seatrial.checks.training._results import TOKENS_PER_GPU, Stage
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import CLUSTER, Phase, Scope, Series

NAME = "throughput"
GPU, NODE, ALL = "gpu", "node", "cluster"
STAGES = (GPU, NODE, ALL)
# Stage → why it does not exist
_NO_STAGE = {NODE: "one GPU per node, so that the stages GPU and node are the same", ALL: "one node"}
GPU_OVERRIDES = ("max_steps=20", "untimed_steps=8")
MIN_SAMPLES = 256  # generated within seconds; more do not change the speed
# Percent. 2 and 4 H200 of a node have 99 to 101 % of the speed per GPU of a single H200 (docs/results). Published for
# an 8B model under FSDP2 with 400 Gb/s per GPU (pytorch/torchtitan, benchmarks/):
#   97 % from 1 to 16 nodes of 8 H100, 5,762 and 5,605 tokens/s/GPU (llama3_h100_202412_torchtitan.md)
#   98 % from 4 to 8 nodes of 8 H200 (llama3-8b_h200_202506_trainy-whitefiber.md)
MIN_EFFICIENCY = 90
# 8 of the model's 32 layers: 2.0 of 7.2 billion parameters, 32 GB of weights, gradients and Adam state on one GPU
LAYERS = 8
METHOD = (
    "once per stage: each GPU separately, all concurrently; each node separately, all concurrently; one training on "
    "all ranks. Speed of the steps after untimed_steps. efficiency.STAGE_vs_BASELINE: median tokens/s/GPU of a stage "
    "over that of the baseline. memory_excess: weights and Adam state on the fullest GPU of any stage over the share"
)


class ThroughputOptions(WorkloadOptions):
    """Options of train.throughput."""

    layers: int = Field(
        default=LAYERS, ge=0, description="layers of the shipped model on GPUs; 0: all; ignored with another config"
    )


def measure(context: Context, options: ThroughputOptions) -> Answers:
    """Train once per stage; yield the speeds, the efficiencies and the times of the ranks on rank 0."""
    from seatrial.bench import rank, subgroups
    from seatrial.train import train_config

    subjects, ranks_by_node = rank.gather(context.subject), subgroups.ranks_by_node(context.node)
    samples = f"data.samples={max(MIN_SAMPLES, 4 * context.world_size)}"  # at least two batches per rank
    config, overrides = _workload.config_and_overrides(
        context, options, NAME, (), *layers_override(options), *GPU_OVERRIDES, samples
    )
    if context.rank == 0:
        offload = train_config.load(config, overrides).parallel.cpu_offload
        yield fact("cpu_offload", "yes" if offload else "no")
    stages = []
    for stage, groups in groups_by_stage(ranks_by_node).items():
        stage_subjects = [] if stage == ALL else [subjects[ranks[0]] for ranks in groups]
        if stage == NODE:
            stage_subjects = [subject.partition("/")[0] for subject in stage_subjects]
        stages.append(Stage(stage, overrides, groups, stage_subjects))
    results = yield from _results.run_stages(context, config, stages, options.limit_s, METHOD)
    if context.rank == 0:
        if NODE not in results:
            yield absent(f"{TOKENS_PER_GPU}.{NODE}", _NO_STAGE[NODE])
        yield from _scaling_observations(results)
        yield from _ranks.slowdown_and_data_wait(results, subjects)
        trainings = [result for stage_results in results.values() for result in stage_results]
        if strategies := sorted({result.value("strategy") for result in trainings if result.metrics}):
            yield fact("parallelism", " and ".join(strategies))
        yield from _results.memory_excess(trainings)


def layers_override(options: ThroughputOptions) -> tuple[str, ...]:
    """The override of the number of layers; () for all layers or another config."""
    return (f"model.layers={options.layers}",) if options.layers and not options.config else ()


def groups_by_stage(ranks_by_node: Mapping[str, Sequence[int]]) -> dict[str, list[list[int]]]:
    """Stage → groups of ranks: each rank, the ranks of each node, all ranks.

    A stage that equals another one is left out: ``cluster`` with one node, ``node`` with one GPU per node.
    """
    ranks = sorted(rank for node_ranks in ranks_by_node.values() for rank in node_ranks)
    groups = {
        GPU: [[rank] for rank in ranks],
        NODE: [list(node_ranks) for node_ranks in ranks_by_node.values()],
        ALL: [ranks],
    }
    if len(ranks_by_node) == 1:
        del groups[ALL]
    if len(ranks_by_node) == len(ranks):
        del groups[NODE]
    return groups


def _scaling_observations(results: Mapping[str, Sequence[TrainingResult]]) -> Answers:
    """Efficiency of node and cluster relative to single GPUs, and of the cluster relative to single nodes."""
    for stage, baseline in ((NODE, GPU), (ALL, GPU), (ALL, NODE)):
        name, missing = f"efficiency.{stage}_vs_{baseline}", [each for each in (stage, baseline) if each not in results]
        if missing:
            yield absent(name, _NO_STAGE[missing[0]])
        else:
            yield from _results.efficiency(name, results[stage], results[baseline])
    medians = {len(trainings[0].ranks): _results.median_speeds(trainings)[0] for trainings in results.values()}
    speeds = {float(gpus): speed for gpus, speed in medians.items() if speed}
    if len(speeds) > 1:
        x, y = tuple(speeds), tuple(speeds.values())
        yield Series(name=TOKENS_PER_GPU, subject=CLUSTER, x=x, y=y, x_unit="GPUs", y_unit="tokens/s/GPU")


def _efficiency(stage: str, baseline: str, fix: str) -> metric:
    """The efficiency of ``stage`` relative to ``baseline``."""
    return metric(
        f"efficiency.{stage}_vs_{baseline}",
        f"> {MIN_EFFICIENCY} %",
        f"Training speed per GPU drops from one {'GPU' if baseline == GPU else baseline} to the {stage}, with the same "
        "batch per GPU: communication or the slowest GPU costs the difference.",
        fix,
        when=_results.ON_GPU,
        speed=True,
        may_exceed_100=True,
    )


_NODE_FIX = (
    "Compare tokens_per_second_per_gpu.gpu of the GPUs (a slow GPU slows all), then collectives.all_reduce and "
    "collectives.all_gather within the node; nvidia-smi topo -m; top on the node shows other load on the CPUs"
)
_CLUSTER_FIX = (
    "Compare tokens_per_second_per_gpu.node of the nodes (a slow node slows all), then collectives.pairs, "
    "collectives.scaling and collectives.transport. If all are good, the network is too slow for this model: a trial "
    "may set another threshold in expect, with override: true"
)

_DEFAULTS = "config", "overrides", "layers"

CHECK = Check(
    name="train.throughput",
    title="Training speed per GPU, node and cluster",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    declared=(
        *_results.DECLARED,
        _results.speed_of_work(f"{TOKENS_PER_GPU}.{GPU}", 0.68, 0.71, *_DEFAULTS, each_rank=True),
        _results.speed_of_work(f"{TOKENS_PER_GPU}.{NODE}", 0.72, 0.76, *_DEFAULTS),
        *_results.speed(ALL),
        *_results.EACH_STAGE,
        _efficiency(NODE, GPU, _NODE_FIX),
        _efficiency(ALL, NODE, _CLUSTER_FIX),
        _efficiency(ALL, GPU, _CLUSTER_FIX),
        *_ranks.DECLARED,
        _results.memory_metric("parallelism == fsdp2 and cpu_offload == no"),
    ),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(
        options, NAME, *STAGES, check_overrides=layers_override(options)
    ),
    limit_s=900.0,
    options=ThroughputOptions,
    child_tasks=("gpu", "all"),
)
