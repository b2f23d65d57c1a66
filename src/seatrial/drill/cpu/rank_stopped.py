"""A rank is stopped while it trains: its peers wait in a collective."""

from __future__ import annotations

import signal

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cpu._ranks import TRAINING, rank_in_training
from seatrial.drill.faults import FAULTY_RANK
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def stop(injection: Injection) -> None:
    """Send SIGSTOP to one rank. The end of its job kills it."""
    injection.signal_rank(rank_in_training(injection), signal.SIGSTOP)


DRILL = Drill(
    name="rank-stopped",
    title=f"SIGSTOP to rank {FAULTY_RANK} of a training on two ranks",
    machine="cpu",
    trial=DrillTrial(checks=TRAINING, settings={"limits": {"heartbeat_timeout_s": 15}}),
    expected=Expected(
        check="train.ddp",
        outcomes=(Outcome.ERROR,),
        cause="rank_hangs",
        place=rf"rank{FAULTY_RANK}: Rank {FAULTY_RANK}: ",
        command=r"^cat \S+/hang/(rank1|states)\.txt$",
        action="retry-job",
    ),
    act=stop,
)
