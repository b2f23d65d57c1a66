"""One rank computes slower than the others."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cpu._ranks import TRAINING
from seatrial.drill.faults import FAULTY_RANK
from seatrial.model import Outcome

DRILL = Drill(
    name="slow-rank",
    title=f"each forward pass of rank {FAULTY_RANK} takes 0.3 s longer",
    machine="cpu",
    trial=DrillTrial(checks=TRAINING),
    expected=Expected(
        check="train.ddp",
        metric="rank_slowdown",
        outcomes=(Outcome.FAIL,),
        cause="slow_rank",
        place=rf"rank{FAULTY_RANK}\b",
        command=r"^top ",
        action="fix-environment",
    ),
    fault="slow_step",
)
