"""Trains a small convolutional network on digits on each GPU, all GPUs concurrently and independently."""

from __future__ import annotations

import math
import time

from pydantic import Field

from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answers, fact, metric, value
from seatrial.checks.training import _results
from seatrial.model import Phase, Scope


class CnnOptions(Options):
    """Options of train.cnn."""

    data: str | None = Field(
        default=None,
        description="directory with MNIST's four IDX files, plain or gzipped; default: scikit-learn's digits",
    )
    epochs: int = Field(default=5, ge=1)
    batch: int = Field(default=128, ge=2)


def measure(context: Context, options: CnnOptions) -> Answers:
    """Train, evaluate, save and load the model.

    Raises SeatrialError if the data is incomplete or the options give too few steps.
    """
    from seatrial.train import cnn, images

    start = time.monotonic()
    data = images.load(options.data)
    counts = {"train": len(data.train_labels), "held_out": len(data.test_labels)}
    data_fact = {"source": data.source, **counts, "limitation": data.limitation or None}
    steps = options.epochs * math.ceil(len(data.train_labels) / options.batch)
    method = (
        f"Each process trains its own network, all concurrently, on {data.source}: one run with a fixed seed, "
        f"{steps} steps, {options.epochs} epochs of {len(data.train_labels)} images, batch size {options.batch}; "
        f"accuracy over {len(data.test_labels)} held-out images; images_per_second over all steps, warm-up included"
    )
    yield from _results.device_facts(context, this_rank_only=True)
    yield fact("dataset", data.name)
    yield fact("data", data_fact)
    yield fact("method", method)
    cnn.require_min_steps(len(data.train_labels), options.epochs, options.batch)

    net = cnn.build(context.device)
    training = cnn.train(net, data, context.device, options.epochs, options.batch, context.progress)
    losses = [loss for loss in training.losses if math.isfinite(loss)]
    yield value("nonfinite_steps", len(training.losses) - len(losses))
    yield value("images_per_second", training.images / training.seconds)
    if losses:
        yield value("loss_first", losses[0])
        yield value("loss_last", losses[-1])
    yield from _results.loss_curve(enumerate(losses, 1), context.subject)

    context.progress("save, load, evaluate")
    folder = context.artifacts_dir / context.subject.replace("/", "_")
    folder.mkdir(exist_ok=True)
    model_file = folder / "model.pt"
    cnn.save(net, model_file)
    accuracy = cnn.accuracy(net, data, context.device)
    reloaded_accuracy = cnn.accuracy(cnn.load(model_file, context.device), data, context.device)
    yield value("accuracy", accuracy)
    yield value("reload_accuracy_difference", abs(accuracy - reloaded_accuracy))
    yield value("seconds", time.monotonic() - start)
    yield context.artifact(model_file, f"model of {context.subject}")


CHECK = Check(
    measure=measure,
    name="train.cnn",
    title="Digit classification by a small convolutional network",
    phase=Phase.SINGLE_GPU,
    scope=Scope.GPU,
    limit_s=900.0,  # MNIST on one slow CPU core takes minutes
    options=CnnOptions,
    declared=(
        metric(
            "nonfinite_steps",
            "== 0 count",
            "Seed and data are fixed: an infinite or NaN loss means wrong arithmetic or memory errors.",
            "Run the check again. If only this GPU fails: check `nvidia-smi -q -d ECC,ROW_REMAPPER` and "
            "`dmesg | grep -i xid`. If all GPUs fail: check torch and the driver.",
        ),
        metric(
            "accuracy",
            "> 95 %",
            "Seed and data are fixed and give more than 95 % on a healthy GPU: lower accuracy means wrong arithmetic "
            "or damaged data.",
            "Compare accuracy between GPUs. Low on one GPU: check `nvidia-smi -q -d ECC,ROW_REMAPPER` there. Low on "
            "all GPUs: compare the checksums of the data files with their source.",
            key=True,
        ),
        metric(
            "seconds",
            "< 180 s",
            "Time to read the data, train, save, load and evaluate; a healthy GPU needs far less than 180 s.",
            "Compare images_per_second between GPUs. Slow on one GPU: `nvidia-smi -q -d PERFORMANCE,CLOCK`. Fast on "
            "all GPUs: reading the data or writing the model takes the time.",
            speed=True,
        ),
        metric(
            "reload_accuracy_difference",
            "== 0 %",
            "The same weights on the same GPU give the same accuracy: a difference means that the file differs from "
            "the saved weights, or that the GPU computes different results.",
            "Write and read a file with a known checksum in the run directory, from this node and another node. If "
            "the checksums match, test the GPU's memory: `dcgmi diag -r 3`.",
        ),
        metric(
            "images_per_second",
            unit="images/s",
            meaning="images per second over all steps, warm-up included",
            speed=True,
        ),
        metric("loss_first", unit="nats", meaning="loss of the first step"),
        metric("loss_last", unit="nats", meaning="loss of the last step"),
    ),
)
