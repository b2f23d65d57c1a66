"""The link of one node is much slower than the links of the other nodes."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, settings, shape_link
from seatrial.drill.injection import Injection


def shape(injection: Injection) -> None:
    """Limit both directions of the link to 200 Mbit/s."""
    shape_link(injection, "tbf rate 200mbit burst 256kbit latency 100ms")


DRILL = Drill(
    name="shaped-link",
    title="the link of one of three nodes is shaped to 200 Mbit/s",
    machine="cluster",
    trial=DrillTrial(checks={"collectives.all_reduce": {"sizes": ["4MiB"]}}, settings=settings(3), launcher="slurm"),
    expected=Expected(
        check="collectives.localization",
        metric="slow_ranks",
        cause="slow_node",
        place=rf"^{NODE}: ",
        command=rf"nodelist={NODE} .*tc qdisc show",
        action="check-cable",
    ),
    needs=cluster_needs(3, "tc"),
    prepare=shape,
)
