"""NCCL may use few channels on one node only."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, set_variables, settings
from seatrial.drill.injection import Injection


def set_variable(injection: Injection) -> None:
    """Set the variable for the tasks of one node, as a profile or prolog of that node does."""
    set_variables(injection, NCCL_MAX_NCHANNELS="2")


DRILL = Drill(
    name="max-nchannels-on-node",
    title="NCCL_MAX_NCHANNELS=2 on one of three nodes",
    machine="cluster",
    trial=DrillTrial(checks={"nodes.connectivity": {}}, settings=settings(3), launcher="slurm"),
    expected=Expected(
        check="nodes.connectivity",
        metric="network_differing",
        cause="environment_variable",
        place=rf"^{NODE}: NCCL_MAX_NCHANNELS=2 is set on {NODE} only",
        command=rf"nodelist={NODE} .*NCCL_MAX_NCHANNELS",
        action="fix-environment",
    ),
    needs=cluster_needs(3),
    prepare=set_variable,
)
