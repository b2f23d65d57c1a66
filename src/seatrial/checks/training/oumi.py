"""Fine-tunes SmolLM-135M on 1,000 instructions with Oumi, on one GPU of each node.

A special case of train.command: the check runs ``COMMAND train -c FILE`` with a generated config and reads steps and
losses from Oumi's trainer_state.json. Oumi pins versions of torch and transformers and needs its own environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue

from seatrial.checks.check import Check, Context, Options, SkipIf
from seatrial.checks.declare import Answers, fact, metric, unreadable, value
from seatrial.checks.training import command
from seatrial.checks.training.command import Run
from seatrial.model import NotApplicable, Phase, Scope, SeatrialError, UsageError

if TYPE_CHECKING:
    from seatrial.train.train_config import TrainConfig

NAME = "sft-smollm-135m"
NO_COMMAND = (
    "no Oumi executable configured; example: --set 'checks.train.oumi.options.command="
    "[/opt/oumi/bin/oumi]', or [apptainer, exec, --nv, oumi.sif, oumi]"
)
_VERSION = re.compile(r"Oumi version: (\S+)")  # oumi-ai/oumi, src/oumi/train.py


class OumiOptions(Options):
    """Options of train.oumi."""

    command: tuple[str, ...] = Field(
        default=(), description="Oumi's executable, or a container runtime with its arguments"
    )
    config: str = Field(default="", description=f"a training config; default {NAME}, on a CPU tiny/{NAME}")
    overrides: tuple[str, ...] = Field(
        default=(), description="KEY=VALUE for the config, such as model.weights=/models/smollm"
    )
    train_limit_s: float = Field(default=1500, gt=0, description="time limit of Oumi, seconds")


def measure(context: Context, options: OumiOptions) -> Answers:
    """Run Oumi and read its results.

    Raises NotApplicable without a command, and UsageError if the config is invalid or seatrial's environment lacks a
    package. Raises SeatrialError if Oumi cannot start, exceeds its time limit, fills the disk or writes no readable
    trainer_state.json.
    """
    from seatrial.train import train_config

    if not options.command:
        raise NotApplicable(NO_COMMAND)
    command.require_executable(options.command[0], None, context.node)
    gpus = command.visible_gpus()
    folder = command.new_folder(context, context.node)
    yield fact("device", "cuda" if gpus else "cpu")
    config = train_config.load(options.config or (NAME if gpus else f"tiny/{NAME}"), options.overrides)
    yield from _write_inputs(config, folder, context)
    run = Run(
        name="Oumi",
        subject=context.node,
        gpus=gpus[:1],
        argv=(*options.command, "train", "-c", str(folder / "oumi.yaml")),
        folder=folder,
        log=folder / "oumi.log",
        env=_environment(config, command.cuda_device(gpus[0]) if gpus else ""),
    )
    [(_, result)] = command.run_all([run], options.train_limit_s, context)
    yield context.artifact(run.log, "Oumi's log")
    version = _VERSION.search(result.log_text)
    yield fact("oumi_version", version[1] if version else "not in the log")
    yield from command.metrics_of_process(run, result, options.train_limit_s)
    if result.exit_code:
        yield unreadable("*", "Oumi failed")
    else:
        yield from _results_of_training(config, folder, context)


def _write_inputs(config: TrainConfig, folder: Path, context: Context) -> Answers:
    """Write Oumi's config and rows, and a model with random weights if no weights are configured."""
    from seatrial.train import hf, oumi

    file = folder / "oumi.yaml"
    file.write_text(oumi.render(config, folder), encoding="utf-8")
    yield context.artifact(file, "Oumi's config")
    weights, path = config.model.weights, config.data.path
    yield fact("weights", "random" if weights == "random" else "hub" if _on_hub(weights) else "path")
    yield fact("data", "generated" if path is None else "hub" if _on_hub(path) else "path")
    context.progress("preparing")
    rejected: Mapping[str, JsonValue] = hf.prepare_external_trainer(config, folder)
    if rejected:
        yield fact("rows_rejected", rejected)


def _on_hub(name: str | None) -> bool:
    return bool(name and name.startswith("hub:"))


def _environment(config: TrainConfig, device: str) -> dict[str, str]:
    """Environment variables of Oumi. ``device``: the only visible GPU; empty on a CPU.

    Oumi distributes a model over all visible GPUs (model.device_map is auto).
    """
    offline = not any(map(_on_hub, (config.model.weights, config.data.tokenizer)))
    # without HF_HUB_OFFLINE Oumi requests local files from the Hub and waits if the network does not answer
    return {"CUDA_VISIBLE_DEVICES": device, "DO_NOT_TRACK": "1", **({"HF_HUB_OFFLINE": "1"} if offline else {})}


def _results_of_training(config: TrainConfig, folder: Path, context: Context) -> Answers:
    """Losses, checkpoints, and whether the trained model loads and generates text."""
    from seatrial.train import hf, oumi, trainer_state

    output = folder / oumi.OUTPUT_FOLDER
    path = output / trainer_state.FILE_NAME
    state = trainer_state.read(path)
    yield context.artifact(path, "trainer_state.json")
    yield from command.steps_and_losses(state, config.max_steps, context.node)
    folders = [file.parent for file in output.glob(f"checkpoint-*/{trainer_state.FILE_NAME}")]
    complete = [
        checkpoint.name
        for checkpoint in folders
        if any(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    ]
    yield value("checkpoints", len(complete))
    context.progress("loading the trained model")
    try:
        reloads, text = True, hf.generate_text(output)
    except UsageError:  # seatrial's environment lacks a package
        raise
    except SeatrialError as error:
        reloads, text = False, str(error)
    yield value("final_model_reloads", reloads, evidence=text)


_SEE_LOG = "Read oumi.log and oumi.yaml (artifacts) and run the command manually: COMMAND train -c oumi.yaml"

CHECK = Check(
    measure=measure,
    name="train.oumi",
    title="Fine-tune of SmolLM-135M with Oumi on one GPU",
    phase=Phase.SINGLE_GPU,
    scope=Scope.NODE,
    limit_s=2100,  # train_limit_s, plus data preparation and loading the result
    options=OumiOptions,
    skip_if=(SkipIf.NO_COMMAND,),
    declared=(
        metric("exit_code", "== 0 code", "Oumi failed (128 + N: signal N).", _SEE_LOG, log_evidence=True),
        metric("steps_missing", "== 0 count", "The training ran fewer steps than configured.", _SEE_LOG),
        metric(
            "nonfinite_steps",
            "== 0 count",
            "The loss or gradient norm is infinite or NaN: the training diverged, or a GPU computes wrongly.",
            "Compare train.sft_smollm, the same training without Oumi. If it fails too: `nvidia-smi -q -d ECC`.",
        ),
        metric(
            "loss_drop",
            "> 0 nats",
            "The median loss of the last third of the steps is not below that of the first third, although the data "
            "is learnable.",
            "Compare train.sft_smollm, the same training without Oumi. If its loss falls, the cause is Oumi.",
        ),
        metric(
            "checkpoints",
            ">= 1 count",
            "No checkpoint with weights exists: the training cannot be resumed.",
            "Check free space and permissions of the run directory: df -h; ls -ld",
        ),
        metric(
            "final_model_reloads",
            "yes",
            "The trained model must load and compute finite numbers.",
            f"The evidence is the error. {_SEE_LOG}",
        ),
        *command.COMMON,
    ),
)
