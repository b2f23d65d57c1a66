"""A firewall blocks the port of the rendezvous between two nodes."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, change_node, cluster_needs, settings
from seatrial.drill.injection import Injection

RULE = "OUTPUT --protocol tcp --destination node0 --dport 20000:29999 --jump DROP"  # ports of the rendezvous


def block(injection: Injection) -> None:
    """Drop packets from the node to the rendezvous on node0."""
    change_node(injection, f"iptables --append {RULE}", f"iptables --delete {RULE}")


DRILL = Drill(
    name="blocked-port",
    title="iptables drops packets to the rendezvous port from one of two nodes",
    machine="cluster",
    trial=DrillTrial(checks={"nodes.reachable": {}}, settings=settings(), launcher="slurm"),
    expected=Expected(
        refusal=r"preflight failed",
        cause="cannot connect to the rendezvous at",
        place=rf"{NODE}: cannot connect to the rendezvous at node0, port 2\d{{4}}",
        command=rf"^srun --nodelist={NODE} .*ping -c 3 node0; ip route get node0; nft list ruleset",
    ),
    needs=cluster_needs(2, "iptables"),
    prepare=block,
)
