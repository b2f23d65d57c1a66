"""Does fine-tuning for function calling work here: Qwen2-7B, LoRA, ZeRO-3, from rows to scored answers?

Rows become conversations (those that cannot are counted by reason), all ranks train, and one rank asks the model before
and after the training what it would call. With random weights this shows that all of it works, and at which speed; how
well it learns only pretrained weights can tell.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from seatrial.bench.child_result import EXIT_DISK_FULL, EXIT_USAGE_ERROR
from seatrial.checks.base import Check, Context
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import CLUSTER, Artifact, Fact, Metric, Observation, Phase, Rule, Scope, SeatrialError, UsageError

if TYPE_CHECKING:
    from seatrial.bench.child_ranks import ChildResult
    from seatrial.train.train_config import TrainConfig

NAME = "function-calling-qwen2-7b"
SCORES = ("json_valid", "schema_valid", "names", "arguments", "full", "irrelevance")
MODELS = {"base": "before the training", "tuned": "after it"}
METRICS = {
    **_results.metric_units(),
    "final_loss": "nats",
    "final": "bool",
    "parameters_trained_beyond_adapters": "count",
    "rows": "count",
    "rows_rejected": "count",
    "rows_unaccounted": "count",
    "tensorboard_logs": "count",
    "evaluation_exit_code": "",
    "evaluation_seconds": "s",
    "cases": "count",
    **{f"{score}.{model}": "%" for score in SCORES for model in MODELS},
    "call_correct_gain": "%",
    "better": "bool",
}
# What random weights need, on GPUs: enough steps to time, data for them, and answers to score.
# Their learning rate is for a model that knows nothing yet; the config's is for one that is to be changed little.
RANDOM_WEIGHTS_OVERRIDES = (
    *("max_steps=10", "untimed_steps=3", "grad_accum=1", "data.samples=2000", "checkpoint.every=0"),
    *("learning_rate.peak=1e-3", "evaluation.cases=8", "evaluation.max_new_tokens=48"),
)
# ZeRO-3 and FSDP2 share weights among ranks: one has nobody to share with
SINGLE_RANK_OVERRIDES = ("parallel.strategy=ddp", "parallel.deepspeed=null")
ASKED = "asked "  # what a line of the evaluation begins with (train.function_calling.evaluate)
_LAST_STEPS = 3  # of which the loss at the end is the mean: one batch's strays


@dataclass(frozen=True)
class TrainingTask:
    """The training as it is asked for here.

    ``own``: the overrides that are the check's, with the reason for each. ``strategy``: what is asked for without them.
    """

    config_name: str
    config: TrainConfig
    overrides: tuple[str, ...]
    check_overrides: dict[str, str]
    requested_strategy: str


def training_task(context: Context, options: WorkloadOptions) -> TrainingTask:
    """Raises UsageError for a config, or an override, that is none, or is of something else."""
    from seatrial.train import train_config

    name = options.config or _workload.config_for_device(context, NAME)
    own: dict[str, str] = {}
    plain = train_config.load(name, options.overrides)
    if context.device.startswith("cuda") and plain.model.weights == "random":
        own |= dict.fromkeys(RANDOM_WEIGHTS_OVERRIDES, "random weights: what shows that it works, and how fast")
    if context.world_size == 1:
        own |= dict.fromkeys(SINGLE_RANK_OVERRIDES, "one rank: there is nobody to share weights with")
    overrides = (*own, *options.overrides)
    config = train_config.load(name, overrides)
    if config.data.layout != "function_calling":
        raise UsageError(f"{name} trains on {config.data.layout}: only function calling can be asked for afterwards")
    return TrainingTask(name, config, overrides, own, plain.parallel.strategy)


def measure(context: Context, options: WorkloadOptions) -> Iterator[Observation]:
    """Yields on rank 0. Raises SeatrialError where nothing could be trained."""
    facts, task = _results.device_facts(context), training_task(context, options)
    (trained,) = _workload.train(context, "function_calling", task.config_name, task.overrides, limit_s=options.limit_s)
    answer, seconds = (None, 0.0) if trained.problem else _evaluate(context, task, trained.out, options.limit_s)
    if context.rank:
        return
    yield from facts
    yield _results.settings_fact(options)
    yield Fact(name="pretrained", value=_word(task.config.model.weights != "random"))
    yield Fact(name="use_lora", value=_word(task.config.use_lora))
    yield Fact(name="tensorboard", value=_word(task.config.tensorboard))
    yield Fact(name="strategy_requested", value=task.requested_strategy)
    yield Fact(name="strategy", value=trained.value("strategy"))
    yield Fact(name="overrides", value=task.check_overrides)
    yield from _results.combined_observations({"function_calling": trained})
    yield from _results.training_observations(context, trained)
    if answer:
        yield from _left(task.config, trained)
        yield from _scored(answer, seconds)
        yield from _files(context, trained.out, answer.value)


def _word(holds: bool) -> str:
    """As rules name it, in ``where``."""
    return "yes" if holds else "no"


def _evaluate(context: Context, task: TrainingTask, out: Path, limit_s: float) -> tuple[ChildResult, float]:
    """What the first rank's evaluation answered, and after how many seconds. Called by all ranks together.

    Raises SeatrialError where it is the config or the disk that it was for.
    """
    from seatrial.bench import child_ranks
    from seatrial.train import train_config

    context.progress("asking the model, before and after")
    started = time.monotonic()
    answers = child_ranks.run_child_ranks(
        "seatrial.train.function_calling.child",
        {"config": str(train_config.config_path(task.config_name)), "overrides": list(task.overrides), "out": str(out)},
        {},
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / "evaluation",
        limit_s=limit_s,
        groups=[[0]],
        on_poll=lambda: _tell(context),
    )
    if answers[0].exit_code in (EXIT_USAGE_ERROR, EXIT_DISK_FULL):
        raise SeatrialError(f"what was trained was not asked: {child_ranks.failure_text(0, answers[0])}")
    return answers[0], time.monotonic() - started


def _tell(context: Context) -> None:
    """Where the evaluation is: its newest line about that."""
    try:
        lines = (
            (context.artifacts_dir / "evaluation.rank0.err").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:  # on another node
        return
    if context.rank == 0 and (asked := [line for line in lines if line.startswith(ASKED)]):
        context.progress(f"evaluation: {asked[-1]}")


def _left(config: TrainConfig, trained: TrainingResult) -> Iterator[Observation]:
    """What a training that ended well has left, and whether it trained what it should have."""
    final = trained.out / "final"
    weights = [path for path in final.glob("*.safetensors") if path.stat().st_size]
    yield Fact(name="final", value=trained.value("final"))
    yield _metric("final", bool(weights) and trained.export_loads)
    losses = [step["loss"] for step in trained.steps[-_LAST_STEPS:] if step.get("loss") is not None]
    if losses:
        yield _metric("final_loss", fmean(losses))
    if config.use_lora:
        adapters = config.architecture().adapter_parameters(config.lora_targets, config.lora_r)
        yield _metric("parameters_trained_beyond_adapters", trained.value("trained_parameters") - adapters)
    if config.tensorboard:
        yield _metric("tensorboard_logs", len(list(_tensorboard(trained.out))))


def _scored(answer: ChildResult, seconds: float) -> Iterator[Observation]:
    yield Fact(name="evaluation_problem", value=answer.error or "none")
    yield _metric("evaluation_exit_code", answer.exit_code)
    if not answer.error:
        yield _metric("evaluation_seconds", seconds)
        yield from evaluation_observations(answer.value)


def evaluation_observations(record: Mapping[str, Any]) -> Iterator[Observation]:
    """What evaluation.json says, of both splits together. Pure. A question that no case asked has no figure."""
    found = record["preprocess"]
    rejected = sum(found["rejected"].values())
    yield Fact(name="data", value=record["data"])
    yield Fact(name="rejected", value=found["rejected"])
    yield Fact(name="kept", value=found["kept"])
    yield _metric("rows", found["rows"])
    yield _metric("rows_rejected", rejected)
    yield _metric("rows_unaccounted", found["rows"] - rejected - sum(found["kept"].values()))
    yield Fact(name="cases", value=record["cases"])
    yield _metric("cases", sum(record["cases"].values()))
    for model in MODELS:
        splits = record[model].values()
        for score in SCORES:
            count, asked = (sum(split[score][part] for split in splits) for part in ("count", "of"))
            if asked:
                yield _metric(f"{score}.{model}", 100 * count / asked)
    yield Fact(name="gate", value=record["gate"])
    yield _metric("call_correct_gain", 100 * record["gate"]["delta"])
    yield _metric("better", record["gate"]["passed"])


def _files(context: Context, out: Path, record: Mapping[str, Any] | None) -> Iterator[Artifact]:
    """The logs for TensorBoard, the answers, and a summary to read."""
    summary = out / "summary.txt"
    summary.write_text("".join(f"{line}\n" for line in _summary(out, record)), encoding="utf-8")
    kept = [summary, out / "evaluation.json", out / "answers.jsonl", *_tensorboard(out)]
    for path in kept:
        if path.is_file():
            yield Artifact(path=str(path.relative_to(context.run_dir)), title=f"{path.name} of the training")


def _tensorboard(out: Path) -> Sequence[Path]:
    return sorted((out / "tensorboard").rglob("events.out.tfevents.*"))


def _summary(out: Path, record: Mapping[str, Any] | None) -> Iterator[str]:
    metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    for name, value in metrics.items():
        if not isinstance(value, (dict, list)):
            yield f"{name}: {value}"
    if record:
        gate = record["gate"]
        yield f"fully right before: {gate['full_base']:.1%}, after: {gate['full_tuned']:.1%}, p {gate['p_value']:.3g}"


def _metric(name: str, value: float) -> Metric:
    return Metric(name=name, value=value, unit=METRICS[name], subject=CLUSTER)


_TRAINED = {"trained": "yes"}
_PRETRAINED = {"trained": "yes", "pretrained": "yes"}

CHECK = Check(
    name="train.function_calling",
    title="Function calling: Qwen2-7B with LoRA, trained by all processes and scored",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    metrics=METRICS,
    rules=(
        *_results.RULES,
        Rule(
            metric="final",
            evidence_facts=("final",),
            expect="== 1 bool",
            applies_if=_TRAINED,
            meaning="final/ is what the training is for: it must be there, and load as it was trained.",
            fix="The fact final tells what reading it again showed. Look at the space where the run directory lies: "
            "df -h; and at filesystem.shared",
        ),
        Rule(
            metric="parameters_trained_beyond_adapters",
            expect="== 0",
            applies_if={**_TRAINED, "use_lora": "yes"},
            meaning="LoRA trains its adapters, and nothing of the base model: other counts mean other weights.",
            fix="Compare trained_parameters with config.json (artifacts); peft's version; lora_targets",
        ),
        Rule(
            metric="tensorboard_logs",
            expect=">= 1",
            applies_if={**_TRAINED, "tensorboard": "yes"},
            meaning="The training was to leave logs for TensorBoard.",
            fix="pip install tensorboard, in the environment of the nodes",
        ),
        Rule(
            metric="tokens_per_second_per_gpu",
            expect="> 2000 tokens/s/GPU",  # the success criterion of the workload, of two nodes of eight H100
            applies_if={**_TRAINED, "device": "cuda"},  # here, and not in a trial: no CPU is held to it
            meaning="Who asks for this training expects so many of each GPU.",
            fix="Is train.lora slow on one GPU as well, look at device.gemm; else at collectives.all_gather: ZeRO-3 "
            "and FSDP2 gather all weights in every micro-batch. The fact run names strategy and slowest rank",
        ),
        Rule(
            metric="final_loss",
            expect="< 0.5 nats",  # the success criterion of the workload, on glaive-function-calling-v2
            applies_if=_PRETRAINED,
            meaning="Pretrained weights get there on these rows. Random ones are not held to it.",
            fix="Look at the curve loss. Still falling: more max_steps. Flat: learning_rate.peak; the fact rejected",
        ),
        Rule(
            metric="rows_unaccounted",
            evidence_facts=("rejected", "kept"),
            expect="== 0",
            applies_if=_TRAINED,
            meaning="Every row is used, or rejected for a reason that is counted: none may get lost.",
            fix="seatrial's own defect: report it, with the facts rejected and kept",
        ),
        Rule(
            metric="evaluation_exit_code",
            evidence_facts=("evaluation_problem",),
            expect="== 0",
            applies_if=_TRAINED,
            meaning="What was trained could not be asked.",
            fix="The fact evaluation_problem has its last words. By hand: seatrial evaluate CONFIG --out DIR. Out "
            "of memory: evaluation.bsz",
        ),
        Rule(
            metric="cases",
            evidence_facts=("cases",),
            expect=">= 1",
            applies_if=_TRAINED,
            meaning="Without a conversation that was kept from training, nothing is known of what was learned.",
            fix="More data.samples",
        ),
        Rule(
            metric="better",
            evidence_facts=("gate",),
            expect="== 1 bool",
            applies_if=_PRETRAINED,
            meaning="The trained model must be right where the base model is not, by more than chance: else nothing of use "
            "was learned, or the base model knew it all.",
            fix="Compare answers.jsonl (artifacts), base and tuned. More evaluation.cases, more max_steps",
        ),
    ),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, NAME),
    limit_s=1500.0,  # a training and an evaluation, each of which may take the option limit_s
    options=WorkloadOptions,
    performance_metrics=_results.PERFORMANCE,
)
