"""Nodes by switch and rack, and the switches of slow paths, for trials whose topology is known."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.checks import catalog
from seatrial.model import Outcome, Topology, Trial, Verdict
from seatrial.report.figures import NOT_PASSED
from seatrial.report.sections import MappedNode, node_map

MAX_NODES = 64  # the map of more nodes shows only those on which something is bad
_GPU = re.compile(r"(?P<node>[^/>]+)/(?:gpu|rank)(?P<index>\d+)")


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of one leaf switch or rack; ``name`` is empty without a topology.

    ``healthy_count``, ``bad_count``: number of nodes without and with a problem that a map of many nodes leaves out.
    """

    name: str
    nodes: tuple[MappedNode, ...]
    healthy_count: int = 0
    bad_count: int = 0


@dataclass(frozen=True)
class SlowPathRow:
    """A pair of nodes, or a GPU, that did not pass a comparison of paths; ``switches``: as text, empty if unknown."""

    subject: str
    metric: str
    outcome: Outcome
    summary: str
    switches: str


def _recorded_topology(trial: Trial) -> Topology | None:
    return next((job.topology for job in trial.jobs if job.topology), None)


def node_groups(trial: Trial) -> list[NodeGroup]:
    """The nodes of the node map, by leaf switch and rack."""
    topology = _recorded_topology(trial)
    groups: dict[str, list[MappedNode]] = {}
    for node in node_map(trial):
        groups.setdefault(_place(topology, node.name) if topology else "", []).append(node)
    if sum(map(len, groups.values())) <= MAX_NODES:
        return [NodeGroup(name, tuple(nodes)) for name, nodes in groups.items()]
    reduced = []
    for name, nodes in groups.items():
        bad = [node for node in nodes if node.is_bad]
        shown = tuple(bad[: MAX_NODES // len(groups) + 1])
        reduced.append(NodeGroup(name, shown, len(nodes) - len(bad), len(bad) - len(shown)))
    return reduced


def slow_paths(trial: Trial) -> list[SlowPathRow]:
    """The pairs of nodes and the GPUs that did not pass a comparison of paths between nodes."""
    topology, checks = _recorded_topology(trial), catalog()
    if topology is None:
        return []
    rows = []
    for verdict in trial.verdicts:
        if verdict.outcome in NOT_PASSED and verdict.check in checks:
            declared = checks[verdict.check].declaration(verdict.metric)
            if declared and declared.comparison and declared.comparison.inter_node:
                switches = _switches(verdict, topology)
                rows.append(SlowPathRow(verdict.subject, verdict.metric, verdict.outcome, verdict.summary, switches))
    return rows


def _place(topology: Topology, node: str) -> str:
    """The switch and the rack of a node as text."""
    leaf, rack = topology.leaf(node), topology.rack(node)
    names = [f"switch {leaf}" if leaf and leaf != rack else "", f"rack {rack}" if rack else ""]
    return ", ".join(filter(None, names)) or "not in the topology"


def _switches(verdict: Verdict, topology: Topology) -> str:
    """The switches of a pair from end to end; for a GPU the switch of its rail, else the leaf switch of its node."""
    node, arrow, other_node = verdict.subject.partition("->")
    if arrow:
        path = topology.path(node, other_node)
        crossing = f" (crosses {path[len(path) // 2]})" if len(path) > 1 else ""
        return " – ".join(path) + crossing
    if match := _GPU.fullmatch(verdict.subject):
        rail = topology.rail_switch(match["node"], int(match["index"]))
        return f"rail {match['index']}: {rail}" if rail else " – ".join(topology.switches_above(match["node"])[:1])
    return ""
