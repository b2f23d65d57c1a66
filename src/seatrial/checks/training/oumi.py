"""Does Oumi train here: SmolLM-135M on 1,000 instructions, on one GPU of each node, by Oumi's own executable?

A preset of train.command: the command is ``COMMAND train -c FILE`` with a config made by seatrial, steps and losses
are those of the trainer_state.json that Oumi leaves. Oumi pins versions of torch and transformers, so that it needs an
environment of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue

from seatrial.checks.base import Check, Context, Options
from seatrial.checks.training import command
from seatrial.checks.training.command import Run
from seatrial.model import (
    Artifact,
    Fact,
    Metric,
    NotApplicable,
    Observation,
    Phase,
    Rule,
    Scope,
    SeatrialError,
    UsageError,
)

if TYPE_CHECKING:
    from seatrial.train.train_config import TrainConfig

METRICS = {**command.RUN_METRICS, "checkpoints": "count", "loads": "bool"}
NAME = "sft-smollm-135m"
NO_COMMAND = (
    "no executable of Oumi is configured; where there is one: --set 'checks.train.oumi.options.command="
    "[/opt/oumi/bin/oumi]', or [apptainer, exec, --nv, oumi.sif, oumi]"
)
_VERSION = re.compile(r"Oumi version: (\S+)")  # oumi-ai/oumi, src/oumi/train.py


class OumiOptions(Options):
    """``command`` starts Oumi: its executable, or a container runtime with its arguments."""

    command: tuple[str, ...] = ()
    config: str = Field(default="", description=f"a training config; by default {NAME}, on a CPU its tiny twin")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE of it, such as model.weights=/models/smollm")
    train_limit_s: float = Field(default=1500, gt=0, description="seconds after which Oumi is ended")


def measure(context: Context, options: OumiOptions) -> Iterator[Observation]:
    """Raises NotApplicable without a command, SeatrialError where Oumi does not end in time, finds no room on disk, or
    leaves a record that cannot be read.
    """
    if not options.command:
        raise NotApplicable(NO_COMMAND)
    command.require_executable(options.command[0], None, context.node)
    gpus = command.visible_gpus()
    folder = command.new_folder(context, context.node)
    yield Fact(name="device", value="cuda" if gpus else "cpu")
    config = _config(options, on_gpu=bool(gpus))
    yield from _prepared(config, folder, context)
    run = Run(
        name="Oumi",
        subject=context.node,
        argv=(*options.command, "train", "-c", str(folder / "oumi.yaml")),
        folder=folder,
        log=folder / "oumi.log",
        env=_environment(config, command.cuda_device(gpus[0]) if gpus else ""),
    )
    ((_, ended),) = command.run_all([run], options.train_limit_s, context)
    yield Artifact(path=str(run.log.relative_to(context.run_dir)), title="Oumi's log")
    version = _VERSION.search(ended.log_text)
    yield Fact(name="oumi", value=version[1] if version else "no version in its log")
    yield Fact(name="last_words", value=ended.log_tail)
    yield Fact(name="exit_reason", value=command.exit_reason(ended.exit_code))
    yield from command.exit_metrics(run, ended, options.train_limit_s)
    if ended.exit_code == 0:
        yield from _result(config, folder, context)


def _config(options: OumiOptions, on_gpu: bool) -> TrainConfig:
    from seatrial.train import train_config

    return train_config.load(options.config or (NAME if on_gpu else f"tiny/{NAME}"), options.overrides)


def _prepared(config: TrainConfig, folder: Path, context: Context) -> Iterator[Observation]:
    """Write Oumi's config, its rows, and its model where no weights are configured."""
    from seatrial.train import hf, oumi

    file = folder / "oumi.yaml"
    file.write_text(oumi.render(config, folder), encoding="utf-8")
    yield Artifact(path=str(file.relative_to(context.run_dir)), title="Oumi's config")
    weights, path = config.model.weights, config.data.path
    yield Fact(name="weights", value="random" if weights == "random" else "hub" if _on_hub(weights) else "path")
    yield Fact(name="data", value="generated" if path is None else "hub" if _on_hub(path) else "path")
    context.progress("preparing")
    rejected: Mapping[str, JsonValue] = hf.prepare_external_trainer(config, folder)
    if rejected:
        yield Fact(name="rows_rejected", value=dict(rejected))


def _on_hub(name: str | None) -> bool:
    return bool(name and name.startswith("hub:"))


def _environment(config: TrainConfig, device: str) -> dict[str, str]:
    """One GPU, since Oumi spreads a model over all that it sees (model.device_map is auto), and no telemetry."""
    offline = not any(map(_on_hub, (config.model.weights, config.data.tokenizer)))
    # without it Oumi asks the Hub for files that it has, and waits where no network answers
    return {"CUDA_VISIBLE_DEVICES": device, "DO_NOT_TRACK": "1", **({"HF_HUB_OFFLINE": "1"} if offline else {})}


def _result(config: TrainConfig, folder: Path, context: Context) -> Iterator[Observation]:
    from seatrial.train import hf, oumi, trainer_state

    result = folder / oumi.OUTPUT_FOLDER
    path = result / trainer_state.FILE_NAME
    state = trainer_state.read(path)
    yield Artifact(path=str(path.relative_to(context.run_dir)), title="trainer_state.json")
    yield from command.loss_observations(state, config.max_steps, context.node)
    saved = [file.parent for file in result.glob(f"checkpoint-*/{trainer_state.FILE_NAME}")]
    complete = [one.name for one in saved if any(file.stat().st_size for file in one.glob("*.safetensors"))]
    yield Fact(name="checkpoints_found", value=sorted(complete))
    yield Metric(name="checkpoints", value=len(complete), unit="count", subject=context.node)
    context.progress("loading the result")
    loads = 1
    try:
        answer = hf.generate_text(result)
    except UsageError:  # our own environment lacks a package
        raise
    except SeatrialError as error:
        loads, answer = 0, str(error)
    yield Fact(name="says", value=answer)
    yield Metric(name="loads", value=loads, unit="bool", subject=context.node)


_LOOK = "Open oumi.log and oumi.yaml in this check's artifacts, and run the same by hand: COMMAND train -c oumi.yaml"

CHECK = Check(
    name="train.oumi",
    title="SmolLM-135M fine-tuned by Oumi, on one GPU",
    phase=Phase.SINGLE_GPU,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=(
        Rule(
            metric="exit_code",
            evidence_facts=("exit_reason", "last_words"),
            expect="== 0",
            meaning="Oumi failed.",
            fix=_LOOK,
        ),
        Rule(
            metric="steps_missing",
            expect="== 0",
            meaning="Fewer steps were taken than were asked for.",
            fix=_LOOK,
        ),
        Rule(
            metric="nonfinite_steps",
            expect="== 0",
            meaning="A loss or gradient that is infinite or NaN means wrong arithmetic, memory or precision.",
            fix="Look at train.cnn and train.ddp, which are known to be stable, and at `nvidia-smi -q -d ECC`.",
        ),
        Rule(
            metric="loss_drop",
            expect="> 0 nats",
            meaning="The median loss of the last third of the steps is to be below that of the first: else nothing is "
            "learned from data that can be learned.",
            fix="Compare train.sft_smollm, the same training by our own stack. Falls it there? Then it is Oumi's.",
        ),
        Rule(
            metric="checkpoints",
            evidence_facts=("checkpoints_found",),
            expect=">= 1",
            meaning="A training whose checkpoints are not there, or without weights, cannot be gone on with.",
            fix="Look at the space and the permissions where the run directory lies: df -h; ls -ld",
        ),
        Rule(
            metric="loads",
            evidence_facts=("says",),
            expect="== 1 bool",
            meaning="What was trained must load, and compute finite numbers.",
            fix=f"The fact says tells why. {_LOOK}",
        ),
    ),
    measure=measure,
    limit_s=2100,  # train_limit_s, data before and loading after it
    options=OumiOptions,
    performance_metrics=("wall_seconds", "train_runtime"),
)
