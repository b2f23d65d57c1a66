"""NCCL may use two channels only: a variable from a tuning session is still set."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def set_variable(injection: Injection) -> None:
    """Set the variable in the environment of the trial."""
    injection.environment["NCCL_MAX_NCHANNELS"] = "2"


DRILL = Drill(
    name="max-nchannels",
    title="NCCL_MAX_NCHANNELS=2 in the environment",
    machine="gpu",
    trial=DrillTrial(checks={"collectives.all_reduce": {}, "collectives.transport": {}}),
    expected=Expected(
        check="collectives.*",
        metric="*busbw.*",
        outcomes=(Outcome.FAIL,),
        cause="environment_variable",
        place=r"NCCL_MAX_NCHANNELS=2",
        command=r"grep \S*NCCL_MAX_NCHANNELS",
        action="fix-environment",
    ),
    needs=Needs(gpus=2),
    prepare=set_variable,
)
