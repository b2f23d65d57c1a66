"""One node has a small /dev/shm."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, change_node, cluster_needs, settings
from seatrial.drill.injection import Injection


def shrink(injection: Injection) -> None:
    """Limit /dev/shm of the node to 1 MiB."""
    change_node(injection, "mount -o remount,size=1m /dev/shm", "mount -o remount,size=50% /dev/shm")


DRILL = Drill(
    name="shm-small-on-node",
    title="/dev/shm of 1 MiB on one of two nodes",
    machine="cluster",
    trial=DrillTrial(checks={"host.inventory": {}}, settings=settings(), launcher="slurm"),
    expected=Expected(
        check="host.inventory",
        metric="shm_bytes",
        cause="shm_too_small",
        place=rf"^{NODE}: ",
        command=rf"nodelist={NODE} .*df -h /dev/shm",
        action="fix-environment",
    ),
    needs=cluster_needs(),
    prepare=shrink,
)
