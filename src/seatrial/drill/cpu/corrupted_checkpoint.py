"""A checkpoint changes on disk between its save and its load."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.faults import FAULTY_RANK

DRILL = Drill(
    name="corrupted-checkpoint",
    title=f"one bit of a checkpoint file is flipped by rank {FAULTY_RANK} after each save",
    machine="cpu",
    trial=DrillTrial(checks={"train.checkpoint": {}}),
    expected=Expected(
        check="train.checkpoint",
        cause="checkpoint.changed",
        place=r"/checkpoints/step-\d+ is damaged: \S+\.distcp",
        command=r"ls -l \S+/checkpoints/step-\d+; findmnt -T \S+/step-\d+",
        action="fix-environment",
    ),
    fault="damaged_checkpoint",
    limit_s=600,
)
