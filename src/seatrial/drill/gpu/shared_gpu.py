"""Two ranks use the same GPU."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.faults import FAULTY_RANK
from seatrial.model import Outcome

DRILL = Drill(
    name="shared-gpu",
    title=f"rank {FAULTY_RANK} uses the GPU of rank 0",
    machine="gpu",
    trial=DrillTrial(checks={"collectives.all_reduce": {"sizes": ["1MiB"]}}),
    expected=Expected(
        check="collectives.all_reduce",
        outcomes=(Outcome.ERROR,),
        cause="nccl.duplicate_gpu",
        place=r"rank",
        command=r"nvidia-smi --query-compute-apps",
        action="fix-config",
    ),
    needs=Needs(gpus=2),
    fault="shared_gpu",
)
