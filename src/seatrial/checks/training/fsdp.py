"""Full fine-tune of Mistral-7B over all ranks (FSDP2): is every weight spread, and memory what it should be?

The native stack measures; Hugging Face's Trainer with FSDP2 is trained beside it, as a cross-check of what users run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import Field, JsonValue

from seatrial.checks.base import Check, Context
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._results import Stage
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import CLUSTER, Fact, Metric, Observation, Phase, Rule, Scope

NAME = "fsdp-mistral-7b"
# The checkpoint would be 87 GB, and its speed is train.checkpoint's
OVERRIDES = ("checkpoint.every=0", "export=false")
GPU_OVERRIDES = {
    "native": ("max_steps=14", "untimed_steps=5"),
    # without compilation and chunked loss a batch takes about twice the memory
    "hf": ("max_steps=8", "untimed_steps=3", "bsz=8"),
}
NEAR = 2.0  # nats above the floor: 4 and 8 H200-sized batches were at 0.6 after 14 steps, from 9.9 at first


class FsdpOptions(WorkloadOptions):
    """``cpu_offload``: weights and Adam's state on the hosts. ``hf``: whether the cross-check is made."""

    cpu_offload: bool = False
    hf: bool = True
    layers: int | None = Field(default=None, gt=0, description="of the model; by default all, or as many as fit")


def measure(context: Context, options: FsdpOptions) -> Iterator[Observation]:
    from seatrial.train import memory, train_config

    facts = _results.device_facts(context)
    stacks = ("native", "hf") if options.hf else ("native",)
    chosen = {
        stack: _workload.config_and_overrides(context, options, NAME, *GPU_OVERRIDES[stack])
        for stack in ("native", "hf")
    }
    config = chosen["native"][0]
    layers = options.layers or memory.max_layers(train_config.load(config), context.world_size, context.device)
    common = [*OVERRIDES, *([f"model.layers={layers}"] if layers else [])]
    common += ["parallel.cpu_offload=true"] if options.cpu_offload else []
    own = {stack: overrides for stack, (_, overrides) in chosen.items()}
    if context.rank == 0:
        yield from facts
        yield Fact(name="layers", value=layers or "all")
        yield Fact(name="offload", value="yes" if options.cpu_offload else "no")
        yield _results.settings_fact(options)
        yield Fact(name="how", value=_how(config, layers, own))
    stages = [Stage(stack, (*common, *own[stack], *options.overrides, f"stack={stack}")) for stack in stacks]
    runs = yield from _results.run_stages(context, config, stages, options.limit_s)
    if context.rank == 0:
        yield from _sharding({name: one for name, (one,) in runs.items()})


def _sharding(runs: Mapping[str, TrainingResult]) -> Iterator[Observation]:
    """Parameters of both stacks; memory of the native one, which also looks at every share before the first step."""
    found = {name: one.value("parameter_tensors") for name, one in runs.items() if one.metrics}
    sharded = {name: runs[name].value("sharded_tensors") for name in found}
    if found:
        whole = sum(found.values()) - sum(sharded.values())
        yield Metric(name="unsharded_tensors", value=whole, unit="count", subject=CLUSTER)
        yield Fact(name="tensors", value={"all": found, "sharded": sharded})
    native = runs["native"]
    yield Fact(name="data", value="rows" if native.value("loss_entropy_bound") is None else "generated")
    held = native.value("params_and_optimizer_gib")
    if held is not None:
        yield Metric(name="params_and_optimizer", value=held, unit="GiB", subject=CLUSTER)
    yield from _results.memory_excess([native])


def _foretold(options: FsdpOptions) -> dict[str, JsonValue]:
    """How many layers fit is known only on the GPUs, and that it will be one at least."""
    own = [f"model.layers={options.layers or 1}"]
    return _results.facts_from_options(options, NAME, "native", "hf", check_overrides=own)


def _how(config: str, layers: int | None, own: Mapping[str, tuple[str, ...]]) -> str:
    cut = f" with {layers} of its layers, which is what fits" if layers else ""
    return (
        f"{config}{cut} on all ranks, once by the native stack ({', '.join(own['native']) or 'as it is'}) and once by "
        f"Hugging Face's ({', '.join(own['hf']) or 'as it is'}): speeds are of different batches; params_and_optimizer is "
        "weights and Adam on the fullest GPU, expected by arithmetic"
    )


CHECK = Check(
    name="train.fsdp",
    title="A 7B fine-tuned by all ranks, each with its share of every weight (Mistral-7B, FSDP2)",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    metrics={
        **_results.metric_units("native", "hf"),
        "unsharded_tensors": "count",
        "params_and_optimizer": "GiB",
        "memory_excess": "%",
    },
    rules=(
        *_results.RULES,
        Rule(
            metric="unsharded_tensors",
            expect="== 0",
            applies_if={"trained": "yes"},
            evidence_facts=("tensors",),
            meaning="a parameter that is not spread costs every GPU its whole memory, and is not averaged over the ranks",
            fix="Report it with torch's version: every block, the head and the embedding are wrapped by fully_shard",
        ),
        _results.memory_rule(offload="no"),
        Rule(
            metric="loss_above_entropy_bound.native",
            may_be_negative=True,
            expect=f"< {NEAR:g} nats",
            applies_if={"device": "cuda", "trained": "yes", "data": "generated"},
            meaning="data of known entropy is learned in a few steps by a whole 7B: gradients are lost or averaged wrongly",
            fix="Look at train.ddp (parity with one process) and at wrong_elements of collectives.all_reduce",
        ),
        Rule(
            metric="tokens_per_second_per_gpu.native",
            reference="train.fsdp.native",
            applies_if={"device": "cuda", "trained": "yes", "settings": "shipped", "layers": "all", "offload": "no"},
            meaning="every weight goes over NVLink and network three times a step: a slow link or GPU holds up all",
            fix="gemm_share low: look at collectives.all_gather and reduce_scatter at 64 MiB to 1 GiB. High: at "
            "device.gemm and device.burn; run.native's slowest_rank names a host",
        ),
    ),
    measure=measure,
    facts_from_options=_foretold,
    limit_s=900.0,
    options=FsdpOptions,
    performance_metrics=_results.PERFORMANCE,
)
