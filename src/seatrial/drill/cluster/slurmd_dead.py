"""slurmd of a node dies during a job."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, kill_slurmd, settings, start_slurmd
from seatrial.drill.cluster._ranks import ALL_REDUCE, CHECK, rank_on_node
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def kill(injection: Injection) -> None:
    """Kill slurmd on the node; the ranks there go on, until Slurm sets the node DOWN and ends the job."""
    rank_on_node(injection)
    injection.at_end(start_slurmd, injection)
    injection.mark_injected()
    kill_slurmd(injection)


DRILL = Drill(
    name="slurmd-dead",
    title="SIGKILL to slurmd on one of two nodes during an all-reduce",
    machine="cluster",
    trial=DrillTrial(checks=ALL_REDUCE, settings=settings(), launcher="slurm"),
    expected=Expected(
        check=CHECK,
        outcomes=(Outcome.ERROR,),
        cause="slurmd_down",
        place=rf"^{NODE}: .*slurmd does not run",
        command=rf"ssh {NODE} systemctl status slurmd",
        action="restart-service",
    ),
    needs=cluster_needs(),
    act=kill,
)
