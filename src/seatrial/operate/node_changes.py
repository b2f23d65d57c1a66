"""Records of changes of node states in Slurm or Kubernetes, and the interface of the classes that make them."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from seatrial.model import DecisionValue, Frozen, SeatrialError, UsageError
from seatrial.util.text import and_more

SEATRIAL_PREFIX = "seatrial "  # the start of every reason and comment that seatrial sets
_MAX_CAUSE = 160  # characters; slurmctld keeps a reason in memory for every node

ChangeOutcome = Literal["planned", "started", "done", "failed", "refused"]


class NodeChange(Frozen):
    """One command that changes the state of ``nodes``.

    ``before``: the state of the nodes before the command. ``needs``: actions; if one of them failed, this change is
    refused. ``outcome``: ``started`` as the last outcome means that seatrial was killed during the command.
    ``detail``: why the change failed or was refused.
    """

    nodes: tuple[str, ...]
    action: str
    command: tuple[str, ...]
    before: str = ""
    needs: tuple[str, ...] = ()
    outcome: ChangeOutcome = "planned"
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.outcome}: {self.action}: {and_more(list(self.nodes), 8)}{detail}: {shlex.join(self.command)}"


# Values of NodeChange.action; END_RESERVATION can be followed by the nodes that return to service
RESERVE, RESUME, DRAIN_AGAIN = "reserve for the test", "resume in the reservation", "drain again"
DRAIN, COMMENT, END_RESERVATION = "drain", "comment", "end the reservation"
CONDITION, ADD_TAINT, REMOVE_TAINT = "set the condition", "add the taint", "remove the taint"
TAKES_OUT = (DRAIN, ADD_TAINT)  # only these take a node out of service, and count for the drain limit


@dataclass(frozen=True)
class Flags:
    """The changes that the user asked for; without a flag, nothing is changed."""

    comment: bool = False
    drain: bool = False
    undrain: bool = False
    condition: bool = False


class Partner(Frozen):
    """A node in service that takes part in the test of the candidates, and why it was chosen."""

    node: str
    why: str


class NodeResult(Frozen):
    """The decision on one candidate, its reason, and the folder of the trial that led to it."""

    node: str
    decision: DecisionValue
    reason: str
    trial: str = ""


class _Node(Protocol):
    @property
    def name(self) -> str: ...


Node = TypeVar("Node", bound=_Node)


class Candidates(ABC, Generic[Node]):
    """The candidates of a readmission: nodes that are tested and then returned to service or not.

    One class implements this for Slurm, one for Kubernetes. ``scheduler``: its name. ``list_nodes``: the command that
    shows all nodes. ``refusal_text``: a node and why it cannot be tested.
    """

    scheduler: str
    list_nodes: str
    refusal_text = "{node.name}: {why}"

    def __init__(self, names: Sequence[str], nodes: Iterable[Node], flags: Flags, run_id: str) -> None:
        self._flags, self._run_id = flags, run_id
        self._nodes_by_name = {node.name: node for node in nodes}
        if unknown := [name for name in names if name not in self._nodes_by_name]:
            raise UsageError(f"{self.scheduler} has no node {and_more(unknown, 8)}. Run first: {self.list_nodes}")
        self._candidates = [self._nodes_by_name[name] for name in names]

    def _require_testable(self) -> None:
        refusals = [(node, self._refusal(node)) for node in self._candidates]
        if refused := [self.refusal_text.format(node=node, why=why) for node, why in refusals if why]:
            raise SeatrialError(f"not tested, nothing was changed: {'; '.join(refused)}")

    @property
    def cluster_node_count(self) -> int:
        """The number of nodes of the cluster; the drain limit allows a share of them."""
        return len(self._nodes_by_name)

    def partners(self, names: Sequence[str] = ()) -> list[Partner]:
        """Return the partners ``names``, by default all possible partners, best first.

        Raises UsageError if one of ``names`` cannot be a partner.
        """
        if refused := [f"{name}: {why}" for name in names if (why := self._partner_refusal(name))]:
            raise UsageError(f"--partner {'; '.join(refused)}")
        possible = [node for name, node in self._nodes_by_name.items() if not self._partner_refusal(name)]
        return [Partner(node=name, why="--partner") for name in names] or self._partners(possible)

    def _partner_refusal(self, name: str) -> str:
        """Return why the node cannot be a partner; empty if it can."""
        if (node := self._nodes_by_name.get(name)) is None:
            return f"{self.scheduler} has no such node"
        return "it is a candidate" if node in self._candidates else self._partner_problem(node)

    def settings(self, nodes: Sequence[str]) -> list[tuple[str, str, Any]]:
        """Return (origin, key, value) of the trial's settings that select ``nodes``."""
        return [("seatrial readmit", key, value) for key, value in self._settings(nodes).items()]

    def before_test(self, partners: Sequence[str]) -> list[NodeChange]:
        """Return the changes that make the candidates testable."""
        del partners
        return []

    def wait_until_testable(self) -> None:
        """Wait until the changes before the test have their effect. Raises SeatrialError."""

    def changed_meanwhile(self) -> dict[str, str]:
        """Return the state of each candidate that something else took out of service during the test.

        The changes after the test keep a drain that someone else made. Raises SeatrialError, ValueError.
        """
        return {}

    @abstractmethod
    def after_test(self, results: Mapping[str, NodeResult]) -> list[NodeChange]:
        """Return the changes for these results, in a safe order."""

    @abstractmethod
    def execute(self, change: NodeChange) -> None:
        """Make the change. Raises SeatrialError."""

    @abstractmethod
    def _refusal(self, node: Node) -> str:
        """Return why the node cannot be tested; empty if it can."""

    @abstractmethod
    def _partner_problem(self, node: Node) -> str:
        """Return why a node that is no candidate cannot be a partner; empty if it can."""

    @abstractmethod
    def _partners(self, possible: list[Node]) -> list[Partner]:
        """Return the partners to use among ``possible``, best first, each with the reason."""

    @abstractmethod
    def _settings(self, nodes: Sequence[str]) -> dict[str, Any]:
        """Return key → value of the trial's settings that select ``nodes``."""


def reason_text(run_id: str, decision: DecisionValue, cause: str = "") -> str:
    """Return ``seatrial RUN: REJECTED: cause`` in one line; without quotes, so that scontrol and kubectl keep it."""
    line = " ".join("".join(char if char.isprintable() and char not in "\"'\\" else " " for char in cause).split())
    return f"{SEATRIAL_PREFIX}{run_id}: {decision}" + (f": {line[:_MAX_CAUSE]}" if line else "")
