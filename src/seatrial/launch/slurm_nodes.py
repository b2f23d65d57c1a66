"""Nodes that Slurm cannot give to a job, as opposed to nodes that are busy with other jobs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from seatrial.config.schema import Config
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import JobRecord, SlurmNode
from seatrial.launch.base import NodeShortage
from seatrial.model import MissingNode, SeatrialError
from seatrial.util.text import and_more

_MAX_QUERIED = 8  # nodes whose slurmd is tried, since each connection may take seconds
_MAX_NAMED = 8


@dataclass(frozen=True)
class CandidateNodes:
    """The nodes on which Slurm may run a job of the trial, by its partition and node lists."""

    nodes: tuple[SlurmNode, ...]
    settings: Config

    @property
    def unusable(self) -> list[SlurmNode]:
        """The nodes that get no job of the trial now: not up, out of service or reserved."""
        return [node for node in self.nodes if not node.usable or self._blocked(node)]

    def shortage(self, needed: int) -> NodeShortage | None:
        """Return the nodes that need an administrator, or that are reserved for others.

        None if there are no such nodes, or if at least ``needed`` other nodes are left.
        """
        missing = [node for node in self.nodes if node.needs_administrator or self._blocked(node)]
        usable = len(self.nodes) - len(missing)
        if usable >= needed or not missing:
            return None
        states = [*map(_state, missing[:_MAX_QUERIED]), *map(str, missing[_MAX_QUERIED:])]
        nodes = tuple(MissingNode(name=node.name, state=state) for node, state in zip(missing, states, strict=True))
        return NodeShortage(usable=usable, missing=nodes)

    def message(self, needed: int) -> str:
        """Return the number of usable nodes and the states of the others; empty if all are usable and enough."""
        unusable, partition = self.unusable, self.settings.slurm.partition
        usable = len(self.nodes) - len(unusable)
        if usable >= needed and not unusable:
            return ""
        states = and_more([f"{node.name} is {node}" for node in unusable], _MAX_NAMED, "; ")
        place = f" of partition {partition}" if partition else ""
        counts = f"{usable} of {len(self.nodes)} nodes{place} are usable, the trial needs {needed}"
        return f"{counts}: {states}" if unusable else counts

    def _blocked(self, node: SlurmNode) -> bool:
        """Return whether a reservation keeps the trial's jobs off the node."""
        return node.blocked_by_reservation(self.settings.slurm.reservation)


def candidate_nodes(settings: Config, job: JobRecord | None = None) -> CandidateNodes:
    """Return the nodes for a pending ``job``, or for the jobs of the trial before their submission.

    Raises SeatrialError if Slurm cannot be queried, ValueError on unexpected output.
    """
    config = settings.slurm
    # SBATCH_PARTITION overrides the option in the job's script (sbatch(1), INPUT ENVIRONMENT VARIABLES)
    partition = (job.partition if job else os.environ.get("SBATCH_PARTITION")) or config.partition
    partitions = set((partition or _default_partition()).split(","))
    listed = _hostnames(job.requested_nodes if job else config.nodelist)
    excluded = _hostnames(job.excluded_nodes if job else config.exclude)
    nodes = [node for node in slurm.nodes() if partitions & {*node.partitions} and node.name not in excluded]
    return CandidateNodes(tuple(node for node in nodes if node.name in listed or not listed), settings)


def node_state(host: str) -> tuple[str, str]:
    """Return Slurm's name and state of the node with this host name; the state is empty if Slurm gives none."""
    try:
        node = slurm.node(host) or slurm.node(host.partition(".")[0])
    except (SeatrialError, ValueError):
        node = None  # only additional information for a message
    return (node.name, _state(node, silent=True)) if node else (host, "")


def _state(node: SlurmNode, silent: bool = False) -> str:
    """Return the state of a node.

    The text also says whether the node's slurmd accepts a connection, if its ranks are ``silent`` or if Slurm reports
    that the node does not respond.
    """
    does_not_respond = "NOT_RESPONDING" in node.states or "not responding" in node.reason.lower()
    if not (silent or does_not_respond):
        return str(node)
    try:
        return f"{node}; {slurm.slurmd_answer(node.name)}"
    except SeatrialError:  # only additional information for a message
        return str(node)


def _hostnames(nodes: str | None) -> list[str]:
    return slurm.hostnames(nodes) if nodes else []


def _default_partition() -> str:
    return next((partition.name for partition in slurm.partitions() if partition.default), "")
