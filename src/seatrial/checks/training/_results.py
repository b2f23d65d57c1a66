"""What a training tells: figures, curves, facts and files; and what is wrong with any, whatever its speed."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import JsonValue

from seatrial.checks.base import Context
from seatrial.checks.training import _workload
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import CLUSTER, Artifact, Fact, Metric, Observation, Rule, SeatrialError, Series
from seatrial.train import train_config

TOKENS_PER_GPU = "tokens_per_second_per_gpu"
REHEARSAL = "a rehearsal: the tiny twin of the config, on CPU cores that others share; it says nothing of any GPU"
# Of steps, at either end: a batch's loss strays from its mean by more than a step improves it
_ENDS = 3
EXCESS = 10.0  # % of the expected: torch's allocator rounds up, and 2 and 4 H200 had 0.2 to 0.6 % more
_KEPT = ("config.json", "metrics.json", "steps.jsonl")

# Judged of all trainings of a check together: one that went wrong is enough, and the facts say which
JUDGED = {"exit_code": "", "steps_missing": "count", "nonfinite_losses": "count", "loss_drop": "nats"}
# Told of each training; a check with several appends ".NAME"
EACH = {
    "tokens_per_second_per_gpu": "tokens/s/GPU",
    "loss_first": "nats",
    "loss_last": "nats",
    "loss_above_entropy_bound": "nats",
    "step_p50": "s",
    "step_p99": "s",
    "mfu": "%",
    "gemm_share": "%",
    "data_wait": "%",
    "exposed_communication": "%",
    "memory_peak": "GiB",
    "allocation_retries": "count",
    "parameters": "count",
    "trained_parameters": "count",
    "train_runtime": "s",
    "time_to_first_step": "s",
    "wall_seconds": "s",
}
_FROM = {  # those of metrics.json; null there is not known, and gives no figure
    "tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "step_p50": "step_p50_s",
    "step_p99": "step_p99_s",
    "mfu": "mfu_percent",
    "gemm_share": "gemm_percent",
    "data_wait": "data_wait_percent",
    "exposed_communication": "exposed_communication_percent",
    "memory_peak": "memory_peak_gib",
    "allocation_retries": "allocation_retries",
    "parameters": "parameters",
    "trained_parameters": "trained_parameters",
    "train_runtime": "train_runtime_s",
}
# In proportion to the speed, so that what the steps tell of that they tell of these
_RATES = (TOKENS_PER_GPU, "mfu", "gemm_share")
# At most: enough for an interval of 95 %, and each of a long training holds several steps, so that one that stalls now
# and then is slow in all
_WINDOWS = 16
PERFORMANCE = ("tokens_per_second_per_gpu*", "step_p*", "mfu*", "gemm_share*", "*_seconds*", "train_runtime*")
_CURVES = {"loss": "nats", "grad_norm": "norm", "learning_rate": "per step", "epoch": "epochs"}


def metric_units(*names: str) -> dict[str, str]:
    """Of what trainings called ``names`` tell; of the only one, where no name is given."""
    return JUDGED | {f"{metric}{_end(name)}": unit for metric, unit in EACH.items() for name in names or ("",)}


def _end(name: str) -> str:
    return f".{name}" if name else ""


def device_facts(context: Context, first_rank_only: bool = False) -> list[Fact]:
    """What baselines and rules go by; ``alone``: of the first rank's device. All ranks call this together."""
    from seatrial.bench import rank, subgroups

    found = rank.describe_device(context.device) if first_rank_only else rank.describe_devices(context.device)
    facts = {"device": found["backend"], **{name: found[name] for name in ("gpu", "cpu", "world_size", "nodes")}}
    if not first_rank_only:
        facts |= {"world_size": context.world_size, "nodes": len(subgroups.ranks_by_node(context.node))}
    facts |= {} if found["backend"] == "cuda" else {"rehearsal": REHEARSAL}
    return [Fact(name=name, value=value) for name, value in facts.items()]


def settings_fact(options: WorkloadOptions) -> Fact:
    """Whether published speeds are of the same training: those of a rule with a baseline."""
    return Fact(name="settings", value="changed" if options.config or options.overrides else "shipped")


def facts_from_options(
    options: WorkloadOptions, shipped: str, *names: str, check_overrides: Sequence[str] = ()
) -> dict[str, JsonValue]:
    """Of the facts ``run`` of trainings called ``names``, on GPUs, what a bound on their speed takes.

    ``own``: the check's overrides of what is computed. Nothing for a config that is none: the training will say so.
    """
    try:
        config = train_config.load(options.config or shipped, (*check_overrides, *options.overrides))
        flops = config.architecture().flops_per_token(config.seq_len, weight_gradients=not config.use_lora)
    except SeatrialError:
        return {}
    precision = "fp8" if config.fp8 else "bf16" if config.bf16 else "fp32"
    return {f"run{_end(name)}": {"flops_per_token": flops, "precision": precision} for name in names or ("",)}


@dataclass(frozen=True)
class Stage:
    """A training of a check, once in each of ``groups`` of ranks at the same time, by default in one of all ranks.

    Its metrics are of ``subjects``, by group, or of the cluster. They end in ``name``; "" is a check's only training.
    """

    name: str = ""
    overrides: Sequence[str] = ()
    groups: Sequence[Sequence[int]] | None = None
    subjects: Sequence[str] = ()


def run_stages(
    context: Context, config: str, stages: Sequence[Stage], limit_s: float, generate_tokens: int = 0
) -> Generator[Observation, None, dict[str, list[TrainingResult]]]:
    """Carry out ``stages`` of ``config`` one after the other; the trainings of each, by its name.

    Yields what they gave on rank 0. Raises SeatrialError where one cannot train here at all.
    """
    runs: dict[str, list[TrainingResult]] = {}
    named: dict[str, TrainingResult] = {}
    for stage in stages:
        folder = stage.name.replace("_", "-") or "sft"
        runs[stage.name] = _workload.train(
            context, folder, config, stage.overrides, stage.groups, limit_s, generate_tokens=generate_tokens
        )
        subjects = stage.subjects or [CLUSTER] * len(runs[stage.name])
        for number, (subject, one) in enumerate(zip(subjects, runs[stage.name], strict=True)):
            named[f"{stage.name} on {subject}" if stage.subjects else folder] = one
            if context.rank == 0:
                yield from training_observations(context, one, stage.name, subject, metrics_only=number > 0)
    if context.rank == 0:
        yield from combined_observations(named)
    return runs


def train_on_one_gpu(
    context: Context,
    options: WorkloadOptions,
    name: str,
    *overrides: str,
    after_training: str,
    generate_tokens: int = 0,
) -> Generator[Observation, None, TrainingResult]:
    """Train the config called ``name`` on the GPU of rank 0, while the others wait; ``then`` says what follows."""
    facts = device_facts(context, first_rank_only=True)
    config, _ = _workload.config_and_overrides(context, options, name)
    stage = Stage(overrides=(*overrides, *options.overrides), groups=[[0]])
    runs = yield from run_stages(context, config, [stage], options.limit_s, generate_tokens)
    (trained,) = runs[stage.name]
    if context.rank == 0:
        yield from facts
        yield Fact(name="how", value=f"{config} on one GPU, once, {trained.max_steps} steps; {after_training}")
    return trained


def efficiency(name: str, runs: Sequence[TrainingResult], base: Sequence[TrainingResult]) -> Iterator[Metric]:
    """The median speed a GPU of ``runs`` as a share of that of ``base``; nothing where one of them is not known."""
    speeds, baseline = ([speed for one in found if (speed := one.value(TOKENS_PER_GPU))] for found in (runs, base))
    if speeds and baseline:
        share = 100 * median(speeds) / median(baseline)
        yield Metric(name=f"efficiency.{name}", value=share, unit="%", subject=CLUSTER)


def training_observations(
    context: Context, trained: TrainingResult, name: str = "", subject: str = CLUSTER, metrics_only: bool = False
) -> Iterator[Observation]:
    """Figures, curves, what was trained (fact ``run``) and files of one training; ``brief``: its figures, and where it
    failed who says why.
    """
    end, found, shares = _end(name), _figures(trained), _shares(trained)
    for metric, unit in EACH.items():
        value: Any = found.get(metric)
        if is_number(value):
            own = tuple(value * share for share in shares) if metric in _RATES else ()
            yield Metric(name=f"{metric}{end}", value=value, unit=unit, subject=subject, samples=own)
    if metrics_only:
        yield from _logs(context, trained) if trained.problem else ()
        return
    for key, unit in _CURVES.items():
        points = [(step["step"], step[key]) for step in trained.steps if is_number(step.get(key))]
        if points:
            x, y = (tuple(map(float, axis)) for axis in zip(*points, strict=True))
            yield Series(name=f"{key}{end}", subject=subject, x=x, y=y, x_unit="step", y_unit=unit)
    yield Fact(name=f"run{end}", value=_what(trained))
    yield from _files(context, trained)


def combined_observations(runs: Mapping[str, TrainingResult]) -> Iterator[Observation]:
    """What ``RULES`` judge, of all trainings of a check by their names: the worst of each figure, and which it is."""
    problems = {name: one.problem for name, one in runs.items() if one.problem}
    yield Fact(name="trained", value="no" if problems else "yes")
    if problems:
        yield Fact(name="problems", value=problems)
    drops = {name: _drop(one) for name, one in runs.items()}
    yield Fact(name="loss_drops", value={name: round(drop, 4) for name, drop in drops.items() if drop is not None})
    values: dict[str, float | None] = {
        "exit_code": next((one.exit_code for one in runs.values() if one.exit_code), 0),
        # a step that is there twice makes up for none that is missing
        "steps_missing": sum(
            len(set(range(1, one.max_steps + 1)) - {step["step"] for step in one.steps}) for one in runs.values()
        ),
        "nonfinite_losses": sum(not is_number(step.get("loss")) for one in runs.values() for step in one.steps),
        "loss_drop": min((drop for drop in drops.values() if drop is not None), default=None),
    }
    for metric, value in values.items():
        if value is not None:
            yield Metric(name=metric, value=value, unit=JUDGED[metric], subject=CLUSTER)


def memory_excess(runs: Sequence[TrainingResult]) -> Iterator[Observation]:
    """Weights and Adam's state on the fullest GPU, over the share that is due by arithmetic: the worst of all ``runs``.

    The fact ``memory`` has both, by the number of ranks that share. Nothing where that is not known, or is offloaded.
    """
    found: dict[int, tuple[float, float]] = {}
    for one in runs:
        held, due = one.value("params_and_optimizer_gib"), one.value("params_and_optimizer_expected_gib")
        if held is not None and due:
            ranks = one.value("world_size")
            found[ranks] = max((held, due), found.get(ranks, (held, due)))
    if found:
        worst = max(held / due for held, due in found.values())
        yield Metric(name="memory_excess", value=100 * (worst - 1), unit="%", subject=CLUSTER)
        told = {str(ranks): {"held_gib": held, "expected_gib": due} for ranks, (held, due) in sorted(found.items())}
        yield Fact(name="memory", value={"by_ranks": told})


def memory_rule(**where: str) -> Rule:
    """That nothing is held twice, or whole, of what is to be shared."""
    return Rule(
        metric="memory_excess",
        may_be_negative=True,
        expect=f"<= {EXCESS:g} %",
        applies_if={"device": "cuda", "trained": "yes", **where},
        evidence_facts=("memory",),
        meaning="weights and optimizer take more than a rank's share of them: something is held twice, or whole",
        fix="Compare memory_allocated_gib of the ranks in metrics.json (an artifact); other processes on the "
        "GPU do not count here",
    )


def _figures(trained: TrainingResult) -> dict[str, Any]:
    losses, floor = _losses(trained), trained.value("loss_entropy_bound")
    phases = trained.value("phases_s") or {}
    found = {ours: trained.value(theirs) for ours, theirs in _FROM.items()}
    found |= {"wall_seconds": trained.seconds, "time_to_first_step": phases.get("time_to_first_step")}
    if losses:
        found |= {"loss_first": losses[0], "loss_last": losses[-1]}
        found["loss_above_entropy_bound"] = None if floor is None else fmean(_last(losses)) - floor
    return found


def _shares(trained: TrainingResult) -> tuple[float, ...]:
    """The speed of each measured step over the training's, which is the tokens of these very steps over their seconds.

    They are the last ``steps_measured`` (metrics.json): those after ``untimed_steps``, saving excluded. 1 lies among
    them and is not their median: a slow step weighs by its time. More than 16 steps are told as windows of equal
    length, but for the last. Nothing where the lines of steps.jsonl do not come to that speed: they are of other steps.
    """
    speed, count, ranks = (trained.value(name) for name in (TOKENS_PER_GPU, "steps_measured", "world_size"))
    lines = trained.steps[-count:] if isinstance(count, int) and count > 0 else ()
    steps: list[tuple[Any, Any]] = [(line.get("tokens"), line.get("seconds")) for line in lines]
    if not speed or not ranks or not steps or not all(is_number(one) and one > 0 for step in steps for one in step):
        return ()
    whole, width = _rate(steps), math.ceil(len(steps) / _WINDOWS)
    if not math.isclose(whole / ranks, speed, rel_tol=1e-6):
        return ()
    return tuple(_rate(steps[first : first + width]) / whole for first in range(0, len(steps), width))


def _rate(steps: Sequence[tuple[float, float]]) -> float:
    """Tokens a second of all ranks."""
    return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)


def _losses(trained: TrainingResult) -> list[float]:
    return [step["loss"] for step in trained.steps if is_number(step.get("loss"))]


def _last(losses: Sequence[float]) -> Sequence[float]:
    return losses[-min(_ENDS, max(1, len(losses) // 2)) :]


def _drop(trained: TrainingResult) -> float | None:
    """By how much the mean loss of the last steps is under that of the first; None with fewer than two."""
    losses = _losses(trained)
    if len(losses) < 2:
        return None
    last = _last(losses)
    return fmean(losses[: len(last)]) - fmean(last)


def is_number(value: Any) -> bool:
    """Also of what a float cannot hold, which JSON can."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _what(trained: TrainingResult) -> dict[str, Any]:
    names = ("model", "weights", "dataset", "stack", "strategy", "precision", "world_size", "mfu_formula", "final")
    more = ("flops_per_token", "slowest_rank", "phases_s", "loss_entropy_bound", "torch")
    found = {name: trained.value(name) for name in (*names, *more)}
    ended = {"problem": trained.problem} if trained.problem else {}
    return {name: value for name, value in found.items() if value is not None} | ended


def _files(context: Context, trained: TrainingResult) -> Iterator[Artifact]:
    """What is worth looking at, of what it wrote; weights stay where they are."""
    yield from _logs(context, trained)
    for path in (trained.out / file for file in _KEPT):
        if path.is_file():
            yield _artifact(context, trained, path)


def _logs(context: Context, trained: TrainingResult) -> Iterator[Artifact]:
    """Of the rank that explains the problem, and of the first, as far as they said anything that is seen here."""
    if trained.log_prefix is None:
        return
    for rank in dict.fromkeys(rank for rank in (trained.failed_rank, *trained.ranks[:1]) if rank is not None):
        path = trained.log_prefix.with_name(f"{trained.log_prefix.name}.rank{rank}.err")
        if path.is_file() and path.stat().st_size:
            yield _artifact(context, trained, path)


def _artifact(context: Context, trained: TrainingResult, path: Path) -> Artifact:
    return Artifact(path=str(path.relative_to(context.run_dir)), title=f"{trained.out.name}: {path.name}")


# What is wrong with any training, whatever its speed
RULES = (
    Rule(
        metric="exit_code",
        expect="== 0",
        evidence_facts=("problems",),
        meaning="a training that ends otherwise is lost, whatever it reached",
        fix="The fact problems has its last words, the artifacts its log: seatrial explain LOG. Out of memory: "
        "overrides bsz=…/2 and grad_accum=…×2, or gradient_checkpointing=true, or more ranks with fsdp2",
    ),
    Rule(
        metric="steps_missing",
        expect="== 0",
        applies_if={"trained": "yes"},
        meaning="every step leaves a line: one that is missing was not taken, or the filesystem lost its line",
        fix="Compare steps.jsonl (an artifact) with max_steps in config.json; look at filesystem.shared",
    ),
    Rule(
        metric="nonfinite_losses",
        expect="== 0",
        applies_if={"trained": "yes"},
        meaning="a loss that is no number means wrong arithmetic, damaged memory, or a learning rate that diverges",
        fix="Repeat it: what comes again is the config, what does not is hardware: nvidia-smi -q -d "
        "ECC,ROW_REMAPPER; dmesg | grep -i xid",
    ),
    Rule(
        metric="loss_drop",
        expect="> 0 nats",
        applies_if={"trained": "yes"},
        evidence_facts=("loss_drops",),
        meaning="the mean loss of the last steps is not under that of the first: nothing is learned",
        fix="Look at the curve and at grad_norm. 0: no gradient reaches what trains. Wild: the learning rate is too "
        "high for these weights. Fine on one GPU alone: look at train.ddp and collectives.all_reduce",
    ),
)
