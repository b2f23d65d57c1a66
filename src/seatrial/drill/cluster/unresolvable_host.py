"""A node does not resolve the name of another node."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, change_node, cluster_needs, settings
from seatrial.drill.injection import Injection


def remove_name(injection: Injection) -> None:
    """Mount an /etc/hosts without node0 on the node."""
    hosts = injection.folder / "hosts"
    change_node(
        injection,
        f"grep -v node0 /etc/hosts >{hosts}; mount --bind {hosts} /etc/hosts",
        "umount /etc/hosts",
    )


DRILL = Drill(
    name="unresolvable-host",
    title="one of two nodes does not resolve the other's name",
    machine="cluster",
    trial=DrillTrial(checks={"nodes.connectivity": {}}, settings=settings(), launcher="slurm"),
    expected=Expected(
        check="nodes.connectivity",
        metric="names_unresolved",
        cause="names_unresolved",
        place=rf"^{NODE}: .*node0",
        command=rf"nodelist={NODE} .*getent ahosts node0",
        action="fix-config",
    ),
    needs=cluster_needs(),
    prepare=remove_name,
)
