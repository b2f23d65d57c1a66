"""A node stops answering during a job."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, run_on, settings, start_slurmd, test_cluster
from seatrial.drill.cluster._ranks import ALL_REDUCE, CHECK, rank_on_node
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def unplug(injection: Injection) -> None:
    """Set the link of the node down and kill its processes, except its init: other nodes see a node without power."""
    rank_on_node(injection)
    link = test_cluster().nodes[NODE].link
    injection.at_end(start_slurmd, injection)
    injection.at_end(injection.run_command, ["ip", "link", "set", link, "up"])
    injection.mark_injected()
    injection.run_command(["ip", "link", "set", link, "down"])
    run_on(injection, NODE, "kill -KILL -1")  # the shell that calls it is the only process that survives


DRILL = Drill(
    name="node-dead",
    title="the link of one of two nodes goes down and all its processes are killed during an all-reduce",
    machine="cluster",
    trial=DrillTrial(checks=ALL_REDUCE, settings=settings(), launcher="slurm"),
    expected=Expected(
        check=CHECK,
        outcomes=(Outcome.ERROR,),
        cause="node_unreachable",
        place=rf"^{NODE}: ",
        command=rf"ping -c 3 {NODE}",
        action="reboot-node",
    ),
    needs=cluster_needs(),
    act=unplug,
)
