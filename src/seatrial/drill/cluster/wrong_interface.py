"""GLOO_SOCKET_IFNAME names an interface that one node does not have."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, set_variables, settings
from seatrial.drill.injection import Injection


def set_interface(injection: Injection) -> None:
    """Set the variable for the tasks of the node to an interface that only other clusters have."""
    set_variables(injection, GLOO_SOCKET_IFNAME="ib7")


DRILL = Drill(
    name="wrong-interface",
    title="GLOO_SOCKET_IFNAME=ib7 on one of two nodes, which has no such interface",
    machine="cluster",
    trial=DrillTrial(checks={"nodes.reachable": {}}, settings=settings(), launcher="slurm"),
    expected=Expected(
        refusal=r"preflight failed",
        cause="GLOO_SOCKET_IFNAME=ib7: this node has no interface ib7",
        place=rf"{NODE}: GLOO_SOCKET_IFNAME",
        command=r"^ip -br address",
    ),
    needs=cluster_needs(),
    prepare=set_interface,
)
