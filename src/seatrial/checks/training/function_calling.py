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

from seatrial.bench.child_answer import NO_ROOM, REFUSED
from seatrial.checks.base import Check, Place
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._workload import Trained, WorkloadOptions
from seatrial.model import CLUSTER, Artifact, Fact, Metric, Observation, Phase, Rule, Scope, SeatrialError, UsageError

if TYPE_CHECKING:
    from seatrial.bench.fresh_ranks import Answer
    from seatrial.train.train_config import TrainConfig

NAME = "toolcalls-qwen2-7b"
SCORES = ("json_valid", "schema_valid", "names", "arguments", "full", "irrelevance")
MODELS = {"base": "before the training", "tuned": "after it"}
UNITS = {
    **_results.units(),
    "loss_end": "nats",
    "final": "bool",
    "trained_beyond_adapters": "count",
    "rows": "count",
    "rows_rejected": "count",
    "rows_unaccounted": "count",
    "tensorboard_logs": "count",
    "evaluation_exit_code": "",
    "evaluation_seconds": "s",
    "cases": "count",
    **{f"{score}.{model}": "%" for score in SCORES for model in MODELS},
    "full_delta": "%",
    "better": "bool",
}
# What random weights need, on GPUs: enough steps to time, data for them, and answers to score.
# Their learning rate is for a model that knows nothing yet; the config's is for one that is to be changed little.
SHORT = (
    *("max_steps=10", "settle_steps=3", "grad_accum=1", "data.samples=2000", "checkpoint.every=0"),
    *("learning_rate.peak=1e-3", "evaluation.cases=8", "evaluation.max_new_tokens=48"),
)
# ZeRO-3 and FSDP2 share weights among ranks: one has nobody to share with
ALONE = ("parallel.strategy=ddp", "parallel.deepspeed=null")
ASKED = "asked "  # what a line of the evaluation begins with (train.toolcalls.evaluate)
_LAST_STEPS = 3  # of which the loss at the end is the mean: one batch's strays


@dataclass(frozen=True)
class Wanted:
    """The training as it is asked for here.

    ``own``: the overrides that are the check's, with the reason for each. ``strategy``: what is asked for without them.
    """

    name: str
    config: TrainConfig
    overrides: tuple[str, ...]
    own: dict[str, str]
    strategy: str


def wanted(place: Place, options: WorkloadOptions) -> Wanted:
    """Raises UsageError for a config, or an override, that is none, or is of something else."""
    from seatrial.train import train_config

    name = options.config or _workload.config_for(place, NAME)
    own: dict[str, str] = {}
    plain = train_config.load(name, options.overrides)
    if place.device.startswith("cuda") and plain.model.weights == "random":
        own |= dict.fromkeys(SHORT, "random weights: what shows that it works, and how fast")
    if place.world_size == 1:
        own |= dict.fromkeys(ALONE, "one rank: there is nobody to share weights with")
    overrides = (*own, *options.overrides)
    config = train_config.load(name, overrides)
    if config.data.layout != "toolcalls":
        raise UsageError(f"{name} trains on {config.data.layout}: only function calling can be asked for afterwards")
    return Wanted(name, config, overrides, own, plain.parallel.strategy)


def measure(place: Place, options: WorkloadOptions) -> Iterator[Observation]:
    """Yields on rank 0. Raises SeatrialError where nothing could be trained."""
    facts, task = _results.here(place), wanted(place, options)
    (trained,) = _workload.train(place, "toolcalls", task.name, task.overrides, limit_s=options.limit_s)
    answer, seconds = (None, 0.0) if trained.problem else _evaluate(place, task, trained.out, options.limit_s)
    if place.rank:
        return
    yield from facts
    yield _results.settings_fact(options)
    yield Fact(name="pretrained", value=_word(task.config.model.weights != "random"))
    yield Fact(name="use_lora", value=_word(task.config.use_lora))
    yield Fact(name="tensorboard", value=_word(task.config.tensorboard))
    yield Fact(name="strategy_requested", value=task.strategy)
    yield Fact(name="strategy", value=trained.value("strategy"))
    yield Fact(name="overrides", value=task.own)
    yield from _results.judged({"toolcalls": trained})
    yield from _results.each(place, trained)
    if answer:
        yield from _left(task.config, trained)
        yield from _scored(answer, seconds)
        yield from _files(place, trained.out, answer.value)


def _word(holds: bool) -> str:
    """As rules name it, in ``where``."""
    return "yes" if holds else "no"


def _evaluate(place: Place, task: Wanted, out: Path, limit_s: float) -> tuple[Answer, float]:
    """What the first rank's evaluation answered, and after how many seconds. Called by all ranks together.

    Raises SeatrialError where it is the config or the disk that it was for.
    """
    from seatrial.bench import fresh_ranks
    from seatrial.train import train_config

    place.note("asking the model, before and after")
    started = time.monotonic()
    answers = fresh_ranks.ask_anew(
        "seatrial.train.function_calling.child",
        {"config": str(train_config.find(task.name)), "overrides": list(task.overrides), "out": str(out)},
        {},
        device=place.device,
        local_rank=place.local_rank,
        out=place.out / "evaluation",
        limit_s=limit_s,
        groups=[[0]],
        look=lambda: _tell(place),
    )
    if answers[0].code in (REFUSED, NO_ROOM):
        raise SeatrialError(f"what was trained was not asked: {fresh_ranks.told(0, answers[0])}")
    return answers[0], time.monotonic() - started


def _tell(place: Place) -> None:
    """Where the evaluation is: its newest line about that."""
    try:
        lines = (place.out / "evaluation.rank0.err").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # on another node
        return
    if place.rank == 0 and (asked := [line for line in lines if line.startswith(ASKED)]):
        place.note(f"evaluation: {asked[-1]}")


def _left(config: TrainConfig, trained: Trained) -> Iterator[Observation]:
    """What a training that ended well has left, and whether it trained what it should have."""
    final = trained.out / "final"
    weights = [path for path in final.glob("*.safetensors") if path.stat().st_size]
    yield Fact(name="final", value=trained.value("final"))
    yield _metric("final", bool(weights) and trained.reloaded)
    losses = [step["loss"] for step in trained.steps[-_LAST_STEPS:] if step.get("loss") is not None]
    if losses:
        yield _metric("loss_end", fmean(losses))
    if config.use_lora:
        adapters = config.architecture().adapter_parameters(config.lora_targets, config.lora_r)
        yield _metric("trained_beyond_adapters", trained.value("trained_parameters") - adapters)
    if config.tensorboard:
        yield _metric("tensorboard_logs", len(list(_tensorboard(trained.out))))


def _scored(answer: Answer, seconds: float) -> Iterator[Observation]:
    yield Fact(name="evaluation_problem", value=answer.problem or "none")
    yield _metric("evaluation_exit_code", answer.code)
    if not answer.problem:
        yield _metric("evaluation_seconds", seconds)
        yield from figures(answer.value)


def figures(record: Mapping[str, Any]) -> Iterator[Observation]:
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
    yield _metric("full_delta", 100 * record["gate"]["delta"])
    yield _metric("better", record["gate"]["passed"])


def _files(place: Place, out: Path, record: Mapping[str, Any] | None) -> Iterator[Artifact]:
    """The logs for TensorBoard, the answers, and a summary to read."""
    summary = out / "summary.txt"
    summary.write_text("".join(f"{line}\n" for line in _summary(out, record)), encoding="utf-8")
    kept = [summary, out / "evaluation.json", out / "answers.jsonl", *_tensorboard(out)]
    for path in kept:
        if path.is_file():
            yield Artifact(path=str(path.relative_to(place.run_dir)), title=f"{path.name} of the training")


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
    return Metric(name=name, value=value, unit=UNITS[name], subject=CLUSTER)


_TRAINED = {"trained": "yes"}
_PRETRAINED = {"trained": "yes", "pretrained": "yes"}

CHECK = Check(
    name="train.toolcalls",
    title="Function calling: Qwen2-7B with LoRA, trained by all processes and scored",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    metrics=UNITS,
    rules=(
        *_results.RULES,
        Rule(
            metric="final",
            shows=("final",),
            expect="== 1 bool",
            where=_TRAINED,
            why="final/ is what the training is for: it must be there, and load as it was trained.",
            fix="The fact final tells what reading it again showed. Look at the space where the run directory lies: "
            "df -h; and at filesystem.shared",
        ),
        Rule(
            metric="trained_beyond_adapters",
            expect="== 0",
            where={**_TRAINED, "use_lora": "yes"},
            why="LoRA trains its adapters, and nothing of the base model: other counts mean other weights.",
            fix="Compare trained_parameters with config.json (artifacts); peft's version; lora_targets",
        ),
        Rule(
            metric="tensorboard_logs",
            expect=">= 1",
            where={**_TRAINED, "tensorboard": "yes"},
            why="The training was to leave logs for TensorBoard.",
            fix="pip install tensorboard, in the environment of the nodes",
        ),
        Rule(
            metric="tokens_per_second_per_gpu",
            expect="> 2000 tokens/s/GPU",  # the success criterion of the workload, of two nodes of eight H100
            where={**_TRAINED, "device": "cuda"},  # here, and not in a trial: no CPU is held to it
            why="Who asks for this training expects so many of each GPU.",
            fix="Is train.lora slow on one GPU as well, look at device.gemm; else at collectives.all_gather: ZeRO-3 "
            "and FSDP2 gather all weights in every micro-batch. The fact run names strategy and slowest rank",
        ),
        Rule(
            metric="loss_end",
            expect="< 0.5 nats",  # the success criterion of the workload, on glaive-function-calling-v2
            where=_PRETRAINED,
            why="Pretrained weights get there on these rows. Random ones are not held to it.",
            fix="Look at the curve loss. Still falling: more max_steps. Flat: learning_rate.peak; the fact rejected",
        ),
        Rule(
            metric="rows_unaccounted",
            shows=("rejected", "kept"),
            expect="== 0",
            where=_TRAINED,
            why="Every row is used, or rejected for a reason that is counted: none may get lost.",
            fix="seatrial's own defect: report it, with the facts rejected and kept",
        ),
        Rule(
            metric="evaluation_exit_code",
            shows=("evaluation_problem",),
            expect="== 0",
            where=_TRAINED,
            why="What was trained could not be asked.",
            fix="The fact evaluation_problem has its last words. By hand: seatrial evaluate CONFIG --out DIR. Out "
            "of memory: evaluation.bsz",
        ),
        Rule(
            metric="cases",
            shows=("cases",),
            expect=">= 1",
            where=_TRAINED,
            why="Without a conversation that was kept from training, nothing is known of what was learned.",
            fix="More data.samples",
        ),
        Rule(
            metric="better",
            shows=("gate",),
            expect="== 1 bool",
            where=_PRETRAINED,
            why="The trained model must be right where the base model is not, by more than chance: else nothing of use "
            "was learned, or the base model knew it all.",
            fix="Compare answers.jsonl (artifacts), base and tuned. More evaluation.cases, more max_steps",
        ),
    ),
    measure=measure,
    foretold=lambda options: _results.foretold(options, NAME),
    limit_s=1500.0,  # a training and an evaluation, each of which may take the option limit_s
    options=WorkloadOptions,
    performance=_results.PERFORMANCE,
)
