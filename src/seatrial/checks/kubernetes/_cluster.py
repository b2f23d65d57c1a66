"""Shared code of the checks of Kubernetes: access to the cluster, the nodes of the trial, comparison of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from pydantic import Field

from seatrial.checks.check import Context, Options
from seatrial.checks.declare import Answers, value
from seatrial.config.kubernetes import GPU_RESOURCE, Kubernetes
from seatrial.model import NotApplicable

if TYPE_CHECKING:
    from seatrial.discover.kubectl import Kubectl
    from seatrial.discover.kubernetes import KubernetesNode

Value = TypeVar("Value", bound=str | bool)


class KubernetesOptions(Options):
    """The settings of the trial's launcher ``kubernetes``; None if the trial has another launcher."""

    kubernetes: Kubernetes | None = Field(default=None, description="set by seatrial from the keys kubernetes.*")

    def settings(self) -> Kubernetes:
        """Return the settings of the trial. Raises NotApplicable with another launcher."""
        if self.kubernetes is None:
            raise NotApplicable("the launcher is not kubernetes")
        return self.kubernetes


def kubectl(settings: Kubernetes) -> Kubectl:
    """Return kubectl with the context and the namespace of the trial."""
    from seatrial.discover.kubectl import Kubectl

    return Kubectl(settings.namespace, settings.context)


def trial_nodes(context: Context, settings: Kubernetes) -> tuple[KubernetesNode, ...]:
    """Return the nodes that match the trial's node selector and have GPUs.

    If the trial expects 0 GPUs per node, return the matching nodes whose taints the trial's pods tolerate. Raises
    KubectlError.
    """
    from seatrial.discover.kubernetes import read_nodes

    nodes = read_nodes(kubectl(settings), settings.node_selector)
    if context.expected_gpus == 0:
        return tuple(node for node in nodes if not node.untolerated_taints(settings.tolerations))
    return tuple(node for node in nodes if node.has_gpus)


def requested_devices(context: Context, settings: Kubernetes) -> dict[str, int]:
    """Return resource → number of devices that a pod of the trial requests: expected GPUs, and kubernetes.overlay."""
    from seatrial.discover.kubernetes import device_count, is_extended

    devices = {name: device_count(text) for name, text in settings.overlay.resources.items() if is_extended(name)}
    return devices if context.expected_gpus is None else {GPU_RESOURCE: context.expected_gpus, **devices}


def nodes_differing(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return node → the majority value of the other nodes, for each node whose value is different.

    ``values``: node → its value. A majority is more than half of the other nodes. Of two nodes with different values
    both are returned.
    """
    counts = Counter(values.values())
    two_most_common = [candidate for candidate, _ in counts.most_common(2)]
    majority_by_node = {}
    for node, of_node in values.items():
        majority = next((candidate for candidate in two_most_common if candidate != of_node), None)
        if majority is not None and counts[majority] > (len(values) - 1) / 2:
            majority_by_node[node] = majority
    return majority_by_node


def missing_names(names_by_node: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return node → the names that more than half of the other nodes have and this node lacks; without empty lists."""
    counts = Counter(name for names in names_by_node.values() for name in names)
    common = [name for name, count in sorted(counts.items()) if count > (len(names_by_node) - 1) / 2]
    missing = {node: [name for name in common if name not in names] for node, names in names_by_node.items()}
    return {node: names for node, names in missing.items() if names}


def missing_counts(metric: str, names_by_node: Mapping[str, set[str]]) -> Answers:
    """Yield for each node the number of its ``missing_names``, with the names as evidence."""
    missing = missing_names(names_by_node)
    for node in names_by_node:
        yield value(metric, len(missing.get(node, ())), node, evidence=missing.get(node))
