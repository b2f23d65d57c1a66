"""One bit of one all-reduce result is wrong on one rank."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.faults import FAULTY_RANK
from seatrial.model import Outcome

DRILL = Drill(
    name="bit-flip",
    title=f"one bit of one all-reduce result is flipped on rank {FAULTY_RANK}",
    machine="cpu",
    trial=DrillTrial(checks={"collectives.all_reduce": {"sizes": ["64KiB", "1MiB"], "seconds_per_size": 0.5}}),
    expected=Expected(
        check="collectives.all_reduce",
        metric="wrong_elements",
        outcomes=(Outcome.FAIL,),
        cause="data_corrupted",
        place=rf"rank{FAULTY_RANK}\b",
        command=r"dmesg.*xid|nvidia-smi",
        action="call-vendor",
    ),
    fault="bit_flip",
)
