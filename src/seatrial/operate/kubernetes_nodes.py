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
from seatrial.model import DecisionValue
from seatrial.operate.node_changes import (
    ADD_TAINT,
    CONDITION,
    REMOVE_TAINT,
    Candidates,
    Flags,
    NodeChange,
    NodeResult,
    Partner,
    reason_text,
)

CONDITION_TYPE, TAINT, EFFECT = "seatrial.dev/Accepted", "seatrial.dev/not-accepted", "NoSchedule"
# Taints in deploy/readmit/node-readiness-rules.yaml. Node Readiness Controller sets them according to the condition
READINESS_TAINTS = ("readiness.k8s.io/seatrial-new", "readiness.k8s.io/seatrial-rejected")
_STATUS = {DecisionValue.ACCEPTED: "True", DecisionValue.REJECTED: "False", DecisionValue.INCOMPLETE: "Unknown"}
_TOLERATED = (
    Toleration(key=TAINT, operator="Exists", effect=EFFECT),
    Toleration(key="node.kubernetes.io/unschedulable", operator="Exists", effect="NoSchedule"),
    *(Toleration(key=key, operator="Exists", effect=EFFECT) for key in READINESS_TAINTS),
)


class KubernetesCandidates(Candidates[KubernetesNode]):
    """The candidates in Kubernetes; ``config``: the settings of the trial. Nothing is changed before the test."""

    scheduler, list_nodes = "Kubernetes", "kubectl get nodes"

    def __init__(self, names: Sequence[str], flags: Flags, run_id: str, config: Kubernetes) -> None:
        self._kubectl = Kubectl(config.namespace, config.context)
        self._tolerations = (*config.tolerations, *_TOLERATED)
        super().__init__(names, read_nodes(self._kubectl), flags, run_id)
        self._require_testable()

    @property
    def cluster_node_count(self) -> int:
        """The number of nodes with GPUs, or of all nodes if none has GPUs."""
        return len([node for node in self._nodes_by_name.values() if node.has_gpus]) or len(self._nodes_by_name)

    def _partners(self, possible: list[KubernetesNode]) -> list[Partner]:
        """Return the nodes with the condition True."""
        conditions = [(node.name, condition) for node in possible if (condition := _condition(node))]
        return [Partner(node=name, why=str(condition)) for name, condition in conditions if condition.status == "True"]

    def _settings(self, nodes: Sequence[str]) -> dict[str, Any]:
        """Return the settings that run the jobs on ``nodes``, even if these are cordoned or have the taint."""
        return {
            "launcher": "kubernetes",
            "cluster.nodes": len(nodes),
            "kubernetes.nodes": list(nodes),
            "kubernetes.tolerations": [each.model_dump(mode="json") for each in self._tolerations],
        }

    def after_test(self, results: Mapping[str, NodeResult]) -> list[NodeChange]:
        """Return the changes of condition and taint, for each node the condition first, since controllers read it."""
        changes = []
        for node in self._candidates:
            result = results[node.name]
            tainted = any((taint.key, taint.effect) == (TAINT, EFFECT) for taint in node.taints)
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
        taints = ", ".join(map(str, node.taints)) or "no taint"
        before = f"{_condition(node) or f'no condition {CONDITION_TYPE}'}; {taints}"
        return NodeChange(nodes=(node.name,), action=action, command=tuple(self._kubectl.command(*args)), before=before)

    def _refusal(self, node: KubernetesNode) -> str:
        if node.mig_error:
            return f"{node.mig_error}. Run first: kubectl describe node {node.name}"
        if node.ready_condition.status != "True":
            return f"{node.ready_condition}. Run first: kubectl describe node {node.name}"
        taints = node.untolerated_taints(self._tolerations)
        return f"untolerated taint {', '.join(map(str, taints))}: add it to kubernetes.tolerations" if taints else ""

    def _partner_problem(self, node: KubernetesNode) -> str:
        if node.unschedulable or any(taint.key in (TAINT, *READINESS_TAINTS) for taint in node.taints):
            return "it is cordoned or not accepted"
        if why := self._refusal(node):
            return why
        same_gpu_count = node.allocatable(GPU_RESOURCE) == self._candidates[0].allocatable(GPU_RESOURCE)
        return "" if same_gpu_count else f"it has another number of GPUs than {self._candidates[0].name}"


def _condition(node: KubernetesNode) -> Condition | None:
    return next((each for each in node.conditions if each.type == CONDITION_TYPE), None)


def _time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
