"""The link of one node loses packets."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, change_node, cluster_needs, settings
from seatrial.drill.injection import Injection

RULE = "INPUT --in-interface eth0 --match statistic --mode random --probability 0.2 --jump DROP"


def lose_packets(injection: Injection) -> None:
    """Drop one in five packets that the node receives from other nodes."""
    change_node(injection, f"iptables --append {RULE}", f"iptables --delete {RULE}")


DRILL = Drill(
    name="lossy-link",
    title="one of three nodes loses 20 % of the packets that it receives",
    machine="cluster",
    trial=DrillTrial(checks={"collectives.all_reduce": {"sizes": ["4MiB"]}}, settings=settings(3), launcher="slurm"),
    expected=Expected(
        check="collectives.localization",
        metric="slow_ranks",
        cause="slow_node",
        place=rf"^{NODE}: ",
        command=rf"nodelist={NODE} .*ip -s link",
        action="check-cable",
    ),
    needs=cluster_needs(3, "iptables"),
    prepare=lose_packets,
)
