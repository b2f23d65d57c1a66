"""A process of an ended job still holds memory of a GPU."""

from __future__ import annotations

from functools import partial

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.gpu._programs import GPU, start_on_gpu

DRILL = Drill(
    name="leftover-memory",
    title=f"an idle process holds 8 GiB of GPU {GPU}",
    machine="gpu",
    trial=DrillTrial(checks={"gpu.inventory": {}}),
    expected=Expected(
        check="gpu.inventory",
        metric="foreign_processes",
        cause="foreign_processes",
        place=rf"gpu{GPU}\b",
        command=rf"nvidia-smi --id={GPU} --query-compute-apps|ps .*-p \d+",
        action="fix-environment",
    ),
    needs=Needs(gpus=1),
    prepare=partial(start_on_gpu, mode="hold"),
)
