"""One gradient of one rank is NaN."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.faults import FAULTY_RANK
from seatrial.model import Outcome

DRILL = Drill(
    name="nan-gradient",
    title=f"one gradient of rank {FAULTY_RANK} is NaN in one step",
    machine="cpu",
    trial=DrillTrial(checks={"train.fsdp": {"hf": False}}),
    expected=Expected(
        check="train.fsdp",
        outcomes=(Outcome.FAIL, Outcome.ERROR),
        cause="data.not_finite_rank",
        place=rf"^rank {FAULTY_RANK}\b",
        command=r"dmesg|nvidia-smi",
        action="retry-job",
    ),
    fault="nan_gradient",
)
