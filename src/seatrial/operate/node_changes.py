"""Records of changes of node states in Slurm or Kubernetes, and the interface of the classes that make them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from seatrial.model import DecisionValue, Frozen
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


class Candidates(Protocol):
    """The candidates of a readmission: nodes that are tested and then returned to service or not.

    One class implements this for Slurm, one for Kubernetes.
    """

    @property
    def cluster_node_count(self) -> int:
        """The number of nodes of the cluster; the drain limit allows a share of them."""

    def partners(self, names: Sequence[str] = ()) -> list[Partner]:
        """Return the partners ``names``, by default all possible partners, best first. Raises SeatrialError."""

    def settings(self, nodes: Sequence[str]) -> list[tuple[str, str, Any]]:
        """Return (origin, key, value) of the trial's settings that select ``nodes``."""

    def before_test(self, partners: Sequence[str]) -> list[NodeChange]:
        """Return the changes that make the candidates testable."""

    def wait_until_testable(self) -> None:
        """Wait until the changes before the test have their effect. Raises SeatrialError."""

    def changed_meanwhile(self) -> dict[str, str]:
        """Return the state of each candidate that something else took out of service during the test.

        The changes after the test keep a drain that someone else made. Raises SeatrialError, ValueError.
        """

    def after_test(self, results: Mapping[str, NodeResult]) -> list[NodeChange]:
        """Return the changes for these results, in a safe order."""

    def execute(self, change: NodeChange) -> None:
        """Make the change. Raises SeatrialError."""


def reason_text(run_id: str, decision: DecisionValue, cause: str = "") -> str:
    """Return ``seatrial RUN: REJECTED: cause`` in one line; without quotes, so that scontrol and kubectl keep it."""
    line = " ".join("".join(char if char.isprintable() and char not in "\"'\\" else " " for char in cause).split())
    return f"{SEATRIAL_PREFIX}{run_id}: {decision}" + (f": {line[:_MAX_CAUSE]}" if line else "")
