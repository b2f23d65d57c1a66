"""A GPU of the node is not visible to the trial."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def hide_gpu(injection: Injection) -> None:
    """Show one GPU to a trial that expects two."""
    injection.environment["CUDA_VISIBLE_DEVICES"] = "0"


DRILL = Drill(
    name="missing-gpu",
    title="one of two expected GPUs is not visible (CUDA_VISIBLE_DEVICES=0)",
    machine="gpu",
    trial=DrillTrial(checks={"gpu.inventory": {}}),
    expected=Expected(
        check="gpu.inventory",
        metric="gpus_hidden",
        outcomes=(Outcome.FAIL,),
        cause="gpus_hidden",
        place=r"CUDA_VISIBLE_DEVICES|cuda_visible_devices",
        command=r"nvidia-smi -L|CUDA_VISIBLE_DEVICES",
        action="fix-environment",
    ),
    needs=Needs(gpus=2),
    prepare=hide_gpu,
)
