"""Another program computes on a GPU of the trial."""

from __future__ import annotations

from functools import partial

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.gpu._programs import GPU, start_on_gpu
from seatrial.model import Outcome

DRILL = Drill(
    name="corunning-gemm",
    title=f"another program multiplies matrices on GPU {GPU}",
    machine="gpu",
    trial=DrillTrial(checks={"gpu.inventory": {}, "device.gemm": {}, "device.memory": {}}),
    expected=Expected(
        check="device.gemm",
        outcomes=(Outcome.FAIL,),
        cause="foreign_processes",
        place=rf"gpu{GPU}\b",
        command=rf"nvidia-smi --id={GPU} --query-compute-apps|ps .*-p \d+",
        action="fix-environment",
    ),
    needs=Needs(gpus=1),
    prepare=partial(start_on_gpu, mode="compute"),
)
