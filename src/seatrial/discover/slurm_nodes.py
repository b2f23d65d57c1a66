"""Nodes that Slurm cannot give to a job, as opposed to nodes that are busy with other jobs."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field

from seatrial.config.schema import JobPlacement
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import JobRecord, SlurmNode
from seatrial.discover.slurm_messages import is_permanent_pending_reason
from seatrial.model import MissingNode, NodeShortage, SeatrialError, UsageError
from seatrial.util.text import and_more

_MAX_QUERIED = 8  # nodes whose slurmd is tried, since each connection may take seconds
_MAX_NAMED = 8
# Seconds until the states of the nodes are queried for a pending job, and between two queries
_NODES_AFTER_S, _NODES_POLL_S = 3.0, 20.0


@dataclass(frozen=True)
class CandidateNodes:
    """The nodes on which Slurm may run a job, by its partition and node lists; ``partition``: empty if it has none."""

    nodes: tuple[SlurmNode, ...]
    partition: str
    reservation: str | None

    @property
    def unusable(self) -> list[SlurmNode]:
        """The nodes that get no job of the trial now: not up, out of service or reserved."""
        return [node for node in self.nodes if not node.usable or self.blocked(node)]

    def shortage(self, needed: int) -> NodeShortage | None:
        """The nodes that need an administrator, or that are reserved for others.

        None if there are no such nodes, or if at least ``needed`` other nodes are left.
        """
        missing = [node for node in self.nodes if node.needs_administrator or self.blocked(node)]
        usable = len(self.nodes) - len(missing)
        if usable >= needed or not missing:
            return None
        states = [*map(_state, missing[:_MAX_QUERIED]), *map(str, missing[_MAX_QUERIED:])]
        nodes = tuple(MissingNode(name=node.name, state=state) for node, state in zip(missing, states, strict=True))
        return NodeShortage(usable=usable, missing=nodes)

    def message(self, needed: int) -> str:
        """The number of usable nodes and the states of the others; empty if all are usable and enough."""
        unusable = self.unusable
        usable = len(self.nodes) - len(unusable)
        if usable >= needed and not unusable:
            return ""
        states = and_more([f"{node.name} is {node}" for node in unusable], _MAX_NAMED, "; ")
        place = f" of partition {self.partition}" if self.partition else ""
        counts = f"{usable} of {len(self.nodes)} nodes{place} are usable, {needed} needed"
        return f"{counts}: {states}" if unusable else counts

    def blocked(self, node: SlurmNode) -> bool:
        """Whether a reservation keeps the trial's jobs off the node."""
        return node.blocked_by_reservation(self.reservation)


def candidate_nodes(placement: JobPlacement, job: JobRecord | None = None) -> CandidateNodes:
    """The nodes for a pending ``job``, or for jobs with this ``placement`` before their submission.

    Raises SeatrialError if Slurm cannot be queried, ValueError on unexpected output.
    """
    partition = (job.partition if job else "") or placement.partition
    if not partition:
        default = slurm.partition_of_jobs(None)
        partition = default.name if default else ""
    listed = _hostnames(job.requested_nodes if job else placement.nodelist)
    excluded = _hostnames(job.excluded_nodes if job else placement.exclude)
    nodes = [
        node
        for node in slurm.nodes()
        if {*partition.split(",")} & {*node.partitions}
        and node.name not in excluded
        and (node.name in listed or not listed)
        and _has_features(node, placement.constraint or "")
    ]
    return CandidateNodes(tuple(nodes), partition, placement.reservation)


def gpus_per_node(placement: JobPlacement) -> int:
    """The number of GPUs per node of the nodes for jobs with this ``placement``; 0 if there is no node.

    Raises UsageError if the nodes have different numbers of GPUs, ValueError on unexpected output.
    """
    candidates = candidate_nodes(placement)
    counts = {node.gpus for node in candidates.nodes}
    if len(counts) > 1:
        place = f"partition {candidates.partition}"
        raise UsageError(f"nodes of {place} have different numbers of GPUs ({sorted(counts)}): set --gpus-per-node")
    return counts.pop() if counts else 0


def placement_of_smaller_job(placement: JobPlacement, nodes: int) -> JobPlacement:
    """``placement`` for a job on any ``nodes`` of its nodes: Slurm requires all nodes of a node list.

    A longer list is replaced by the exclusion of all other nodes of the partition.
    """
    listed = _hostnames(placement.nodelist)
    if len(listed) <= nodes:
        return placement
    without_list = placement.model_copy(update={"nodelist": None})
    others = [node.name for node in candidate_nodes(without_list).nodes if node.name not in listed]
    exclude = ",".join(filter(None, [placement.exclude, *others])) or None
    return without_list.model_copy(update={"exclude": exclude})


@dataclass
class PendingJob:
    """A job with this ``placement`` that waits for its nodes, whose states are queried every 20 s.

    ``candidates``: the nodes on which it may run, from the last query; None before the first query, or if it failed.
    """

    placement: JobPlacement
    candidates: CandidateNodes | None = None
    shortage: NodeShortage | None = None
    _last_query: float = field(default=-math.inf)

    def never_starts(self, job: JobRecord, waited_s: float, needed: int) -> bool:
        """Whether waiting longer will not help the job, by its reason or by the states of the nodes."""
        now = time.monotonic()
        if waited_s > _NODES_AFTER_S and now - self._last_query > _NODES_POLL_S:
            self._last_query = now
            try:
                self.candidates = candidate_nodes(self.placement, job)
            except (SeatrialError, ValueError):
                self.candidates = None  # only additional information for a message
        self.shortage = self.candidates.shortage(needed) if self.candidates else None
        return is_permanent_pending_reason(job.reason) or self.shortage is not None

    def reason(self, job: JobRecord, needed: int) -> str:
        """Slurm's reason why the job is pending, and the states of the nodes if too few are usable."""
        candidates = self.candidates
        too_few = candidates and len(candidates.nodes) - len(candidates.unusable) < needed
        message = candidates.message(needed) if candidates and too_few else ""
        return "; ".join(filter(None, [job.reason or "no reason yet", message]))


def node_state(host: str) -> tuple[str, str]:
    """Slurm's name and state of the node with this host name; the state is empty if Slurm gives none."""
    try:
        node = slurm.node(host) or slurm.node(host.partition(".")[0])
    except (SeatrialError, ValueError):
        node = None  # only additional information for a message
    return (node.name, _state(node, silent=True)) if node else (host, "")


def _state(node: SlurmNode, silent: bool = False) -> str:
    """The state of a node.

    The text also says whether the node's slurmd accepts a connection, if its ranks are ``silent`` or if Slurm reports
    that the node does not respond.
    """
    does_not_respond = "NOT_RESPONDING" in node.states or "not responding" in node.reason.lower()
    if not (silent or does_not_respond):
        return str(node)
    try:
        return f"{node}; {slurm.slurmd_answer(node.name)}"
    except (SeatrialError, ValueError):  # only additional information for a message
        return str(node)


def _has_features(node: SlurmNode, constraint: str) -> bool:
    """Whether the node satisfies ``a``, ``a&b`` or ``a|b``; true for others, which only Slurm evaluates."""
    for separator, combine in (("&", all), ("|", any)):
        features = constraint.split(separator)
        if all(re.fullmatch(r"[\w.:-]+", feature) for feature in features):
            return combine(feature in node.features for feature in features)
    return True


def _hostnames(nodes: str | None) -> list[str]:
    return slurm.hostnames(nodes) if nodes else []
