"""Does Oumi train here: SmolLM-135M on 1,000 instructions, on one GPU of each node, with the executable of its own?

Oumi cannot share our environment (it pins versions of torch and transformers). It gets a config,
``COMMAND train -c FILE``, and what it did is read from the trainer_state.json that it leaves.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Options, Place
from seatrial.discover import gpu
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
    Series,
    UsageError,
)
from seatrial.train import disk
from seatrial.util import processes

if TYPE_CHECKING:
    from seatrial.train.train_config import TrainConfig
    from seatrial.train.trainer_state import TrainerState

UNITS = {
    "exit_code": "code",
    "wall_seconds": "s",
    "train_runtime": "s",
    "steps_logged": "count",
    "steps_missing": "count",
    "nonfinite_steps": "count",
    "loss_first": "nats",
    "loss_last": "nats",
    "loss_drop": "nats",
    "checkpoints": "count",
    "loads": "bool",
}
NAME = "sft-smollm-135m"
NO_COMMAND = (
    "no executable of Oumi is configured; where there is one: --set 'checks.train.oumi.options.command="
    "[/opt/oumi/bin/oumi]', or [apptainer, exec, --nv, oumi.sif, oumi]"
)
# What says to a program that it is a rank of something, or where to look for Python's modules: ours are not Oumi's.
_NOT_ITS_OWN = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV"),
}
_LOOK_EVERY_S = 0.5
_SAY_EVERY_S = 15
_LAST_WORDS = 600
_VERSION = re.compile(r"Oumi version: (\S+)")  # oumi-ai/oumi, src/oumi/train.py


class OumiOptions(Options):
    """``command`` is Oumi's executable, word by word: whatever starts it, such as a container's runtime, among them."""

    command: tuple[str, ...] = ()
    config: str = Field(default="", description=f"a training config; by default {NAME}, on a CPU its tiny twin")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE of it, such as model.weights=/models/smollm")
    train_limit_s: float = Field(default=1500, gt=0, description="seconds after which Oumi is ended")


@dataclass(frozen=True)
class Ended:
    """How Oumi ended. ``code`` is None where it was ended because it did not in time."""

    code: int | None
    seconds: float
    log: str


def measure(place: Place, options: OumiOptions) -> Iterator[Observation]:
    """Raises NotApplicable without a command, SeatrialError where Oumi was not in time, found no room on disk, or its
    record cannot be read.
    """
    if not options.command:
        raise NotApplicable(NO_COMMAND)
    if not shutil.which(options.command[0]):
        raise SeatrialError(f"options.command: there is no executable {options.command[0]} on {place.node}")
    device = _device()
    folder = place.out / f"{place.node}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir()
    yield Fact(name="device", value="cuda" if device else "cpu")
    config = _config(options, on_gpu=bool(device))
    yield from _prepared(config, folder, place)
    ended = _train(options, config, folder, device or "", place)
    yield Artifact(path=str((folder / "oumi.log").relative_to(place.run_dir)), title="what Oumi said")
    yield from _how(ended, options, folder, place.node)
    if ended.code == 0:
        yield from _what(config, folder, place)


def _device() -> str | None:
    """The first GPU of this node that we may use, as CUDA_VISIBLE_DEVICES names it; None where there is none.

    Oumi spreads a model over all GPUs that it sees (model.device_map is auto). Raises SeatrialError where nobody knows.
    """
    facts = gpu.read_within()
    if facts.untold:
        raise SeatrialError(facts.untold)
    usable = gpu.visible(facts, os.environ)
    return (usable[0].uuid or str(usable[0].index)) if usable else None


def _config(options: OumiOptions, on_gpu: bool) -> TrainConfig:
    from seatrial.train import train_config

    return train_config.load(options.config or (NAME if on_gpu else f"tiny/{NAME}"), options.overrides)


def _prepared(config: TrainConfig, folder: Path, place: Place) -> Iterator[Observation]:
    """Write Oumi's config, and what it starts from where nothing is named."""
    from seatrial.train import hf, oumi

    file = folder / "oumi.yaml"
    file.write_text(oumi.rendered(config, folder), encoding="utf-8")
    yield Artifact(path=str(file.relative_to(place.run_dir)), title="the config that Oumi was given")
    weights, path = config.model.weights, config.data.path
    yield Fact(name="weights", value="random" if weights == "random" else "hub" if _on_hub(weights) else "path")
    yield Fact(name="data", value="generated" if path is None else "hub" if _on_hub(path) else "path")
    place.note("preparing")
    hf.prepare_foreign(config, folder)


def _on_hub(name: str | None) -> bool:
    return bool(name and name.startswith("hub:"))


def _train(options: OumiOptions, config: TrainConfig, folder: Path, device: str, place: Place) -> Ended:
    names = [name for name in os.environ if name in _NOT_ITS_OWN or name.startswith("TORCHELASTIC_")]
    env = {"CUDA_VISIBLE_DEVICES": device, "DO_NOT_TRACK": "1"}  # a trial tells nobody, Oumi its makers
    if not any(map(_on_hub, (config.model.weights, config.data.path, config.data.tokenizer))):
        env["HF_HUB_OFFLINE"] = "1"  # else it asks for what it has, and waits where no network answers
    log, started = folder / "oumi.log", time.monotonic()
    argv = ["env", *(f"--unset={name}" for name in names), *options.command, "train", "-c", str(folder / "oumi.yaml")]
    child = processes.start(argv, env=env, stdout=log, stderr=log)
    try:
        while (code := child.poll()) is None and time.monotonic() - started < options.train_limit_s:
            place.note(f"oumi train, {(time.monotonic() - started) // _SAY_EVERY_S * _SAY_EVERY_S:.0f} s")
            time.sleep(_LOOK_EVERY_S)
    finally:
        processes.stop(child)
    return Ended(code, time.monotonic() - started, log.read_text(encoding="utf-8", errors="replace"))


def _how(ended: Ended, options: OumiOptions, folder: Path, node: str) -> Iterator[Observation]:
    told = _VERSION.search(ended.log)
    words = ended.log.strip()[-_LAST_WORDS:]
    yield Fact(name="oumi", value=told[1] if told else "it did not say its version")
    yield Fact(name="last_words", value=words)
    if ended.code is None:
        raise SeatrialError(f"Oumi did not end within {options.train_limit_s:g} s; its last words: {words}")
    if ended.code and disk.told_in(words):
        raise SeatrialError(f"Oumi found no room on disk. {disk.room(folder)}. {disk.REMEDY}; its last words: {words}")
    yield _metric("exit_code", ended.code, node)
    yield _metric("wall_seconds", ended.seconds, node)


def _what(config: TrainConfig, folder: Path, place: Place) -> Iterator[Observation]:
    from seatrial.train import hf, oumi, trainer_state

    result = folder / oumi.RESULT
    path = result / trainer_state.NAME
    state = trainer_state.read(path)
    yield Artifact(path=str(path.relative_to(place.run_dir)), title="trainer_state.json")
    yield from _learned(state, config.max_steps, place.node)
    whole = [one.parent.name for one in result.glob(f"checkpoint-*/{trainer_state.NAME}") if _weights(one.parent)]
    yield Fact(name="checkpoints_found", value=sorted(whole))
    yield _metric("checkpoints", len(whole), place.node)
    place.note("loading the result")
    try:
        yield Fact(name="says", value=hf.speak(result))
    except UsageError:  # our own environment lacks what it takes
        raise
    except SeatrialError as error:
        yield Fact(name="says", value=str(error))
        yield _metric("loads", 0, place.node)
    else:
        yield _metric("loads", 1, place.node)


def _weights(folder: Path) -> Sequence[Path]:
    return [path for path in folder.glob("*.safetensors") if path.stat().st_size]


def _learned(state: TrainerState, wanted: int, node: str) -> Iterator[Observation]:
    """What the record says. Pure. Without its summary, or with too few steps, what they would tell is not measured."""
    losses = [(step.step, step.loss) for step in state.steps if step.finite]
    if losses:
        x, y = zip(*losses, strict=True)
        yield Series(name="loss", subject=node, x=x, y=y, x_unit="step", y_unit="nats")
    yield _metric("steps_logged", len(state.steps), node)
    yield _metric("steps_missing", max(0, wanted - state.global_step), node)
    yield _metric("nonfinite_steps", sum(not step.finite for step in state.steps), node)
    if state.summary:
        yield _metric("train_runtime", state.summary.train_runtime, node)
    if state.thirds:
        first, last = state.thirds
        yield _metric("loss_first", first, node)
        yield _metric("loss_last", last, node)
        yield _metric("loss_drop", first - last, node)


def _metric(name: str, value: float, node: str) -> Metric:
    return Metric(name=name, value=value, unit=UNITS[name], subject=node)


_LOOK = "Open oumi.log and oumi.yaml in this check's artifacts, and run the same by hand: COMMAND train -c oumi.yaml"

CHECK = Check(
    name="train.oumi",
    title="SmolLM-135M fine-tuned by Oumi, on one GPU",
    phase=Phase.SINGLE_GPU,
    scope=Scope.NODE,  # a program of its own, in an environment of its own: no rank of ours takes part
    metrics=UNITS,
    rules=(
        Rule(
            metric="exit_code",
            shows=("last_words",),
            expect="== 0",
            why="Oumi did not end well: what a user of it would have seen.",
            fix=_LOOK,
        ),
        Rule(
            metric="steps_missing",
            expect="== 0",
            why="Fewer steps were taken than were asked for.",
            fix=_LOOK,
        ),
        Rule(
            metric="nonfinite_steps",
            expect="== 0",
            why="A loss or gradient that is infinite or NaN means wrong arithmetic, memory or precision.",
            fix="Look at train.cnn and train.ddp, which are known to be stable, and at `nvidia-smi -q -d ECC`.",
        ),
        Rule(
            metric="loss_drop",
            expect="> 0 nats",
            why="The median loss of the last third of the steps is to be below that of the first: else nothing is "
            "learned from data that can be learned.",
            fix="Compare train.sft_smollm, the same training by our own stack. Falls it there? Then it is Oumi's.",
        ),
        Rule(
            metric="checkpoints",
            shows=("checkpoints_found",),
            expect=">= 1",
            why="A training whose checkpoints are not there, or without weights, cannot be gone on with.",
            fix="Look at the space and the permissions where the run directory lies: df -h; ls -ld",
        ),
        Rule(
            metric="loads",
            shows=("says",),
            expect="== 1 bool",
            why="What was trained must load, and compute finite numbers.",
            fix=f"The fact says tells why. {_LOOK}",
        ),
    ),
    measure=measure,
    limit_s=2100,  # train_limit_s, data before and loading after it
    options=OumiOptions,
    performance=("wall_seconds", "train_runtime"),
)
