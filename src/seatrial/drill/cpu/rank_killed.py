"""A rank is killed while it trains."""

from __future__ import annotations

import signal

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cpu._ranks import TRAINING, rank_in_training
from seatrial.drill.faults import FAULTY_RANK
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def kill(injection: Injection) -> None:
    """Send SIGKILL to one rank, as the kernel's out-of-memory killer does."""
    injection.signal_rank(rank_in_training(injection), signal.SIGKILL)


DRILL = Drill(
    name="rank-killed",
    title=f"SIGKILL to rank {FAULTY_RANK} of a training on two ranks",
    machine="cpu",
    trial=DrillTrial(checks=TRAINING),
    expected=Expected(
        check="train.ddp",
        outcomes=(Outcome.ERROR,),
        cause="torchrun.killed",
        place=rf"rank {FAULTY_RANK} \(",
        command=r"dmesg",
        action="fix-config",
    ),
    act=kill,
)
