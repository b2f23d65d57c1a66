"""A rank raises an error while it trains."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cpu._ranks import TRAINING
from seatrial.drill.faults import FAULTY_RANK
from seatrial.model import Outcome

DRILL = Drill(
    name="rank-raises",
    title=f"rank {FAULTY_RANK} of a training on two ranks raises an error",
    machine="cpu",
    trial=DrillTrial(checks=TRAINING),
    expected=Expected(
        check="train.ddp",
        outcomes=(Outcome.ERROR,),
        cause="rank_failed",
        place=rf"rank {FAULTY_RANK} \(",
        command=r"tail .*/jobs/ranks/attempt1/logs/.*/1/stderr\.log",
        action="none",
    ),
    fault="error_in_training",
)
