"""The memory of a rank grows until the limit of its address space."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cpu._ranks import TRAINING
from seatrial.drill.faults import FAULTY_RANK
from seatrial.model import Outcome

DRILL = Drill(
    name="out-of-memory",
    title=f"rank {FAULTY_RANK} allocates memory until its limit (RLIMIT_AS)",
    machine="cpu",
    trial=DrillTrial(checks=TRAINING),
    expected=Expected(
        check="train.ddp",
        outcomes=(Outcome.ERROR,),
        cause="host.out_of_memory",
        place=rf"rank{FAULTY_RANK}\b",
        command=r"dmesg",
        action="fix-config",
    ),
    fault="memory_limit",
)
