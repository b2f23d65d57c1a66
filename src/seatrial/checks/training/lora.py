"""LoRA on Mistral-7B by both stacks, on every GPU alone and on all together (DDP): is it the cluster or the framework?

The native stack is the instrument, Hugging Face's the one that users run; settings are the same, and so are the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from seatrial.checks.base import Check, Context
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._results import TOKENS_PER_GPU, Stage
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import CLUSTER, Fact, Metric, Observation, Phase, Rule, Scope
from seatrial.train.train_config import TrainConfig

NAME = "lora-mistral-7b-ddp"
STACKS = ("native", "hf")
GPU_OVERRIDES = ("max_steps=24", "untimed_steps=8")  # few, that are much alike
SAMPLES = 1024  # at least, and two batches a rank: made in seconds, and speed does not depend on them
BASELINE = "the median of the same GPUs, each training alone, all at the same time"
METRICS = {
    **_results.metric_units(*STACKS, *(f"{stack}_single_gpu" for stack in STACKS)),
    "efficiency.native": "%",
    "efficiency.hf": "%",
    "native_vs_hf": "x",
    "adapter_mismatches": "count",
    "exports_loaded": "count",
    "exports_missing": "count",
}


def measure(context: Context, options: WorkloadOptions) -> Iterator[Observation]:
    from seatrial.bench import rank
    from seatrial.train import train_config

    facts, subjects = _results.device_facts(context), rank.gather(context.subject)
    samples = f"data.samples={max(SAMPLES, 16 * context.world_size)}"
    config, own = _workload.config_and_overrides(context, options, NAME, *GPU_OVERRIDES, samples)
    overrides = (*own, *options.overrides)
    if context.rank == 0:
        yield from facts
        yield Fact(name="how", value=_how(config, overrides))
        yield _results.settings_fact(options)
    stages = []
    for stack in STACKS:
        wanted = (*overrides, f"stack={stack}")
        if context.world_size > 1:  # else alone and together are one
            stages.append(Stage(f"{stack}_single_gpu", wanted, [[one] for one in range(context.world_size)], subjects))
        stages.append(Stage(stack, wanted))
    runs = yield from _results.run_stages(context, config, stages, options.limit_s)
    if context.rank == 0:
        yield from _compare_stacks(runs)
        yield from _adapter_counts(runs, train_config.load(config, overrides))


def _compare_stacks(runs: Mapping[str, Sequence[TrainingResult]]) -> Iterator[Observation]:
    """One stack with the other, and each with its own GPUs alone."""
    for stack in STACKS:
        yield from _results.efficiency(stack, runs[stack], runs.get(f"{stack}_single_gpu", ()))
    yield Fact(name="efficiency_baseline", value=BASELINE)
    native, hf = (runs[stack][0].value(TOKENS_PER_GPU) for stack in STACKS)
    if native and hf:
        yield Metric(name="native_vs_hf", value=native / hf, unit="x", subject=CLUSTER)


def _adapter_counts(runs: Mapping[str, Sequence[TrainingResult]], wanted: TrainConfig) -> Iterator[Observation]:
    """Whether adapters are all that trained, and whether they were loaded again from what was exported."""
    due = wanted.architecture().adapter_parameters(wanted.lora_targets, wanted.lora_r)
    every = {
        name if len(found) == 1 else f"{name} of rank {one.ranks[0]}": one
        for name, found in runs.items()
        for one in found
    }
    counts = {name: one.value("trained_parameters") for name, one in every.items() if one.metrics}
    loaded = [name for name, one in every.items() if one.export_loads]
    missing = len(counts) - len(loaded) if wanted.export else 0
    yield Fact(name="trained_parameters", value={"expected": due, **counts})
    wrong = sum(count != due for count in counts.values())
    for name, value in (("adapter_mismatches", wrong), ("exports_loaded", len(loaded)), ("exports_missing", missing)):
        yield Metric(name=name, value=value, unit="count", subject=CLUSTER)


def _how(config: str, overrides: Sequence[str]) -> str:
    return (
        f"{config} ({', '.join(overrides) or 'as it is'}), once by each stack on every GPU alone, all at the same "
        "time, and once on all together; speed is of the steps after untimed_steps; of the native stack's start, that "
        "compiles, time_to_first_step tells"
    )


CHECK = Check(
    name="train.lora",
    title="LoRA on a 7B: two stacks, each GPU alone and all together (Mistral-7B, DDP)",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    metrics=METRICS,
    rules=(
        *_results.RULES,
        Rule(
            metric="adapter_mismatches",
            expect="== 0",
            applies_if={"trained": "yes"},
            evidence_facts=("trained_parameters",),
            meaning="LoRA trains the adapters and nothing else: their number follows from the config",
            fix="The fact trained_parameters has the counts. Report it with the versions of torch and peft",
        ),
        Rule(
            metric="exports_missing",
            expect="== 0",
            applies_if={"trained": "yes"},
            meaning="adapters that cannot be loaded again are lost with the job",
            fix="Look at final/ of the training and at filesystem.shared; a full disk or a quota is the usual cause",
        ),
        Rule(
            metric=f"{TOKENS_PER_GPU}.native",
            reference="train.lora.native",
            applies_if={"device": "cuda", "trained": "yes", "settings": "shipped"},
            meaning="LoRA exchanges next to nothing: where it is slow, GPUs, power or cooling are",
            fix="Compare the figures alone, GPU by GPU: one that is slower holds up all (nvidia-smi -q -d "
            "CLOCK,POWER,PERFORMANCE). All are slow: gemm_share says whether it is the GPUs or the software",
        ),
    ),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, NAME, *STACKS),
    limit_s=1200.0,
    options=WorkloadOptions,
    performance_metrics=(*_results.PERFORMANCE, "efficiency.*", "native_vs_hf"),
)
