"""gpu.model: whether the GPUs of a node are of the model that the site expects."""

from __future__ import annotations

from pydantic import Field

from seatrial.checks.check import Check, Context, Options, SkipIf
from seatrial.checks.declare import Answers, metric, value
from seatrial.discover import gpu
from seatrial.model import NotApplicable, Phase, Scope


class ModelOptions(Options):
    """``expected``: text that NVML's name of each GPU must contain, in upper or lower case."""

    expected: str | None = Field(default=None, min_length=1)


def measure(context: Context, options: ModelOptions) -> Answers:
    """Yield the number of GPUs that are not of the expected model, with their names as evidence.

    Raises NotApplicable without a usable GPU or an expected model.
    """
    if options.expected is None:
        raise NotApplicable(
            "no model is expected: in a hook set --gpu-model, in a trial the option expected of gpu.model"
        )
    inventory = gpu.read(context.root)
    if not inventory.gpus:
        raise NotApplicable("no usable GPU; gpu.inventory reports missing GPUs")
    expected = options.expected.lower()
    gpus_of_other_model = [
        f"gpu{device.index}: {device.name or 'name not readable'}"
        for device in inventory.gpus
        if expected not in (device.name or "").lower()
    ]
    evidence = {"expected": options.expected, "other models": gpus_of_other_model}
    yield value("gpus_of_other_model", len(gpus_of_other_model), evidence=evidence)


CHECK = Check(
    name="gpu.model",
    title="Model of the GPUs as the site expects",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    options=ModelOptions,
    measure=measure,
    declared=(
        metric(
            "gpus_of_other_model",
            "== 0 GPUs",
            "A GPU of the node is of another model than the site expects, or its name cannot be read.",
            "nvidia-smi -L; compare with the node's entry in the inventory of the site, and with option expected",
        ),
    ),
    limit_s=120,
    skip_if=(SkipIf.UNVERIFIED,),
)
