"""Does a small net learn to read digits on this GPU, in time, and is it the same net after saving and loading?

Every process trains by itself, all at once: a bad GPU is named by its subject.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Context, Options
from seatrial.model import Artifact, Fact, Metric, Observation, Phase, Rule, Scope, Series

if TYPE_CHECKING:
    from seatrial.train.images import Images

UNITS = {
    "accuracy": "%",
    "seconds": "s",
    "images_per_second": "images/s",
    "reload_accuracy_difference": "%",
    "nonfinite_steps": "count",
    "loss_first": "nats",
    "loss_last": "nats",
}


class CnnOptions(Options):
    """``data``: a folder with MNIST's four IDX files, plain or gzipped; without it scikit-learn's digits are used."""

    data: str | None = None
    epochs: int = Field(default=5, ge=1)
    batch: int = Field(default=128, ge=2)


def measure(context: Context, options: CnnOptions) -> Iterator[Observation]:
    """Train, save, load back, and write metrics.json beside the model.

    Raises SeatrialError on incomplete data, and where the options make too few steps to learn anything.
    """
    from seatrial.train import cnn, images
    from seatrial.util import files

    start = time.monotonic()
    data = images.load(options.data)
    counts = {"train": len(data.train_labels), "held_out": len(data.test_labels)}
    described = {"source": data.source, **counts, "does_not_show": data.limitation or None}
    facts = {**cnn.describe_device(context.device), "dataset": data.name, "data": described, "how": _how(data, options)}
    yield from (Fact(name=name, value=value) for name, value in facts.items())
    cnn.require_min_steps(len(data.train_labels), options.epochs, options.batch)

    net = cnn.build(context.device)
    training = cnn.train(net, data, context.device, options.epochs, options.batch, context.progress)
    losses = [loss for loss in training.losses if math.isfinite(loss)]
    values = {"nonfinite_steps": float(len(training.losses) - len(losses))}
    values |= {"images_per_second": training.images / training.seconds}
    values |= {"loss_first": losses[0], "loss_last": losses[-1]} if losses else {}
    yield from (_metric(context, name, value) for name, value in values.items())
    if losses:
        numbers = tuple(float(step) for step in range(1, len(losses) + 1))
        yield Series(name="loss", subject=context.subject, x=numbers, y=tuple(losses), x_unit="step", y_unit="nats")

    context.progress("save, load, evaluate")
    folder = context.artifacts_dir / context.subject.replace("/", "_")
    folder.mkdir(exist_ok=True)
    model = folder / "model.pt"
    cnn.save(net, model)
    accuracy = cnn.accuracy(net, data, context.device)
    reloaded = cnn.accuracy(cnn.load(model, context.device), data, context.device)
    results = {
        "accuracy": accuracy,
        "reload_accuracy_difference": abs(accuracy - reloaded),
        "seconds": time.monotonic() - start,
    }
    yield from (_metric(context, name, value) for name, value in results.items())

    record = {"subject": context.subject, "options": options.model_dump(), **facts, "metrics": values | results}
    files.write_json(folder / "metrics.json", record)
    for file, title in ((model, "model"), (folder / "metrics.json", "metrics")):
        yield Artifact(path=str(file.relative_to(context.run_dir)), title=f"{title} of {context.subject}")


def _how(data: Images, options: CnnOptions) -> str:
    """What was measured, how often and on what, in a sentence."""
    steps = options.epochs * math.ceil(len(data.train_labels) / options.batch)
    return (
        f"Each process trains a net of its own, all at the same time, on {data.source}: one run from a fixed seed of "
        f"{steps} steps, {options.epochs} epochs of {len(data.train_labels)} pictures in batches of {options.batch}; "
        f"accuracy is of {len(data.test_labels)} pictures held out; images_per_second is over all steps, "
        f"warm-up included"
    )


def _metric(context: Context, name: str, value: float) -> Metric:
    return Metric(name=name, value=value, unit=UNITS[name], subject=context.subject)


CHECK = Check(
    name="train.cnn",
    title="Digits read by a small convolutional net",
    phase=Phase.SINGLE_GPU,
    scope=Scope.GPU,
    metrics=UNITS,
    rules=(
        Rule(
            metric="nonfinite_steps",
            expect="== 0",
            meaning="A loss that is infinite or NaN in so small a net, from fixed seeds, means wrong arithmetic or memory.",
            fix="Run it on this GPU again. The same again, where other GPUs pass: look at "
            "`nvidia-smi -q -d ECC,ROW_REMAPPER` and `dmesg | grep -i xid`. On all of them: look at torch and driver.",
        ),
        Rule(
            metric="accuracy",
            expect="> 95 %",
            meaning="Seeds and data are fixed and known to suffice: a net that learns less was computed wrongly or fed "
            "damaged data.",
            fix="Compare with the other GPUs. One alone is low: look at `nvidia-smi -q -d ECC,ROW_REMAPPER` there. "
            "All are low: compare the checksums of the data files with those of their source.",
        ),
        Rule(
            metric="seconds",
            expect="< 180 s",
            meaning="From reading the data to the net loaded back: three minutes are many times what a healthy GPU needs.",
            fix="Compare images_per_second between GPUs. One alone is slow: `nvidia-smi -q -d PERFORMANCE,CLOCK`. "
            "All are fast, yet seconds are many: it is reading the data or writing the model that takes the time.",
        ),
        Rule(
            metric="reload_accuracy_difference",
            expect="== 0",
            meaning="The same weights on the same GPU read the same pictures: a difference means that the file is not what "
            "was written, or that the GPU does not compute the same twice.",
            fix="Write and read a file with a known checksum in the run directory, on this node and from another. "
            "If files hold, test the GPU's memory: `dcgmi diag -r 3`.",
        ),
    ),
    measure=measure,
    limit_s=900.0,  # MNIST on one slow CPU core takes minutes and is slow, not hung
    options=CnnOptions,
    performance_metrics=("seconds", "images_per_second"),
)
