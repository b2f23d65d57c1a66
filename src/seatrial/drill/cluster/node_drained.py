"""A node is drained."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, settings, wait_until_idle
from seatrial.drill.injection import Injection


def drain(injection: Injection) -> None:
    """Drain the node with a reason, as a health check does."""
    injection.run_command(["scontrol", "update", f"nodename={NODE}", "state=drain", "reason=fan broken"])
    injection.at_end(wait_until_idle)
    injection.at_end(injection.run_command, ["scontrol", "update", f"nodename={NODE}", "state=resume"])


DRILL = Drill(
    name="node-drained",
    title="scontrol sets one of two nodes to DRAIN",
    machine="cluster",
    trial=DrillTrial(checks={"host.inventory": {}}, settings=settings(), launcher="slurm"),
    expected=Expected(
        check="host.inventory",
        cause="node_drained",
        place=rf"^{NODE}: .*DRAIN: fan broken",
        command=rf"^scontrol show node {NODE}",
        action="fix-environment",
    ),
    needs=cluster_needs(),
    prepare=drain,
)
