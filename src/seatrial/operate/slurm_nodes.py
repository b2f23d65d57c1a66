"""Candidates of a readmission in Slurm: which nodes may be tested, with which partners, and the changes of their state.

Slurm starts no job on a drained node, not even in a reservation. So seatrial first reserves a drained candidate for
this user, without an end time, and then resumes it: only the jobs of the test can start on it. After the test a
candidate that was not accepted is drained again. Last the reservation is deleted, which returns the accepted candidates
to service. If seatrial is killed, the reservation keeps other jobs off the nodes.

The reservation has the first partners too: a job whose nodes are all in the reservation starts at once (after 0.6 s
with Slurm 22.05). The flag FLEX (scontrol(1)) permits nodes outside of it, for a partner that replaces another one, but
such a job waits for the backfill scheduler (26 s).
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.discover import slurm
from seatrial.discover.slurm_facts import RETURNING_STATES, SlurmNode
from seatrial.model import DecisionValue, SeatrialError, UsageError
from seatrial.operate.node_changes import (
    COMMENT,
    DRAIN,
    DRAIN_AGAIN,
    END_RESERVATION,
    RESERVE,
    RESUME,
    SEATRIAL_PREFIX,
    Candidates,
    Flags,
    NodeChange,
    NodeResult,
    Partner,
    reason_text,
)
from seatrial.util.text import and_more

# States and flags of a node
_DRAINED = {"DRAIN", "DRAINED", "DRAINING"}
_BUSY = {"ALLOCATED", "MIXED", "COMPLETING"}  # jobs run on it
# Slurm starts no job on a node in these states, although the node is not drained
_NO_NEW_JOBS = {"ERROR", "FAIL", "FAILING", "INVAL", "INVALID_REG", "UNKNOWN"}
_RESPONSE_LIMIT_S = 60.0  # enough, since slurmctld contacts a resumed node within a few seconds
_MAX_RESERVATION_NAME = 60  # characters


class SlurmCandidates(Candidates[SlurmNode]):
    """The candidates in Slurm.

    ``reason_prefix``: nodes that someone else drained may be returned too if their reason starts with this text.
    ``partition``: the partition of the trial; if None, one that has all candidates is used. ``reservation``: the
    reservation of the trial, None if it has none.
    """

    scheduler, list_nodes, refusal_text = "Slurm", "sinfo --Node", "{node.name} is {node}: {why}"

    def __init__(
        self,
        names: Sequence[str],
        flags: Flags,
        run_id: str,
        *,
        reason_prefix: str = "",
        partition: str | None = None,
        reservation: str | None = None,
    ) -> None:
        self._reason_prefix, self._reservation, self._drained_meanwhile = reason_prefix, reservation, set[str]()
        super().__init__(names, slurm.nodes(), flags, run_id)
        self._partition = partition or self._common_partition()
        # drained, down or failed: Slurm starts no job on them before a resume
        self._drained = [node for node in self._candidates if node.needs_administrator]
        self._require_testable()
        if self._drained and reservation:
            raise UsageError("slurm.reservation: drained nodes are tested in a reservation of their own: unset it")
        self._require_equal_hardware()

    def _partners(self, possible: list[SlurmNode]) -> list[Partner]:
        """Return the idle nodes in service with the candidates' hardware; accepted ones first."""
        possible.sort(key=lambda node: not _accepted(node))
        return [
            Partner(node=node.name, why=f"idle; {node.comment if _accepted(node) else 'no comment of a readmission'}")
            for node in possible
        ]

    def _settings(self, nodes: Sequence[str]) -> dict[str, Any]:
        """Return the settings that run the jobs on ``nodes``; if a candidate is drained, in the reservation."""
        values = {"launcher": "slurm", "slurm.nodelist": ",".join(nodes), "slurm.partition": self._partition}
        return values | ({"slurm.reservation": self._reservation_name} if self._drained else {})

    def before_test(self, partners: Sequence[str]) -> list[NodeChange]:
        """Return the changes for drained candidates: a reservation of candidates and partners, and a resume inside it.

        Empty if no candidate is drained.
        """
        if not self._drained:
            return []
        names, states = tuple(_names(self._drained)), "; ".join(f"{node.name} is {node}" for node in self._drained)
        user = pwd.getpwuid(os.getuid()).pw_name
        reserved = (*_names(self._candidates), *partners)
        reserve = (
            *("scontrol", "create", "reservation", f"ReservationName={self._reservation_name}"),
            *(f"Nodes={','.join(reserved)}", f"Users={user}", "StartTime=now", "Duration=UNLIMITED"),
            "Flags=MAINT,FLEX",
        )
        resume = ("scontrol", "update", f"NodeName={','.join(names)}", "State=RESUME")
        return [
            NodeChange(nodes=reserved, action=RESERVE, command=reserve, before=states),
            NodeChange(nodes=names, action=RESUME, command=resume, before=states),
        ]

    def wait_until_testable(self) -> None:
        """Wait until each resumed node responds and is usable. Raises SeatrialError after a minute."""
        deadline = time.monotonic() + _RESPONSE_LIMIT_S
        for drained in self._drained:
            while not ((node := slurm.node(drained.name)) and node.usable):
                if time.monotonic() > deadline:
                    state = f"{drained.name} is {node} {_RESPONSE_LIMIT_S:.0f} s after its resume"
                    raise SeatrialError(f"{state}. Run first: scontrol show node {drained.name}")
                time.sleep(1)

    def changed_meanwhile(self) -> dict[str, str]:
        """Return the state of each candidate that something else took out of service during the test.

        ``after_test`` leaves such a drain as it is.
        """
        changed = {}
        for name in _names(self._candidates):
            node = slurm.node(name)
            if node is None or node.needs_administrator:
                changed[name] = "unknown to Slurm" if node is None else str(node)
            if node and node.states & _DRAINED:  # a node that is only down may return to service automatically
                self._drained_meanwhile.add(name)
        return changed

    def after_test(self, results: Mapping[str, NodeResult]) -> list[NodeChange]:
        """Return drains and comments, and last the end of the reservation, which returns accepted nodes."""
        changes = []
        for node in self._candidates:
            result = results[node.name]
            accepted = result.decision is DecisionValue.ACCEPTED
            drain = result.decision is DecisionValue.REJECTED and self._flags.drain
            text = reason_text(self._run_id, result.decision, "" if accepted else result.reason)
            if node.name in self._drained_meanwhile:
                pass  # the drain that someone else made stays
            elif node in self._drained and not accepted:
                reason = text if drain else node.reason
                changes.append(_update(node, DRAIN_AGAIN, "State=DRAIN", f"Reason={reason}"))
            elif drain:
                changes.append(_update(node, DRAIN, "State=DRAIN", f"Reason={text}"))
            if self._flags.comment:
                changes.append(_update(node, COMMENT, f"Comment={text}"))
        if self._drained:
            command = ("scontrol", "delete", f"ReservationName={self._reservation_name}")
            returned = [node for node in self._drained if results[node.name].decision is DecisionValue.ACCEPTED]
            names = tuple(_names(self._drained))
            action = END_RESERVATION + (f", which returns {and_more(_names(returned), 8)}" if returned else "")
            changes.append(NodeChange(nodes=names, action=action, command=command, needs=(DRAIN_AGAIN,)))
        return changes

    def execute(self, change: NodeChange) -> None:
        """Run the command. Raises SeatrialError if Slurm refuses it."""
        slurm.command_output(change.command)

    def _partner_problem(self, node: SlurmNode) -> str:
        if self._partition not in node.partitions:
            return f"it is not in partition {self._partition}"
        if not node.usable or node.state != "IDLE" or node.blocked_by_reservation(self._reservation):
            return f"it is {node}"
        if node.comment.startswith(SEATRIAL_PREFIX) and f": {DecisionValue.REJECTED}" in node.comment:
            return f"its comment is {node.comment!r}"
        return "" if _hardware(node) == _hardware(self._candidates[0]) else "its CPUs, memory or GRES differ"

    @property
    def _reservation_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9_-]", "_", f"seatrial-{self._run_id}")[:_MAX_RESERVATION_NAME]

    def _common_partition(self) -> str:
        shared = [
            name for name in self._candidates[0].partitions if all(name in node.partitions for node in self._candidates)
        ]
        if not shared:
            raise UsageError("no partition has all these nodes: readmit the nodes of each partition separately")
        default = slurm.partition_of_jobs(None)
        return default.name if default and default.name in shared else shared[0]

    def _refusal(self, node: SlurmNode) -> str:
        if node in self._drained and not node.reason.startswith(
            (SEATRIAL_PREFIX, self._reason_prefix or SEATRIAL_PREFIX)
        ):
            if node.reason.startswith(("Prolog error", "Epilog error")):
                return (
                    "its Prolog or Epilog failed. If that was the hook of seatrial: set its reason by the command that "
                    "`seatrial hook list --state-dir DIR` prints; else give --reason-prefix"
                )
            return (
                "someone else took it out of service. seatrial returns nodes whose reason starts with "
                f"{SEATRIAL_PREFIX!r}; for this one, ask that person, then give the start of its reason with "
                "--reason-prefix"
            )
        if "NOT_RESPONDING" in node.states:
            return f"its slurmd does not respond. Run first: scontrol show node {node.name}"
        if states := node.states & (_NO_NEW_JOBS | RETURNING_STATES):
            return f"Slurm starts no job on a node that is {' and '.join(sorted(states))}"
        if states := node.states & _BUSY:
            return f"jobs run on it ({' and '.join(sorted(states))}); repeat when they have ended"
        if node.blocked_by_reservation(self._reservation):
            return "it is in a reservation. Run first: scontrol show reservation"
        if node in self._drained and not self._flags.undrain:
            return "Slurm starts no job on it; --undrain tests it in a reservation and returns it if it is accepted"
        return ""

    def _require_equal_hardware(self) -> None:
        if different := [node.name for node in self._candidates if _hardware(node) != _hardware(self._candidates[0])]:
            raise UsageError(
                f"CPUs, memory or GRES of {and_more(different, 8)} differ from those of {self._candidates[0].name}: "
                "readmit nodes of each kind separately, with partners of the same kind"
            )


def _update(node: SlurmNode, action: str, *values: str) -> NodeChange:
    return NodeChange(
        nodes=(node.name,),
        action=action,
        command=("scontrol", "update", f"NodeName={node.name}", *values),
        before=f"{node}" + (f"; comment: {node.comment}" if node.comment else ""),
    )


def _names(nodes: Sequence[SlurmNode]) -> list[str]:
    return [node.name for node in nodes]


def _accepted(node: SlurmNode) -> bool:
    return node.comment.startswith(SEATRIAL_PREFIX) and node.comment.endswith(f": {DecisionValue.ACCEPTED}")


def _hardware(node: SlurmNode) -> tuple[object, ...]:
    return node.cpus, node.memory_bytes, node.gres
