"""NCCL may not copy directly between GPUs: a variable from a debugging session is still set."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def set_variable(injection: Injection) -> None:
    """Set the variable in the environment of the trial."""
    injection.environment["NCCL_P2P_DISABLE"] = "1"


DRILL = Drill(
    name="p2p-disabled",
    title="NCCL_P2P_DISABLE=1 in the environment",
    machine="gpu",
    trial=DrillTrial(checks={"collectives.all_reduce": {}, "collectives.transport": {}}),
    expected=Expected(
        check="collectives.*",
        metric="*",
        outcomes=(Outcome.FAIL,),
        cause="environment_variable",
        place=r"NCCL_P2P_DISABLE=1",
        command=r"grep \S*NCCL_P2P_DISABLE",
        action="fix-environment",
    ),
    needs=Needs(gpus=2),
    prepare=set_variable,
)
