"""The map of nodes: the worst outcome of each node and of its GPUs or ranks, by switch and rack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seatrial.model import Outcome, Topology, Trial, worst
from seatrial.report.figures import NOT_PASSED
from seatrial.report.formatting import DEVICE, natural_key
from seatrial.util.grouping import grouped
from seatrial.util.text import plural

MAX_NODES = 64  # the map of more nodes shows only those on which something is bad


@dataclass(frozen=True)
class MappedNode:
    """The worst outcome of the node itself, None without a verdict on it; ``devices``: index → worst outcome."""

    name: str
    outcome: Outcome | None
    devices: Mapping[str, Outcome]

    @property
    def is_bad(self) -> bool:
        return any(outcome in NOT_PASSED for outcome in (self.outcome, *self.devices.values()))


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of one leaf switch or rack. ``name``: empty without a topology. ``rest``: nodes that are left out."""

    name: str
    nodes: tuple[MappedNode, ...]
    rest: str = ""


def node_groups(trial: Trial) -> list[NodeGroup]:
    """All nodes with a GPU or rank that is the subject of a verdict, by leaf switch and rack; of many, the bad ones."""
    groups = grouped((_place(trial.topology, node.name), node) for node in _nodes(trial))
    if sum(map(len, groups.values())) <= MAX_NODES:
        return [NodeGroup(name, tuple(nodes)) for name, nodes in groups.items()]
    reduced = []
    for name, nodes in groups.items():
        bad = [node for node in nodes if node.is_bad]
        shown = bad[: MAX_NODES // len(groups) + 1]
        rest = f"{plural(len(nodes) - len(bad), 'node')} without a problem"
        rest += f" and {len(bad) - len(shown)} with one" if len(bad) > len(shown) else ""
        reduced.append(NodeGroup(name, tuple(shown), rest))
    return reduced


def _nodes(trial: Trial) -> list[MappedNode]:
    outcomes = grouped((verdict.subject, verdict.outcome) for verdict in trial.verdicts)
    devices: dict[str, dict[str, Outcome]] = {}
    for subject in sorted(outcomes, key=natural_key):
        if match := DEVICE.fullmatch(subject):
            devices.setdefault(match["node"], {})[match["index"]] = worst(outcomes[subject])
    return [
        MappedNode(node, worst(outcomes[node]) if node in outcomes else None, of_node)
        for node, of_node in devices.items()
    ]


def _place(topology: Topology | None, node: str) -> str:
    """The switch and the rack of a node as text; empty without a topology."""
    if topology is None:
        return ""
    leaf, rack = topology.leaf(node), topology.rack(node)
    names = [f"switch {leaf}" if leaf and leaf != rack else "", f"rack {rack}" if rack else ""]
    return ", ".join(filter(None, names)) or "not in the topology"
