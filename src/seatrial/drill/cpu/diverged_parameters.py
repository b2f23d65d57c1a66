"""One parameter of one rank differs in one bit."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cpu._ranks import TRAINING
from seatrial.drill.faults import FAULTY_RANK
from seatrial.model import Outcome

DRILL = Drill(
    name="diverged-parameters",
    title=f"one bit of one parameter of rank {FAULTY_RANK} is flipped; "
    "of two ranks, no majority can say which is wrong",
    machine="cpu",
    trial=DrillTrial(checks=TRAINING),
    expected=Expected(
        check="train.ddp",
        metric="parameter_digests_differing",
        outcomes=(Outcome.FAIL,),
        cause="parameters_diverged",
        place=rf'differ, without a majority.*"rank": {FAULTY_RANK}\b',
        command=r"dmesg.*xid|nvidia-smi",
        action="call-vendor",
    ),
    fault="diverged_parameters",
)
