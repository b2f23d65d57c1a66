"""Fine-tunes Qwen2-7B for function calling (LoRA, ZeRO-3) on all ranks and scores answers before and after training.

Rows are converted to conversations; rejected rows are counted by reason. With random weights the check shows only that
the workload runs and how fast it is. Scores need pretrained weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from seatrial.bench.child_result import EXIT_DISK_FULL, EXIT_USAGE_ERROR
from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answers, absent, fact, metric, unreadable, value
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._results import TOKENS_PER_GPU
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import Artifact, Phase, Scope, SeatrialError, UsageError
from seatrial.train.function_calling import score

if TYPE_CHECKING:
    from seatrial.bench.child_ranks import ChildResult
    from seatrial.train.train_config import TrainConfig

NAME = "function-calling-qwen2-7b"
SCORES = (  # the criteria of score.CRITERIA that are metrics
    *("json_valid", "schema_valid", "function_name_correct"),
    *("arguments_correct", "call_correct", "irrelevance_correct"),
)
MODELS = ("base", "tuned")
# Overrides for random weights on GPUs: fewer steps, rows and cases, and the learning rate of an untrained model instead
# of the config's, which is for a pretrained model.
RANDOM_WEIGHTS_OVERRIDES = (
    *("max_steps=10", "untimed_steps=3", "grad_accum=1", "data.samples=2000", "checkpoint.every=0"),
    *("learning_rate.peak=1e-3", "evaluation.cases=8", "evaluation.max_new_tokens=48"),
)
# ZeRO-3 and FSDP2 shard weights over ranks: one rank has nothing to shard
SINGLE_RANK_OVERRIDES = ("parallel.strategy=ddp", "parallel.deepspeed=null")
PROGRESS_PREFIX = "evaluated "  # start of the progress lines that train.function_calling.evaluate prints
_FINAL_STEPS = 3  # final_loss is the mean of the last steps, since the loss of one batch is noisy


@dataclass(frozen=True)
class TrainingTask:
    """The training with all overrides; ``check_overrides``: override of this check → its reason."""

    config_name: str
    config: TrainConfig
    overrides: tuple[str, ...]
    check_overrides: dict[str, str]


def training_task(context: Context, options: WorkloadOptions) -> TrainingTask:
    """The training for this device and number of ranks. Raises UsageError for an invalid config or data layout."""
    from seatrial.train import train_config

    name = options.config or _workload.config_for_device(context, NAME)
    check_overrides: dict[str, str] = {}
    if context.on_gpu and train_config.load(name, options.overrides).model.weights == "random":
        check_overrides |= dict.fromkeys(RANDOM_WEIGHTS_OVERRIDES, "random weights: test of function and speed only")
    if context.world_size == 1:
        check_overrides |= dict.fromkeys(SINGLE_RANK_OVERRIDES, "one rank: no sharding")
    overrides = (*check_overrides, *options.overrides)
    config = train_config.load(name, overrides)
    if config.data.layout != "function_calling":
        raise UsageError(
            f"{name}: data.layout is {config.data.layout}; train.function_calling needs data.layout function_calling"
        )
    return TrainingTask(name, config, overrides, check_overrides)


def measure(context: Context, options: WorkloadOptions) -> Answers:
    """Train, evaluate and yield observations on rank 0. Raises SeatrialError if the training cannot start."""
    task, method = training_task(context, options), "then scores before and after training"
    stage = _results.Stage(overrides=task.overrides)
    results = yield from _results.run_stages(context, task.config_name, [stage], options.limit_s, method)
    (result,) = results[stage.name]
    evaluation, seconds = (None, 0.0) if result.problem else _evaluate(context, task, result.out, options.limit_s)
    if context.rank:
        return
    yield _results.settings_fact(options)
    random_weights = task.config.model.weights == "random"
    yield fact("pretrained", "no" if random_weights else "yes")
    yield fact("strategy", result.value("strategy"))
    yield fact("overrides", task.check_overrides)
    if evaluation:
        yield from _training_outputs(task.config, result)
        yield from _evaluation_result(evaluation, seconds)
        yield from _files(context, result.out, evaluation.value)


def _evaluate(context: Context, task: TrainingTask, out: Path, limit_s: float) -> tuple[ChildResult, float]:
    """Result and duration in seconds of the evaluation on the first rank. All ranks must call this.

    Raises SeatrialError for an invalid config or a full disk.
    """
    from seatrial.bench import child_ranks
    from seatrial.train import train_config

    context.progress("evaluation before and after training")
    started = time.monotonic()
    children = child_ranks.run_child_ranks(
        "seatrial.train.child",
        {
            "evaluate": True,
            "config": str(train_config.config_path(task.config_name)),
            "overrides": list(task.overrides),
            "out": str(out),
        },
        {},
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / "evaluation",
        limit_s=limit_s,
        groups=[[0]],
        on_poll=lambda: _report_progress(context),
    )
    if children[0].exit_code in (EXIT_USAGE_ERROR, EXIT_DISK_FULL):
        raise SeatrialError(f"evaluation failed: {child_ranks.failure_text(0, children[0])}")
    return children[0], time.monotonic() - started


def _report_progress(context: Context) -> None:
    """Report the newest progress line of the evaluation from rank 0, if its log is readable."""
    try:
        log = (context.artifacts_dir / "evaluation.rank0.err").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    progress_lines = [line for line in log.splitlines() if line.startswith(PROGRESS_PREFIX)]
    if context.rank == 0 and progress_lines:
        context.progress(f"evaluation: {progress_lines[-1]}")


def _training_outputs(config: TrainConfig, result: TrainingResult) -> Answers:
    """Exported model, final loss, trained parameters and TensorBoard logs of a successful training."""
    weights = [path for path in (result.out / "final").glob("*.safetensors") if path.stat().st_size]
    reloads = bool(weights) and result.export_loads
    yield value("final_model_reloads", reloads, evidence=result.value("final"))
    losses = [step["loss"] for step in result.steps[-_FINAL_STEPS:] if step.get("loss") is not None]
    if losses:
        yield value("final_loss", fmean(losses))
    if config.use_lora:
        adapters = config.architecture().adapter_parameters(config.lora_targets, config.lora_r)
        yield value("parameters_trained_beyond_adapters", result.value("trained_parameters") - adapters)
    else:
        yield absent("parameters_trained_beyond_adapters", "the config does not use LoRA")
    if config.tensorboard:
        yield value("tensorboard_logs", len(_tensorboard_logs(result.out)))
    else:
        yield absent("tensorboard_logs", "the config requests no TensorBoard logs")


def _evaluation_result(evaluation: ChildResult, seconds: float) -> Answers:
    yield value("evaluation_exit_code", evaluation.exit_code, evidence=evaluation.error)
    if evaluation.error:
        yield unreadable(("rows_unaccounted", "cases", "improved"), "the evaluation failed")
    else:
        yield value("evaluation_seconds", seconds)
        yield from evaluation_observations(evaluation.value)


def evaluation_observations(record: Mapping[str, Any]) -> Answers:
    """Metrics and facts from ``record``, the content of evaluation.json. A score without cases gives no metric.

    Scores are over both splits of the held-out conversations.
    """
    rows, rejected, used = (record["preprocess"][name] for name in ("rows", "rejected", "kept"))
    yield fact("data", record["data"])
    yield fact("rejected_by_reason", rejected)
    unaccounted = rows - sum(rejected.values()) - sum(used.values())
    yield value("rows_unaccounted", unaccounted, evidence={"rows": rows, "rejected": rejected, "used": used})
    yield value("cases", sum(record["cases"].values()), evidence=record["cases"])
    for model in MODELS:
        for name, (count, total) in score.totals(record[model]).items():
            if name in SCORES and total:
                yield value(f"{name}.{model}", 100 * count / total)
    sign_test = record["sign_test"]
    yield value("call_correct_gain", 100 * sign_test["gain"])
    yield value("improved", sign_test["passed"], evidence=sign_test)


def _files(context: Context, out: Path, record: Mapping[str, Any] | None) -> Iterator[Artifact]:
    """Append the scores to summary.txt; yield it with the evaluation, the answers and the TensorBoard logs."""
    if record:
        with (out / "summary.txt").open("a", encoding="utf-8") as summary:
            summary.writelines(f"{line}\n" for line in score.table(record))
    files = [out / name for name in ("summary.txt", "evaluation.json", "answers.jsonl")]
    for path in (*files, *_tensorboard_logs(out)):
        if path.is_file():
            yield context.artifact(path, f"{path.name} of the training")


def _tensorboard_logs(out: Path) -> Sequence[Path]:
    return sorted((out / "tensorboard").rglob("events.out.tfevents.*"))


_PRETRAINED = f"{_results.TRAINED} and pretrained == yes"

CHECK = Check(
    name="train.function_calling",
    title="Function-calling fine-tune of Qwen2-7B (LoRA) on all ranks, with scores",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    declared=(
        *_results.DECLARED,
        metric(
            TOKENS_PER_GPU,
            "> 2000 tokens/s/GPU",  # success criterion of the workload on two nodes with eight H100 each
            "The workload's success criterion is 2000 tokens/s per GPU.",
            "If train.lora is slow on one GPU too, check device.gemm. Otherwise check collectives.all_gather: ZeRO-3 "
            "and FSDP2 gather all weights in every micro-batch. The fact run has the strategy and the slowest rank",
            when=_results.ON_GPU,  # a threshold in a trial file would apply to CPUs too
            speed=True,
        ),
        *_results.ONE_TRAINING,
        metric("evaluation_seconds", unit="s", meaning="duration of the evaluation", speed=True),
        metric(
            "final_model_reloads",
            "yes",
            "final/ is the result of the training: it must exist and load with the trained weights.",
            "Check the free space of the run directory (df -h) and filesystem.shared",
            when=_results.TRAINED,
        ),
        metric(
            "parameters_trained_beyond_adapters",
            "== 0",
            "LoRA trains only the adapters: a value other than 0 means that other weights are trained too.",
            "Compare trained_parameters in metrics.json with config.json (artifacts), peft's version and lora_targets",
            unit="count",
            when=_results.TRAINED,
        ),
        metric(
            "tensorboard_logs",
            ">= 1",
            "The config requests TensorBoard logs; the training wrote none.",
            "pip install tensorboard in the environment of the nodes",
            unit="count",
            when=_results.TRAINED,
        ),
        metric(
            "final_loss",
            "< 0.5 nats",  # success criterion of the workload on glaive-function-calling-v2
            "Mean loss of the last steps. Pretrained weights reach the limit on these rows, random weights do not.",
            "Check the curve loss. If the loss still falls, increase max_steps. If it is flat, check "
            "learning_rate.peak and the fact rejected_by_reason",
            when=_PRETRAINED,
        ),
        metric(
            "rows_unaccounted",
            "== 0",
            "Every row must be used or rejected with a reason.",
            "Report this defect of seatrial with the numbers of rows in the evidence",
            unit="count",
            when=_results.TRAINED,
        ),
        metric(
            "evaluation_exit_code",
            "== 0",
            "The evaluation of the trained model failed.",
            "The evidence has the end of its log. Run the evaluation manually: "
            "seatrial train evaluate CONFIG --out DIR. Out of memory: reduce evaluation.bsz",
            when=_results.TRAINED,
            log_evidence=True,
        ),
        metric(
            "cases",
            ">= 1",
            "No held-out conversations: the model cannot be scored.",
            "Increase data.samples",
            unit="count",
            when=_results.TRAINED,
        ),
        *(
            metric(f"{name}.*", unit="%", meaning=f"{score.CRITERIA[name][0]}; base before, tuned after training")
            for name in SCORES
        ),
        metric("call_correct_gain", unit="%", meaning="call_correct.tuned minus call_correct.base", signed=True),
        metric(
            "improved",
            "yes",
            "The trained model does not answer significantly more cases correctly than the base model: it learned "
            "nothing useful, or the base model was already correct.",
            "Compare the answers of base and tuned in answers.jsonl (artifact). Increase evaluation.cases and "
            "max_steps",
            when=_PRETRAINED,
        ),
    ),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, NAME),
    limit_s=1500.0,  # training and evaluation, each with the option limit_s
    options=WorkloadOptions,
)
