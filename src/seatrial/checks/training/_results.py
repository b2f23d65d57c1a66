"""Metrics, curves, facts and files of a training run, and the rules that all checks with training runs share."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from seatrial.checks.check import Context, ratios
from seatrial.checks.declare import Answer, Answers, Value, fact, metric, rule, unreadable, value
from seatrial.checks.training import _workload
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import CLUSTER, FAILED_RANK, Artifact, Fact, SeatrialError, Series

if TYPE_CHECKING:
    from seatrial.train.train_config import TrainConfig

TOKENS_PER_GPU = "tokens_per_second_per_gpu"
CPU_ONLY = "CPU ONLY: tiny config on shared CPU cores; not a GPU result"
_LOSS_WINDOW = 3  # steps averaged at each end, at most: the noise of one batch exceeds the progress of one step
# Percent above the calculated size: torch's allocator rounds up; 2 and 4 H200 had 0.2 to 0.6 %
MAX_MEMORY_EXCESS = 10.0
_ARTIFACTS = ("config.json", "metrics.json", "steps.jsonl")

_RECORDED = (  # metrics of each training without a rule: name, unit, meaning, key of metrics.json
    ("mfu", "%", "model FLOPs utilization, relative to the dense peak of the GPU", "mfu_percent"),
    ("gemm_share", "%", "speed relative to the measured matrix multiplication rate of the GPU", "gemm_percent"),
    ("wall_seconds", "s", "duration from the start of the processes to their end", ""),
    ("loss_first", "nats", "loss of the first step", ""),
    ("loss_last", "nats", "loss of the last step", ""),
    ("loss_above_entropy_bound", "nats", "loss of the last steps minus the entropy of the generated data", ""),
    ("data_wait", "%", "share of a step that waits for data", "data_wait_percent"),
    ("exposed_communication", "%", "share of a step in which only communication runs", "exposed_communication_percent"),
    ("memory_peak", "B", "highest memory in use by the allocator", "memory_peak_gib"),
    ("time_to_first_step", "s", "time from start to the end of the first step", ""),
)
TRAINED, ON_GPU = "trained == yes", "device == cuda and trained == yes"  # conditions of rules
_SPEEDS = ("mfu", "gemm_share", "wall_seconds")
# Metrics proportional to the speed; their samples are computed from those of the speed
_PROPORTIONAL = (TOKENS_PER_GPU, "mfu", "gemm_share")
# Maximum number of samples: enough for a 95 % interval. In a long training each sample covers several steps, so that
# occasional stalls spread over all samples.
_MAX_SAMPLES = 16
# Share of the speed at the GPU's peak FLOP/s. Healthy H100 and H200 reach 36 to 56 % with the shipped configs on GPUs
# (docs/results); 40 % of the lowest must not pass, and other GPU models may reach less.
MIN_SHARE_OF_PEAK = 0.16
MIN_SHARE_OVER_TCP = 0.05
# FAIL and WARN below these shares of the speed with an all-reduce of all gradients after each step, at the busbw of the
# same run: 90 and 95 % of the lowest of 26 healthy values on 2 and 4 GPUs in docs/results (0.868 to 0.977, median
# 0.953). On two nodes over sockets 1.03 and 1.38, since DDP hides a part of the all-reduce behind the computation
ALL_REDUCE_SHARES = 0.78, 0.82
_CURVES = {"loss": "nats", "grad_norm": "norm", "learning_rate": "per step", "epoch": "epochs"}


def _suffix(name: str) -> str:
    return f".{name}" if name else ""


def device_facts(context: Context, this_rank_only: bool = False) -> list[Fact]:
    """Facts on devices for rules: of all ranks (all must call this), or of this rank, as a job of one rank."""
    from seatrial.bench import rank, subgroups

    device = rank.describe_device(context.device) if this_rank_only else rank.describe_devices(context.device)
    facts = {"device": device["backend"], **{name: device[name] for name in ("gpu", "cpu", "world_size", "nodes")}}
    if not this_rank_only:  # describe_devices returns 1 for both
        facts |= {"world_size": context.world_size, "nodes": len(subgroups.ranks_by_node(context.node))}
    facts |= {} if device["backend"] == "cuda" else {"cpu_only": CPU_ONLY}
    return [fact(name, value) for name, value in facts.items()]


def settings_fact(options: WorkloadOptions) -> Fact:
    """Fact ``settings``: "shipped" if reference speeds apply to this training, else "changed"."""
    overrides = [text for text in options.overrides if not text.startswith("max_steps=")]  # no effect on speed
    return fact("settings", "changed" if options.config or overrides else "shipped")


def speed_of_work(
    name: str, fail_below: float, warn_below: float, *defaults: str, each_rank: bool = False, one_node: bool = False
) -> metric:
    """A training speed, compared with the GEMM rate of this run.

    ``fail_below``, ``warn_below``: 90 and 95 % of the lowest share in docs/results. ``defaults``: the options that must
    have their default values. Without a GEMM rate, a share of the peak decides. ``each_rank``: trainings on each
    GPU alone, which are also compared with each other. ``one_node``: a training on all GPUs; the shares are those of
    one node. With several, a share of the peak decides, and the all-reduce of this run, since the network may be slow
    by design.
    """
    when = " and ".join(("device == cuda", *(f"{option} is the default" for option in defaults)))
    others = [f">= {MIN_SHARE_OF_PEAK} bound", *([">= 0.90 peers"] if each_rank else [])]
    by_all_reduce, warn_by_all_reduce = ([f">= {each} all_reduce"] if one_node else [] for each in ALL_REDUCE_SHARES)
    return metric(
        name,
        (f">= {fail_below} gemm", *others, *by_all_reduce),
        "The GPUs wait: for data, the host, a slow GPU, or communication.",
        "Compare device.gemm and device.memory of all GPUs, then collectives.all_reduce; top on the nodes shows other "
        "load on the CPUs",
        warn=(f">= {warn_below} gemm", *warn_by_all_reduce),
        unit="tokens/s/GPU",
        when=f"{when} and nodes < 2" if one_node else when,
        also=(
            rule(
                (f">= {MIN_SHARE_OVER_TCP} bound", *by_all_reduce),
                warn=tuple(warn_by_all_reduce),
                when=f"{when} and nodes >= 2",
            ),
        )
        if one_node
        else (),
        per="rank" if each_rank else None,
        speed=True,
    )


def facts_from_options(
    options: WorkloadOptions, shipped: str, *names: str, check_overrides: Sequence[str] = ()
) -> dict[str, JsonValue]:
    """The facts ``run`` of the trainings ``names``, with FLOPs per token and precision; {} for an invalid config."""
    from seatrial.train import train_config

    try:
        config = train_config.load(options.config or shipped, (*check_overrides, *options.overrides))
        flops = config.architecture().flops_per_token(config.seq_len, weight_gradients=not config.use_lora)
    except SeatrialError:
        return {}
    precision = "fp8" if config.fp8 else "bf16" if config.bf16 else "fp32"
    return {f"run{_suffix(name)}": {"flops_per_token": flops, "precision": precision} for name in names or ("",)}


def training_fact(config: TrainConfig, ranks: int) -> dict[str, JsonValue]:
    """Model, batch and precision of a training on ``ranks`` ranks."""
    architecture = config.architecture()
    model = f"{config.model.name}, {architecture.parameters:,} parameters, vocabulary {architecture.vocab_size}"
    return {
        "model": model,
        "steps": config.max_steps,
        "batch": f"{ranks} ranks × {config.grad_accum} × {config.bsz} sequences of up to {config.seq_len} tokens",
        "precision": "bf16" if config.bf16 else "fp32 without TF32",
        "deterministic": config.deterministic,
    }


@dataclass(frozen=True)
class Stage:
    """One training per group of ranks, all groups concurrently; by default one group of all ranks.

    Metric names end in ``name``, which is "" for the only training of a check. ``subjects``: one per group; by default
    the cluster.
    """

    name: str = ""
    overrides: Sequence[str] = ()
    groups: Sequence[Sequence[int]] | None = None
    subjects: Sequence[str] = ()


def run_stages(
    context: Context, config: str, stages: Sequence[Stage], limit_s: float, method: str, generate_tokens: int = 0
) -> Generator[Answer, None, dict[str, list[TrainingResult]]]:
    """Run ``stages`` of ``config`` in order, yield facts and observations on rank 0 and return the results by stage.

    ``method``: what is done with the config, for the fact of this name, which also has the overrides of all stages.
    Raises SeatrialError if a training cannot start or the disk is full.
    """
    facts = device_facts(context, this_rank_only=all(stage.groups == [[0]] for stage in stages))
    if context.rank == 0:
        yield from facts
        common = [text for text in stages[0].overrides if all(text in stage.overrides for stage in stages)]
        yield fact("method", f"{config} ({', '.join(common) or 'no overrides'}), {method}")
    results: dict[str, list[TrainingResult]] = {}
    results_by_training: dict[str, TrainingResult] = {}
    for stage in stages:
        folder = stage.name.replace("_", "-") or "sft"
        results[stage.name] = _workload.train(
            context, folder, config, stage.overrides, stage.groups, limit_s, generate_tokens=generate_tokens
        )
        subjects = stage.subjects or [CLUSTER] * len(results[stage.name])
        for number, (subject, result) in enumerate(zip(subjects, results[stage.name], strict=True)):
            results_by_training[f"{stage.name} on {subject}" if stage.subjects else folder] = result
            if context.rank == 0:
                yield from training_observations(context, result, stage.name, subject, metrics_only=number > 0)
    if context.rank == 0:
        yield from combined_observations(results_by_training)
    return results


def efficiency(name: str, trainings: Sequence[TrainingResult], baseline: Sequence[TrainingResult]) -> Iterator[Value]:
    """Yield ``name``: median tokens/s/GPU of ``trainings`` in percent of ``baseline``'s, if both are known.

    Its samples are the ratios of corresponding windows, so that their interval includes the noise of both.
    """
    (speed, windows), (baseline_speed, baseline_windows) = median_speeds(trainings), median_speeds(baseline)
    if speed and baseline_speed:
        percent = value(name, 100 * speed / baseline_speed)
        yield percent._replace(samples=ratios(windows, baseline_windows, 100))


def median_speeds(results: Sequence[TrainingResult]) -> tuple[float | None, list[float]]:
    """The median tokens/s/GPU of concurrent trainings, and that of each window; None and no window if unknown."""
    speeds: list[float] = []
    window_speeds: list[list[float]] = []  # of each training
    for result in results:
        if speed := result.value(TOKENS_PER_GPU):
            speeds.append(speed)
            window_speeds.append([speed * relative for relative in _relative_speeds(result)])
    if not speeds:
        return None, []
    return median(speeds), [median(concurrent) for concurrent in zip(*window_speeds, strict=False)]


def training_observations(
    context: Context, result: TrainingResult, name: str = "", subject: str = CLUSTER, metrics_only: bool = False
) -> Answers:
    """Metrics, curves, the fact ``run`` and files of one training run.

    ``metrics_only``: yield only the metrics, and the logs if the training failed.
    """
    suffix, relative_speeds = _suffix(name), _relative_speeds(result)
    for each, measured in _metric_values(result).items():
        if is_number(measured):
            samples = tuple(measured * relative for relative in relative_speeds) if each in _PROPORTIONAL else ()
            yield value(f"{each}{suffix}", measured, subject)._replace(samples=samples)
    if metrics_only:
        if result.problem:
            yield from _logs(context, result)
        return
    for key, unit in _CURVES.items():
        points = [(step["step"], step[key]) for step in result.steps if is_number(step.get(key))]
        if points:
            x, y = (tuple(map(float, axis)) for axis in zip(*points, strict=True))
            yield Series(name=f"{key}{suffix}", subject=subject, x=x, y=y, x_unit="step", y_unit=unit)
    yield fact(f"run{suffix}", _run_fact(result))
    yield from _files(context, result)


def combined_observations(results: Mapping[str, TrainingResult]) -> Answers:
    """The metrics of ``DECLARED`` over all trainings of a check, with evidence that names the training.

    ``exit_code`` is that of the first failed training, ``loss_drop`` the lowest. ``steps_missing`` and
    ``nonfinite_losses`` are sums.
    """
    problems = {name: result.problem for name, result in results.items() if result.problem}
    yield fact("trained", "no" if problems else "yes")
    exit_code = next((result.exit_code for result in results.values() if result.exit_code), 0)
    yield value("exit_code", exit_code, evidence=problems or None)
    if failed := next((result for result in results.values() if result.failed_node), None):
        yield fact(FAILED_RANK, {"rank": failed.failed_rank, "node": failed.failed_node})
    steps_missing = nonfinite_losses = 0
    for result in results.values():
        # a set: a step that is logged twice does not replace a missing one
        steps_missing += len(set(range(1, result.max_steps + 1)) - {step["step"] for step in result.steps})
        nonfinite_losses += sum(not is_number(step.get("loss")) for step in result.steps)
    yield value("steps_missing", steps_missing)
    yield value("nonfinite_losses", nonfinite_losses)
    drops = {name: drop for name, result in results.items() if (drop := _loss_drop(result)) is not None}
    if drops:
        yield value("loss_drop", min(drops.values()), evidence={name: round(drop, 4) for name, drop in drops.items()})
    else:
        yield unreadable("loss_drop", "no training has two finite losses")


def memory_excess(results: Sequence[TrainingResult]) -> Answers:
    """Metric memory_excess: parameters and Adam state on the fullest GPU, in percent above the calculated size.

    Its value is the largest of ``results``. The evidence has both sizes in GiB by number of ranks.
    """
    names = ("world_size", "params_and_optimizer_gib", "params_and_optimizer_expected_gib")
    sizes = sorted(tuple(map(result.value, names)) for result in results if all(map(result.value, names)))
    if sizes:
        worst_ratio = max(used / expected for _, used, expected in sizes)
        # sorted: of several trainings on a number of ranks, the one that uses most
        by_ranks = {str(ranks): {"used_gib": used, "expected_gib": expected} for ranks, used, expected in sizes}
        yield value("memory_excess", 100 * (worst_ratio - 1), evidence={"by_ranks": by_ranks})


def memory_metric(when: str) -> metric:
    """The metric ``memory_excess``, judged under the condition ``when``."""
    return metric(
        "memory_excess",
        f"<= {MAX_MEMORY_EXCESS:g} %",
        "Parameters and optimizer state exceed the rank's share: a tensor is duplicated or not sharded.",
        "Compare memory_allocated_gib of the ranks in metrics.json (artifact). Other processes on the GPU are not "
        "included.",
        when=f"{ON_GPU} and {when}",
        signed=True,
        may_exceed_100=True,
    )


def _metric_values(result: TrainingResult) -> dict[str, Any]:
    """Metric → value of one training run; None if unknown."""
    losses, entropy_bound = _losses(result), result.value("loss_entropy_bound")
    phases = result.value("phases_s") or {}
    values = {TOKENS_PER_GPU: result.value(TOKENS_PER_GPU)}
    values |= {name: result.value(key) for name, _, _, key in _RECORDED}
    values |= {"wall_seconds": result.seconds, "time_to_first_step": phases.get("time_to_first_step")}
    if values["memory_peak"] is not None:
        values["memory_peak"] *= 2**30
    if losses:
        values |= {"loss_first": losses[0], "loss_last": losses[-1]}
        values["loss_above_entropy_bound"] = (
            None if entropy_bound is None else fmean(_last_losses(losses)) - entropy_bound
        )
    return values


def _relative_speeds(result: TrainingResult) -> tuple[float, ...]:
    """The speed of at most ``_MAX_SAMPLES`` windows of the measured steps, relative to the speed of the training.

    The measured steps are the last ``steps_measured`` steps (metrics.json): all after ``untimed_steps``, timed without
    saves. The training's speed is their tokens over their seconds. So 1 lies between the smallest and the largest
    sample, but need not be the median. Empty if the lines of steps.jsonl give another speed than metrics.json.
    """
    speed, count, ranks = (result.value(name) for name in (TOKENS_PER_GPU, "steps_measured", "world_size"))
    lines = result.steps[-count:] if isinstance(count, int) and count > 0 else ()
    steps: list[tuple[Any, Any]] = [(line.get("tokens"), line.get("seconds")) for line in lines]
    valid = all(is_number(value) and value > 0 for step in steps for value in step)
    if not speed or not ranks or not steps or not valid:
        return ()
    training_speed, width = _tokens_per_second(steps), math.ceil(len(steps) / _MAX_SAMPLES)
    if not math.isclose(training_speed / ranks, speed, rel_tol=1e-6):
        return ()
    windows = [steps[start : start + width] for start in range(0, len(steps), width)]
    return tuple(_tokens_per_second(window) / training_speed for window in windows)


def _tokens_per_second(steps: Sequence[tuple[float, float]]) -> float:
    """Tokens per second of all ranks, from (tokens, seconds) of each step."""
    return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)


def _losses(result: TrainingResult) -> list[float]:
    return [step["loss"] for step in result.steps if is_number(step.get("loss"))]


def _last_losses(losses: Sequence[float]) -> Sequence[float]:
    """The losses of the last steps: at most _LOSS_WINDOW, and at most half of all, but at least one."""
    return losses[-min(_LOSS_WINDOW, max(1, len(losses) // 2)) :]


def _loss_drop(result: TrainingResult) -> float | None:
    """Mean loss of the first steps minus mean loss of the last steps; None with fewer than two steps."""
    losses = _losses(result)
    if len(losses) < 2:
        return None
    last = _last_losses(losses)
    return fmean(losses[: len(last)]) - fmean(last)


def loss_curve(points: Iterable[tuple[int, float]], subject: str = CLUSTER, name: str = "loss") -> Iterator[Series]:
    """The curve of the finite losses (step, loss); none without one."""
    finite = [(float(step), loss) for step, loss in points if math.isfinite(loss)]
    if finite:
        x, y = zip(*finite, strict=True)
        yield Series(name=name, subject=subject, x=x, y=y, x_unit="step", y_unit="nats")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number that a float can hold; JSON integers can be larger."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _run_fact(result: TrainingResult) -> dict[str, Any]:
    names = (
        *("model", "weights", "dataset", "stack", "strategy", "precision", "world_size", "mfu_formula", "final"),
        *("flops_per_token", "slowest_rank", "phases_s", "loss_entropy_bound", "torch"),
    )
    values = {name: result.value(name) for name in names}
    problem = {"problem": result.problem} if result.problem else {}
    return {name: value for name, value in values.items() if value is not None} | problem


def _files(context: Context, result: TrainingResult) -> Iterator[Artifact]:
    """Logs, config and metrics of one training run; weights are not artifacts."""
    yield from _logs(context, result)
    for path in (result.out / file for file in _ARTIFACTS):
        if path.is_file():
            yield _artifact(context, result, path)


def _logs(context: Context, result: TrainingResult) -> Iterator[Artifact]:
    """Standard error of the rank that failed first and of the first rank, from readable files that are not empty."""
    if result.log_prefix is None:
        return
    for rank in dict.fromkeys(rank for rank in (result.failed_rank, *result.ranks[:1]) if rank is not None):
        path = result.log_prefix.with_name(f"{result.log_prefix.name}.rank{rank}.err")
        if path.is_file() and path.stat().st_size:
            yield _artifact(context, result, path)


def _artifact(context: Context, result: TrainingResult, path: Path) -> Artifact:
    return context.artifact(path, f"{result.out.name}: {path.name}")


# The metrics of every check that trains, over all its trainings
DECLARED = (
    metric(
        "exit_code",
        "== 0",
        "The training failed; its result is lost.",
        "Read the end of the log in the evidence; run seatrial explain on the log (artifact). Out of memory: overrides "
        "bsz=…/2 and grad_accum=…×2, or gradient_checkpointing=true, or more ranks with fsdp2",
        log_evidence=True,
    ),
    metric(
        "steps_missing",
        "== 0",
        "Every step writes a line to steps.jsonl. A missing step did not run, or its line was lost.",
        "Compare steps.jsonl (artifact) with max_steps in config.json; check filesystem.shared",
        unit="count",
        when=TRAINED,
    ),
    metric(
        "nonfinite_losses",
        "== 0",
        "An infinite or NaN loss means wrong arithmetic, damaged memory or a learning rate that diverges.",
        "Run the check again. If the result is the same, the config is at fault; otherwise the hardware: see "
        "nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg | grep -i xid",
        unit="count",
        when=TRAINED,
    ),
    metric(
        "loss_drop",
        "> 0 nats",
        "The mean loss of the last steps is not below that of the first steps: the model does not learn.",
        "Check the curves loss and grad_norm. grad_norm 0: gradients do not reach the trained weights. Unstable: the "
        "learning rate is too high for these weights. If the loss falls on one GPU: check train.ddp and "
        "collectives.all_reduce",
        when=TRAINED,
    ),
)


def speed(*stages: str) -> tuple[metric, ...]:
    """The training speed of these stages, not judged."""
    meaning = "tokens per second and GPU, without untimed_steps"
    names = (f"{TOKENS_PER_GPU}{_suffix(stage)}" for stage in stages)
    return tuple(metric(name, unit="tokens/s/GPU", meaning=meaning, speed=True) for name in names)


def _per_training(suffix: str) -> tuple[metric, ...]:
    """The metrics of each training without a rule, except its speed."""
    return tuple(
        metric(f"{name}{suffix}", unit=unit, meaning=meaning, speed=name in _SPEEDS)
        for name, unit, meaning, _ in _RECORDED
    )


ONE_TRAINING, EACH_STAGE = _per_training(""), _per_training(".*")
