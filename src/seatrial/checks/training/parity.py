"""Compares a training on one process with the same training under DDP and FSDP2.

The runs with DDP and with FSDP2 are repeated once, to compare their bits. FSDP2 also runs with two other ways of
wrapping the model, and with CPU offload. For each of these runs the check reports the memory that a rank holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue

from seatrial.checks.check import Check, Context, Needs, Seconds
from seatrial.checks.declare import Answers, fact, metric, value
from seatrial.checks.training import _results, _workload
from seatrial.model import Phase, Scope

if TYPE_CHECKING:
    from seatrial.train.compare import StepRecord
    from seatrial.train.train_config import TrainConfig

STRATEGIES = ("ddp", "fsdp2")
VARIANTS = ("fsdp2_by_size", "fsdp2_unwrapped", "fsdp2_cpu_offload")  # runs with other settings of FSDP2
# Percent above the share of a rank. If the rows of a tensor cannot be divided equally, some ranks hold more than their
# share: at most 2.7 % in total with 8 ranks and the tiny config. A tensor that is not sharded adds at least its own
# size.
MAX_STATE_EXCESS = 10
METHOD = (
    "All runs train the same global batches of sequences of variable length; in fp32 without TF32 only the order of "
    "additions differs. One process computes the micro-batches of all ranks in sequence. Initial weights are not read "
    "from a file: each tensor has its own seeded generator, independent of sharding. (train.checkpoint reads one "
    "checkpoint on fewer ranks, with FSDP2 and with DDP.)"
)


class ParityOptions(_workload.WorkloadOptions):
    """Options of train.parity."""

    config: str = Field(default="parity", description="another config: name of a shipped config, or a .yaml file")
    limit_s: Seconds = Field(default=600.0, description="time limit in seconds of each of two starts")


def measure(context: Context, options: ParityOptions) -> Answers:
    """Run all trainings; rank 0 yields how each differs from the training in one process, and the memory of a rank."""
    from seatrial.train import compare, train_config, variants

    facts = _results.device_facts(context)
    config = train_config.load(_workload.config_for_device(context, options.config), options.overrides)
    folder = variants.create_folder(context.artifacts_dir)
    configs = training_configs(config, context.world_size, folder / "data")
    trainings = {name: variants.Variant(settings=run, out=folder / name) for name, run in configs.items()}
    start = partial(
        variants.start_variants, device=context.device, local_rank=context.local_rank, limit_s=options.limit_s
    )
    single_process = [trainings.pop("single_process")]
    # Both start at once: the second imports torch while the first trains. This check measures no speed.
    with (
        start(single_process, file_prefix=folder / "start1", groups=[[0]]) as first,
        start(list(trainings.values()), file_prefix=folder / "start2") as second,
    ):
        context.progress("one process")
        first()
        context.progress(f"{context.world_size} processes: DDP and FSDP2, each twice, and variants of FSDP2")
        second()
    if context.rank == 0:
        yield from facts
        yield fact("method", METHOD)
        yield fact("training", _results.training_fact(config, context.world_size))
        yield from compare_runs({name: compare.read_steps(folder / name, 0, config.max_steps) for name in configs})
        reports = {name: json.loads((folder / name / "metrics.json").read_text()) for name in (*STRATEGIES, *VARIANTS)}
        yield from memory_use(reports)


def training_configs(config: TrainConfig, ranks: int, cache: Path) -> dict[str, TrainConfig]:
    """Run → its config: ``single_process`` for one process, the others for ``ranks`` ranks.

    All runs read the same sequences in the same order. The data has one epoch, since the step at which an epoch ends
    depends on the number of ranks.
    """
    samples = config.max_steps * config.bsz * config.grad_accum * ranks
    data = config.data.model_copy(update={"samples": samples, "cache": str(cache)})
    configs = {"single_process": config.model_copy(update={"data": data, "grad_accum": config.grad_accum * ranks})}
    for strategy in STRATEGIES:
        parallel = config.parallel.model_copy(update={"strategy": strategy})
        strategy_config = config.model_copy(update={"data": data, "parallel": parallel})
        configs[strategy] = configs[f"{strategy}-repeated"] = strategy_config
    for variant, changes in _variant_settings(config).items():
        parallel = config.parallel.model_copy(update={"strategy": "fsdp2", **changes})
        configs[variant] = config.model_copy(update={"data": data, "parallel": parallel})
    return configs


def _variant_settings(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Variant → its settings in ``parallel``. fsdp2_by_size wraps each attention, MLP and head of the model."""
    attention_parameters = 2 * config.architecture().hidden_size ** 2  # lower bound: q_proj and o_proj only
    by_size = {"wrap": "size", "wrap_min_parameters": attention_parameters}
    return dict(zip(VARIANTS, (by_size, {"wrap": "none"}, {"cpu_offload": True}), strict=True))


def compare_runs(runs: Mapping[str, Sequence[StepRecord]]) -> Answers:
    """Metrics, curves and facts from the steps of all runs of ``training_configs``."""
    from seatrial.train import compare

    single = runs["single_process"]
    yield value("loss_drop", single[0]["loss"] - single[-1]["loss"])
    for name in ("single_process", *STRATEGIES, *VARIANTS):
        points = ((record["step"], record["loss"]) for record in runs[name])
        yield from _results.loss_curve(points, name=f"loss.{name}")
    for strategy in (*STRATEGIES, *VARIANTS):
        run = runs[strategy]
        different_tokens = compare.differing_steps(run, single, "trained_tokens")
        evidence = f"different in steps {different_tokens}"
        yield value(f"steps_with_different_tokens.{strategy}", len(different_tokens), evidence=evidence)
        for quantity in ("loss", "grad_norm"):
            difference = compare.max_relative_difference(run, single, quantity)
            evidence = f"step {difference.step}: {difference.value:.2e}"
            yield value(f"{quantity}_difference.{strategy}", difference.value, evidence=evidence)
        if strategy in STRATEGIES:
            differing = compare.differing_steps(runs[f"{strategy}-repeated"], run)
            evidence = f"different in steps {differing}"
            yield value(f"repeated_steps_differing.{strategy}", len(differing), evidence=evidence)


def memory_use(reports: Mapping[str, Mapping[str, Any]]) -> Answers:
    """Weights, gradients and Adam state on the fullest rank of each run, and its excess over a rank's share.

    ``reports``: run → its metrics.json. With FSDP2 the share of a rank is the state of a rank with DDP divided by the
    number of ranks. The fact ``memory_by_run`` has the state of rank 0, and ``memory_peak_gib``: the highest peak of
    CUDA's allocator on any rank, null on CPUs.
    """
    state = ("parameters_gib", "gradients_gib", "optimizer_gib")
    columns = (*state, "state_device", "fsdp_groups", "fsdp_largest_group_gib", "memory_peak_gib")
    table: dict[str, JsonValue] = {}
    state_gib: dict[str, float] = {}  # run → state of its fullest rank
    for name, report in reports.items():
        values = report["ranks"][0] | {column: report[column] for column in columns if column in report}
        table[name] = {column: values[column] for column in columns}
        state_gib[name] = max(sum(rank[column] for column in state) for rank in report["ranks"])
    yield fact("memory_by_run", table)
    for name, gib in state_gib.items():
        yield value(f"state_per_rank.{name}", gib * 2**30)
        if name != "ddp":
            share_gib = state_gib["ddp"] / reports[name]["world_size"]
            yield value(f"state_excess.{name}", 100 * (gib / share_gib - 1), evidence=table[name])


def _declared(run: str) -> Iterator[metric]:
    """The metrics of one run."""
    yield metric(
        f"steps_with_different_tokens.{run}",
        "== 0 count",
        "The ranks trained on more or fewer tokens than the single process: data is read twice or lost.",
        "Check train.ddp (sampler_*) and filesystem.shared: all nodes must read the same prepared data",
    )
    yield metric(
        f"loss_difference.{run}",
        # Rounding: at most 1.1e-7 (2 and 4 CPU processes, 8 steps of the tiny config; 0 on 2 H200). Missing
        # all-reduce of gradients: 3.2e-3 one step later. The limit is near their geometric mean.
        "< 1e-5 ratio",
        "The loss differs from that of one process: gradients are lost or weighted wrongly.",
        "Check collectives.all_reduce, all_gather and reduce_scatter: wrong_elements names the rank with damaged data. "
        "If only fsdp2 fails, check all_gather and reduce_scatter, which DDP does not use",
    )
    yield metric(
        f"grad_norm_difference.{run}",
        "< 1e-4 ratio",  # Rounding: 1.8e-7. Missing all-reduce of gradients: 0.2 in the first step.
        "The gradient norm differs from that of one process: a sum is used as a mean, or shards are missing.",
        "See loss_difference. Unset all NCCL_* variables and compare NCCL versions (host.inventory)",
    )
    if run != "ddp":
        yield metric(
            f"state_excess.{run}",
            f"<= {MAX_STATE_EXCESS} %",
            "A rank holds more weights, gradients and Adam state than its share: a tensor is not sharded.",
            "Report this defect of seatrial with torch's version and the fact memory_by_run",
            signed=True,
            may_exceed_100=True,
        )
    if run in STRATEGIES:
        yield metric(
            f"repeated_steps_differing.{run}",
            "== 0 count",
            "The same training on the same ranks with deterministic kernels gave different bits: intermittent errors "
            "of a GPU, its memory or a link.",
            "Run the check again. Then run device.digests and device.burn on these nodes, which name the GPU, and "
            "nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg | grep -i xid",
        )


CHECK = Check(
    measure=measure,
    name="train.parity",
    title="Equality of training on one process, with DDP and with FSDP2",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    needs=Needs(min_ranks=2),
    limit_s=1500.0,  # many processes on few CPU cores are slow
    options=ParityOptions,
    child_tasks=("variants",) * 2,
    declared=(
        metric(
            "loss_drop",
            "> 0 nats",
            "The loss does not fall: equal losses then prove nothing.",
            "Check train.cnn, which trains on each GPU independently, and the overrides of this check",
        ),
        *(each for run in (*STRATEGIES, *VARIANTS) for each in _declared(run)),
        metric(
            "state_per_rank.*",
            unit="B",
            meaning="weights, gradients and Adam state on the fullest rank, counted from its tensors",
        ),
    ),
)
