"""A rank on another node is killed."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, run_on, settings
from seatrial.drill.cluster._ranks import ALL_REDUCE, CHECK, rank_on_node
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def kill(injection: Injection) -> None:
    """Send SIGKILL to a rank on the node; the heartbeat has its pid in the node's namespace."""
    beat = rank_on_node(injection)
    injection.mark_injected()
    run_on(injection, NODE, f"kill -KILL {beat.pid}")


DRILL = Drill(
    name="rank-killed-on-node",
    title="SIGKILL to a rank on one of two nodes during an all-reduce",
    machine="cluster",
    trial=DrillTrial(checks=ALL_REDUCE, settings=settings(), launcher="slurm"),
    expected=Expected(
        check=CHECK,
        outcomes=(Outcome.ERROR,),
        cause="torchrun.killed",
        place=rf"rank \d+ \({NODE}",
        command=r"dmesg",
        action="fix-config",
    ),
    needs=cluster_needs(),
    act=kill,
)
