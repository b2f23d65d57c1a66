"""Candidates of a readmission in Kubernetes: testable nodes, their partners, their condition and taint.

The pods of the test tolerate the taint and a cordon, so that a node is tested before it returns to service. seatrial
changes only its own condition (a patch of the status subresource, merged by type) and its own taint; it never cordons.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from seatrial.config.kubernetes import GPU_RESOURCE, Kubernetes, Toleration
from seatrial.discover.kubectl import Kubectl
from seatrial.discover.kubernetes import Condition, KubernetesNode, read_nodes
from seatrial.model import DecisionValue, SeatrialError, UsageError
from seatrial.operate.node_changes import (
    ADD_TAINT,
    CONDITION,
    REMOVE_TAINT,
    Flags,
    NodeChange,
    NodeResult,
    Partner,
    reason_text,
)
from seatrial.util.text import and_more

CONDITION_TYPE, TAINT, EFFECT = "seatrial.dev/Accepted", "seatrial.dev/not-accepted", "NoSchedule"
# Taints in deploy/readmit/node-readiness-rules.yaml. Node Readiness Controller sets them according to the condition
READINESS_TAINTS = ("readiness.k8s.io/seatrial-new", "readiness.k8s.io/seatrial-rejected")
_STATUS = {DecisionValue.ACCEPTED: "True", DecisionValue.REJECTED: "False", DecisionValue.INCOMPLETE: "Unknown"}
_TOLERATED = (
    Toleration(key=TAINT, operator="Exists", effect=EFFECT),
    Toleration(key="node.kubernetes.io/unschedulable", operator="Exists", effect="NoSchedule"),
    *(Toleration(key=key, operator="Exists", effect=EFFECT) for key in READINESS_TAINTS),
)


class KubernetesCandidates:
    """The candidates as Kubernetes shows them at the start; ``config``: the settings of the trial."""

    def __init__(self, names: Sequence[str], flags: Flags, run_id: str, config: Kubernetes) -> None:
        self._flags, self._run_id = flags, run_id
        self._kubectl = Kubectl(config.namespace, config.context)
        self._tolerations = (*config.tolerations, *_TOLERATED)
        self._nodes_by_name = {node.name: node for node in read_nodes(self._kubectl)}
        if unknown := [name for name in names if name not in self._nodes_by_name]:
            raise UsageError(f"Kubernetes has no node {and_more(unknown, 8)}. Run first: kubectl get nodes")
        self._candidates = [self._nodes_by_name[name] for name in names]
        refusals = {node.name: self._refusal(node) for node in self._candidates}
        if refused := [f"{name}: {why}" for name, why in refusals.items() if why]:
            raise SeatrialError(f"not tested, nothing was changed: {'; '.join(refused)}")

    @property
    def cluster_node_count(self) -> int:
        """The number of nodes with GPUs, or of all nodes if none has GPUs."""
        return len([node for node in self._nodes_by_name.values() if node.has_gpus]) or len(self._nodes_by_name)

    def partners(self, names: Sequence[str] = ()) -> list[Partner]:
        """Return ``names``, by default all schedulable nodes with the condition True.

        Raises UsageError if one of ``names`` cannot be a partner.
        """
        if names:
            refusals = {name: self._partner_refusal(name) for name in names}
            if refused := [f"{name}: {why}" for name, why in refusals.items() if why]:
                raise UsageError(f"--partner {'; '.join(refused)}")
            return [Partner(node=name, why="--partner") for name in names]
        partners = []
        for name, node in self._nodes_by_name.items():
            condition = _condition(node)
            if condition and condition.status == "True" and not self._partner_refusal(name):
                partners.append(Partner(node=name, why=str(condition)))
        return partners

    def settings(self, nodes: Sequence[str]) -> list[tuple[str, str, Any]]:
        """Return the settings that run the jobs on ``nodes``, even if these are cordoned or have the taint."""
        values: list[tuple[str, Any]] = [
            ("launcher", "kubernetes"),
            ("cluster.nodes", len(nodes)),
            ("kubernetes.nodes", list(nodes)),
            ("kubernetes.tolerations", [each.model_dump(mode="json") for each in self._tolerations]),
        ]
        return [("seatrial readmit", key, value) for key, value in values]

    def before_test(self, partners: Sequence[str]) -> list[NodeChange]:
        """Return no change: the pods of the test tolerate the taint and a cordon."""
        del partners
        return []

    def wait_until_testable(self) -> None:
        """Return at once: nothing was changed."""

    def changed_meanwhile(self) -> dict[str, str]:
        """Return no node: seatrial changes its own condition and taint only, whatever else happens to a node."""
        return {}

    def after_test(self, results: Mapping[str, NodeResult]) -> list[NodeChange]:
        """Return the changes of condition and taint, for each node the condition first, since controllers read it."""
        changes = []
        for node in self._candidates:
            result = results[node.name]
            tainted = any((taint.key, taint.effect) == (TAINT, EFFECT) for taint in node.spec.taints)
            if self._flags.condition:
                changes.append(self._set_condition(node, result))
            if self._flags.undrain and tainted and result.decision is DecisionValue.ACCEPTED:
                changes.append(self._change(node, REMOVE_TAINT, "taint", "node", node.name, f"{TAINT}:{EFFECT}-"))
            if self._flags.drain and not tainted and result.decision is DecisionValue.REJECTED:
                changes.append(self._change(node, ADD_TAINT, "taint", "node", node.name, f"{TAINT}:{EFFECT}"))
        return changes

    def execute(self, change: NodeChange) -> None:
        """Run the command. Raises KubectlError if the API server refuses it."""
        prefix = self._kubectl.command()  # kubectl with its context and namespace, which ``run`` adds again
        self._kubectl.run(*change.command[len(prefix) :])

    def _set_condition(self, node: KubernetesNode, result: NodeResult) -> NodeChange:
        """Return the change of the condition. As in the kubelet, lastTransitionTime changes only with the status."""
        now, status, before = datetime.now(UTC), _STATUS[result.decision], _condition(node)
        since = before.last_transition_time if before and before.status == status else None
        cause = "" if result.decision is DecisionValue.ACCEPTED else result.reason
        condition = {
            "type": CONDITION_TYPE,
            "status": status,
            "reason": result.decision.capitalize(),
            "message": reason_text(self._run_id, result.decision, cause),
            "lastHeartbeatTime": _time(now),
            "lastTransitionTime": _time(since or now),
        }
        patch = json.dumps({"status": {"conditions": [condition]}})
        args = ("patch", "node", node.name, "--subresource=status", "--type=strategic", f"--patch={patch}")
        return self._change(node, CONDITION, *args)

    def _change(self, node: KubernetesNode, action: str, *args: str) -> NodeChange:
        taints = ", ".join(map(str, node.spec.taints)) or "no taint"
        before = f"{_condition(node) or f'no condition {CONDITION_TYPE}'}; {taints}"
        return NodeChange(nodes=(node.name,), action=action, command=tuple(self._kubectl.command(*args)), before=before)

    def _refusal(self, node: KubernetesNode) -> str:
        """Return why the test cannot run on the node; empty if it can."""
        if node.mig_error:
            return f"{node.mig_error}. Run first: kubectl describe node {node.name}"
        if node.ready_condition.status != "True":
            return f"{node.ready_condition}. Run first: kubectl describe node {node.name}"
        taints = node.untolerated_taints(self._tolerations)
        return f"untolerated taint {', '.join(map(str, taints))}: add it to kubernetes.tolerations" if taints else ""

    def _partner_refusal(self, name: str) -> str:
        """Return why the node cannot be a partner; empty if it can."""
        node, candidate = self._nodes_by_name.get(name), self._candidates[0]
        if node is None:
            return "Kubernetes has no such node"
        if node in self._candidates:
            return "it is a candidate"
        if node.spec.unschedulable or any(taint.key in (TAINT, *READINESS_TAINTS) for taint in node.spec.taints):
            return "it is cordoned or not accepted"
        if why := self._refusal(node):
            return why
        same_gpu_count = node.allocatable(GPU_RESOURCE) == candidate.allocatable(GPU_RESOURCE)
        return "" if same_gpu_count else f"it has another number of GPUs than {candidate.name}"


def _condition(node: KubernetesNode) -> Condition | None:
    return next((each for each in node.status.conditions if each.type == CONDITION_TYPE), None)


def _time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
