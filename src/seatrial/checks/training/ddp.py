"""Trains a small decoder with DDP on all ranks: equality with one process and between ranks, speed, efficiency.

The data comes from a Markov chain with a known entropy, which bounds the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answers, Value, absent, fact, metric, unreadable, value, warning
from seatrial.checks.training import _ranks, _results, _workload
from seatrial.model import Phase, Scope
from seatrial.util.quantiles import median_interval

if TYPE_CHECKING:
    from seatrial.train.ddp import DdpComparison, Speed
    from seatrial.train.invariants import RankInfo

# Allowed percentage points above 100: tensors have other addresses with DDP than without, which affects the speed.
MAX_ABOVE_LIMIT = 2
# Allowed half-width of the 95 % interval, percentage points. The expected efficiency of 90 % is 10 points below the
# ideal: more noise hides that difference. No rule on CPUs, where ranks share cores: without any fault the half-width
# was 2 to 400 points.
MAX_NOISE = 10
REDUCE_NOISE = (
    "Check for other load on these nodes (top; nvidia-smi) and run the check again with more steps: --set "
    "checks.train.ddp.options.steps=300"
)
# Option of the check → key of the training config
CONFIG_KEYS = {
    "steps": "max_steps",
    "batch": "bsz",
    "seq_len": "seq_len",
    "dim": "model.width",
    "layers": "model.layers",
}


class DdpOptions(Options):
    """Options of train.ddp. Options that are None take the value of the config ddp, or tiny/ddp on a CPU."""

    parity_steps: int = Field(default=20, ge=2, description="steps that are compared with a single process")
    steps: int | None = Field(default=None, ge=1, description="timed steps")
    min_seconds: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="repeat the timed steps for at least this time"
    )
    batch: int | None = Field(default=None, ge=1, description="sequences per process and step")
    seq_len: int | None = Field(default=None, ge=2, description="tokens per sequence")
    dim: int | None = Field(default=None, ge=64, multiple_of=64, description="hidden size")
    layers: int | None = Field(default=None, ge=1, description="number of layers")


def measure(context: Context, options: DdpOptions) -> Answers:
    """Compare DDP with one process and measure the speed; each rank yields its step times, rank 0 all other answers."""
    from seatrial.train import ddp, invariants, parallel, train_config

    facts, world = _results.device_facts(context), parallel.current_world(context.device)
    rank_info = invariants.read_rank_info(world.rank, world.size, context.local_rank, context.node, context.device)
    processes, subjects = world.gather(rank_info), world.gather(context.subject)
    if world.is_rank_0:
        yield from facts
        yield from _process_answers(processes)

    comparison = ddp.compare_with_single_process(world, options.parity_steps, context.progress)
    if world.is_rank_0:
        yield from _parity_answers(comparison)

    option_values = {name: getattr(options, name) for name in CONFIG_KEYS}
    overrides = [f"{CONFIG_KEYS[name]}={value}" for name, value in option_values.items() if value is not None]
    settings = train_config.load(_workload.config_for_device(context, "ddp"), overrides)
    speed = ddp.measure_speed(world, settings, options.min_seconds, context.progress)
    yield from _step_times(context, speed)
    context.progress("comparing parameters")
    digests = world.gather(invariants.parameter_digest([comparison.model, speed.model]))
    if world.is_rank_0:
        yield from _speed_answers(speed)
        times = dict(zip(subjects, speed.rank_times, strict=True))
        yield from _ranks.slowdown(times)
        yield from _ranks.data_wait(times)
        yield fact("method", _method(comparison, speed))
        yield from _digest_answers(digests, subjects)
        steps = [*comparison.ddp_steps, *(comparison.single_process_steps or ())]
        yield value("nonfinite_losses", sum(not step.finite for step in steps) + speed.nonfinite_steps)


def _process_answers(processes: Sequence[RankInfo]) -> Answers:
    """The processes, the number of ranks with a wrong environment, and of GPUs that several ranks use."""
    from seatrial.train import invariants

    yield fact("processes", [asdict(process) for process in processes])
    errors = {f"rank {rank}": reason for rank, reason in invariants.rank_errors(processes).items()}
    yield value("rank_mismatches", len(errors), evidence=errors)
    if processes[0].gpu_name:
        gpus: dict[str, JsonValue] = {uuid: list(ranks) for uuid, ranks in invariants.shared_gpus(processes).items()}
        yield value("shared_gpus", len(gpus), evidence=gpus)
    else:
        yield absent("shared_gpus", "the ranks use no GPU")


def _parity_answers(comparison: DdpComparison) -> Answers:
    """Sampler counts, losses and the difference from a single process."""
    from seatrial.train.markov import ENTROPY

    yield fact("sampler_samples", comparison.samples)
    yield fact("sampler_dropped_samples", comparison.sample_counts.dropped)
    yield value("sampler_missing", comparison.sample_counts.missing)
    yield value("sampler_unexpected_duplicates", comparison.sample_counts.duplicates)
    yield value("sampler_order_errors", comparison.order_errors)

    parameters = sum(parameter.numel() for parameter in comparison.model.parameters())
    yield fact("parity_model", {"parameters": parameters, "steps": len(comparison.ddp_steps)})
    for name, steps in (("ddp", comparison.ddp_steps), ("single_process", comparison.single_process_steps or [])):
        yield from _results.loss_curve(((n, step.loss) for n, step in enumerate(steps, 1)), name=f"loss.{name}")
    losses = [step.loss for step in comparison.ddp_steps if math.isfinite(step.loss)]
    if losses:
        yield value("loss_first", losses[0])
        yield value("loss_last", losses[-1])
        yield value("loss_drop", losses[0] - losses[-1])
        yield value("loss_above_entropy_bound", losses[-1] - ENTROPY)
    else:
        yield unreadable(("loss_drop", "loss_above_entropy_bound"), "no step has a finite loss")

    if comparison.max_relative_difference is None:
        yield unreadable("parity_max_relative_difference", "no step has a finite loss in both runs")
    else:
        yield value("parity_max_relative_difference", comparison.max_relative_difference)


def _step_times(context: Context, speed: Speed) -> Iterator[Value]:
    """Step times of this rank in seconds: the median over the windows, with the mean of each window as sample.

    With DDP all ranks wait for the slowest rank; the time without communication identifies that rank.
    """
    ddp_windows, independent_windows = speed.ddp_windows[context.rank], speed.independent_windows[context.rank]
    yield value("step_time", [fmean(window) for window in ddp_windows], context.subject)
    yield value("step_time_max", max(map(max, ddp_windows)), context.subject)
    independent_means = [fmean(window) for window in independent_windows]
    yield value("step_time_without_communication", independent_means, context.subject)


def _speed_answers(speed: Speed) -> Answers:
    """Yield tokens/s, the scaling efficiency, and a description of the timed training."""
    total, rank_count = speed.tokens_per_second(), len(speed.ddp_windows)
    yield value("tokens_per_second", total)
    yield value("tokens_per_second_per_gpu", [tokens / rank_count for tokens in total])
    yield from _scaling_answers(speed.scaling_efficiency())
    settings = speed.settings
    architecture = settings.architecture()
    training = {
        "seq_len": settings.seq_len,
        "dim": architecture.hidden_size,
        "layers": architecture.num_hidden_layers,
        "batch": settings.bsz,
        "steps": settings.max_steps,
        "parameters": architecture.parameters,
        "flops_per_token": architecture.flops_per_token(settings.seq_len),
        "precision": _precision(speed),
    }
    yield fact("training", training)


def _precision(speed: Speed) -> str:
    return "bf16 compute, fp32 weights" if speed.settings.bf16 else "fp32"


def _scaling_answers(efficiencies: Sequence[float]) -> Answers:
    """Scaling efficiency and its uncertainty. ``efficiencies``: percent, one for each pair of windows.

    The efficiency is not reported if the half-width of its 95 % interval exceeds MAX_NOISE, or if the lower end of this
    interval exceeds 100 % by more than MAX_ABOVE_LIMIT.
    """
    confidence_interval = median_interval(efficiencies)  # None with too few samples
    low, high = confidence_interval or (min(efficiencies), max(efficiencies))
    above_limit, noise = max(0.0, low - 100), (high - low) / 2
    interval = f"{'95 % interval' if confidence_interval else 'range'} {low:.1f} to {high:.1f} %"
    evidence = {
        "scaling_interval": f"median {median(efficiencies):.1f} %, {interval}",
        "pairs_of_windows": [round(percent, 1) for percent in efficiencies],
    }
    yield value("scaling_above_limit", above_limit, evidence=evidence)
    yield value("scaling_noise", noise, evidence=evidence)
    if above_limit <= MAX_ABOVE_LIMIT and noise <= MAX_NOISE:
        yield value("scaling_efficiency", efficiencies)
    else:
        reason = "too noisy" if noise > MAX_NOISE else "faster than without communication"
        yield unreadable("scaling_efficiency", f"{reason}: {interval}")


def _method(comparison: DdpComparison, speed: Speed) -> str:
    from seatrial.train.ddp import UNTIMED_STEPS
    from seatrial.train.markov import ENTROPY

    settings, windows = speed.settings, speed.ddp_windows[0]
    return (
        f"Data from a Markov chain with entropy {ENTROPY:.4f} nats/token, the lower bound of the loss; no files. "
        f"Parity: {len(comparison.ddp_steps)} steps in fp32 without TF32; one process computes the batches of all "
        f"ranks in sequence, only the order of additions differs. Speed: median of {len(windows)} windows, "
        f"{sum(map(len, windows))} steps in total, {settings.bsz} × {settings.seq_len} tokens per process, after "
        f"{UNTIMED_STEPS} untimed steps, {_precision(speed)}. Scaling efficiency: median over pairs of windows, "
        "relative to the same processes training concurrently without communication: power, cooling and CPU are shared "
        "in both cases. It is not a comparison with one process on an idle machine"
    )


def _digest_answers(digests: Sequence[str], subjects: Sequence[str]) -> Answers:
    """Yield the number of ranks whose parameters differ from the majority, and their digests."""
    from seatrial.train.invariants import mismatched_ranks

    mismatched = mismatched_ranks(digests)
    differ = "differ from the majority" if len(mismatched) < len(digests) else "differ, without a majority"
    ranks = [{"rank": rank, "subject": subjects[rank], "digest": digests[rank]} for rank in mismatched]
    yield value("parameter_digests_differing", len(mismatched), evidence={differ: ranks})
    yield fact("parameter_digest", "different between ranks" if mismatched else digests[0])


_SAME_PERMUTATION = (
    "Compare torch's version on all nodes (host.inventory): all ranks must compute the same permutation."
)
CHECK = Check(
    measure=measure,
    name="train.ddp",
    title="DDP training of a transformer: equality with one process, speed, scaling efficiency",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    limit_s=900.0,  # many processes on few CPU cores are slow
    options=DdpOptions,
    declared=(
        metric(
            "rank_mismatches",
            "== 0 count",
            "Each rank must exist exactly once with the correct RANK, LOCAL_RANK and WORLD_SIZE: otherwise data is "
            "trained twice or not at all.",
            "The evidence names the rank. Check the launch command: one torchrun per node with its own --node-rank "
            "and the same --nnodes and rendezvous everywhere. Nothing else may set RANK.",
        ),
        metric(
            "shared_gpus",
            "== 0 count",
            "Two processes on one GPU share its memory and speed while another GPU is idle.",
            "The evidence names the GPU and its ranks. Check CUDA_VISIBLE_DEVICES and the scheduler's GPU binding "
            "(Slurm: --gpu-bind=none if processes select the GPU by LOCAL_RANK).",
        ),
        metric(
            "sampler_missing",
            "== 0 count",
            "The model never trains on a sample that no rank reads.",
            _SAME_PERMUTATION,
        ),
        metric(
            "sampler_unexpected_duplicates",
            "== 0 count",
            "Each sample may occur only once per epoch.",
            _SAME_PERMUTATION,
        ),
        metric(
            "sampler_order_errors",
            "== 0 count",
            "The same seed must give the same order, and a new epoch a different order.",
            "Compare torch's version on all nodes (host.inventory).",
        ),
        metric(
            "nonfinite_losses",
            "== 0 count",
            "Seed and learning rate are fixed and stable: an infinite or NaN loss means wrong arithmetic or memory "
            "errors.",
            "Check train.cnn, which tests each GPU independently, and `nvidia-smi -q -d ECC,ROW_REMAPPER`.",
        ),
        metric("loss_first", unit="nats", meaning="loss of the first step"),
        metric("loss_last", unit="nats", meaning="loss of the last step"),
        metric(
            "loss_drop",
            "> 0 nats",
            "The data is learnable: a loss that does not fall means that gradients do not reach the weights.",
            "Compare the curves loss.ddp and loss.single_process. Only loss.ddp is flat: check the all-reduce of "
            "gradients with collectives.all_reduce. Both are flat: check train.cnn.",
        ),
        metric(
            "loss_above_entropy_bound",
            "> -0.2 nats",  # standard deviation of the mean over a batch of 1024 tokens: 0.03
            "No model can have a loss below the entropy of its data: a lower loss means that the model sees the "
            "tokens it predicts.",
            "torch's attention does not apply the causal mask here. Report this defect of torch with its version.",
            signed=True,
        ),
        metric(
            "parity_max_relative_difference",
            # Rounding: up to 7.3e-7 (2, 3 and 6 CPU processes, 20 and 60 steps). Missing all-reduce of gradients: 0.2
            # in the first step (gradient norm). Sum instead of mean: 1.
            "< 1e-5 ratio",
            "All ranks must compute the same as one process on the same batches; a difference above rounding means "
            "that gradients are lost or averaged wrongly.",
            "Check collectives.all_reduce: wrong_elements names the rank with damaged data. If that check passes, "
            "compare torch and NCCL versions on all nodes and unset all NCCL_* variables.",
        ),
        metric("tokens_per_second", unit="tokens/s", meaning="tokens per second of all ranks", speed=True),
        _results.speed_of_work(
            "tokens_per_second_per_gpu", 0.46, 0.485, "batch", "seq_len", "dim", "layers", one_node=True
        ),
        metric(
            "scaling_efficiency",
            unit="%",
            meaning="steps/s with DDP ÷ steps/s of the same ranks without communication",
            speed=True,
            may_exceed_100=True,
        ),
        metric("step_time", unit="s", meaning="median duration of a step on this rank", per="rank", speed=True),
        metric("step_time_max", unit="s", meaning="longest step on this rank", per="rank", speed=True),
        metric(
            "step_time_without_communication",
            unit="s",
            meaning="median duration of a step without communication on this rank",
            per="rank",
            speed=True,
        ),
        *_ranks.DECLARED,
        warning(
            "scaling_above_limit",
            f"<= {MAX_ABOVE_LIMIT} %",
            "The 95 % interval of the scaling efficiency is above 100 % by this value, so none is reported: DDP "
            "training cannot be faster than the same training without communication. Other load on the nodes slowed "
            "down the windows without DDP.",
            REDUCE_NOISE,
            may_exceed_100=True,
        ),
        warning(
            "scaling_noise",
            f"<= {MAX_NOISE} %",
            "Scaling efficiency is too noisy and is not reported: this is half the width of its 95 % interval.",
            REDUCE_NOISE,
            when="device == cuda",
            may_exceed_100=True,
        ),
        metric(
            "parameter_digests_differing",
            "== 0 count",
            "All ranks apply the same gradients to the same weights: one different bit is silent corruption.",
            "Do not train on the node of the ranks that the evidence names; check `nvidia-smi -q -d ECC,ROW_REMAPPER` "
            "and `dmesg | grep -i xid` there. Run the trial on the other nodes, and separately on this node.",
            cause=Cause(
                id="parameters_diverged",
                title="the parameters of the ranks differ",
                place="cluster",
                explains=("train.*",),
                wrong_results=True,
                consequence_of=("data_corrupted", "uncorrectable_memory_errors", "memory_not_repairable", "xid"),
                first_command="dmesg -T | grep -iE 'xid|mce|hardware error|aer' | tail; nvidia-smi -q -d "
                "ECC,ROW_REMAPPER",
                action="call-vendor",
            ),
        ),
    ),
)
