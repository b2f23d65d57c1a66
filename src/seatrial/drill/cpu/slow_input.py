"""The data of one rank arrives late."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cpu._ranks import TRAINING
from seatrial.drill.faults import FAULTY_RANK
from seatrial.model import Outcome

DRILL = Drill(
    name="slow-input",
    title=f"each batch of rank {FAULTY_RANK} arrives 0.3 s late",
    machine="cpu",
    trial=DrillTrial(checks=TRAINING),
    expected=Expected(
        check="train.ddp",
        metric="rank_data_wait",
        outcomes=(Outcome.FAIL,),
        cause="slow_input",
        place=rf"rank{FAULTY_RANK}\b",
        command=r"vmstat|iostat",
        action="fix-environment",
    ),
    fault="slow_input",
)
