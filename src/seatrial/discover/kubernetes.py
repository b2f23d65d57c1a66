"""Kubernetes nodes and pods from the JSON of ``kubectl get -o json``, and what their fields mean for a trial.

Fields that a trial does not use are ignored: every version of Kubernetes adds some.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from seatrial.config.kubernetes import GPU_RESOURCE, Toleration
from seatrial.model import Frozen, SeatrialError, first_validation_error
from seatrial.util import data_files

CLIQUE_LABEL = "nvidia.com/gpu.clique"
_QUANTITY = re.compile(r"(\d+)([kMGTPE]|[KMGTPE]i)?")
_FACTORS: dict[str | None, int] = {None: 1, "k": 10**3, "Ki": 2**10} | {
    letter + suffix: base**power
    for power, letter in enumerate("MGTPE", 2)
    for suffix, base in (("", 10**3), ("i", 2**10))
}
# Labels that a node with an NVIDIA GPU has, also if no device plugin runs on it: GPU Operator, Node Feature Discovery
_GPU_LABELS = (
    "nvidia.com/gpu.present",
    *(f"feature.node.kubernetes.io/pci-{kind}10de.present" for kind in ("", "0302_")),
)


class ApiObject(BaseModel):
    """A part of an object of the Kubernetes API."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


Item = TypeVar("Item", bound=ApiObject)


class Owner(ApiObject):
    kind: str
    name: str


class Metadata(ApiObject):
    name: str
    namespace: str = ""
    labels: dict[str, str] = {}
    owner_references: tuple[Owner, ...] = ()


class Condition(ApiObject):
    """A condition of a node or pod; ``status``: True, False or Unknown."""

    type: str
    status: str
    reason: str = ""
    message: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (f"{self.type}={self.status}", self.reason, self.message)))


class Taint(ApiObject):
    key: str
    value: str = ""
    effect: str

    def __str__(self) -> str:
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"


class NodeSpec(ApiObject):
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeInfo(ApiObject):
    kubelet_version: str


class NodeStatus(ApiObject):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()
    node_info: NodeInfo


class Node(ApiObject):
    """A node of the cluster."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels

    @property
    def ready(self) -> Condition:
        """The condition Ready; Unknown if the node does not report it."""
        found = (condition for condition in self.status.conditions if condition.type == "Ready")
        return next(found, Condition(type="Ready", status="Unknown", reason="not reported"))

    @property
    def problems(self) -> list[Condition]:
        """The conditions other than Ready that report a problem, by data/kubernetes.yaml."""
        bad = known().bad_conditions
        return [condition for condition in self.status.conditions if bad.get(condition.type) == condition.status]

    @property
    def unknown_conditions(self) -> list[Condition]:
        """The conditions that data/kubernetes.yaml does not list, with status True."""
        listed = {"Ready", *known().bad_conditions}
        return [row for row in self.status.conditions if row.type not in listed and row.status == "True"]

    @property
    def has_gpus(self) -> bool:
        """Whether the node has NVIDIA GPUs, by its resources or its labels."""
        return GPU_RESOURCE in self.status.capacity or any(self.labels.get(label) == "true" for label in _GPU_LABELS)

    @property
    def shared_gpus(self) -> str:
        """How one GPU becomes several resources: MIG, time-slicing or MPS; empty if it does not."""
        mig = sorted(name for name in self.status.capacity if name.startswith("nvidia.com/mig-"))
        strategy = self.labels.get("nvidia.com/gpu.sharing-strategy", "none")
        return ", ".join([*mig, *([] if strategy == "none" else [strategy])])

    @property
    def driver_version(self) -> str | None:
        """The driver version by GPU Feature Discovery; None without its labels."""
        if full := self.labels.get("nvidia.com/cuda.driver-version.full"):
            return full
        parts = [self.labels.get(f"nvidia.com/cuda.driver.{part}") for part in ("major", "minor", "rev")]
        return ".".join(filter(None, parts)) or None

    @property
    def topology(self) -> dict[str, str]:
        """The labels of the node's place in the network."""
        return {key: value for key, value in self.labels.items() if key.startswith(known().topology_prefixes)}

    def capacity(self, resource: str) -> int:
        """The number of devices of ``resource``, with those that are unhealthy."""
        return device_count(self.status.capacity.get(resource, "0"))

    def allocatable(self, resource: str) -> int:
        """The number of healthy devices of ``resource``, with those that pods use."""
        return device_count(self.status.allocatable.get(resource, "0"))

    @property
    def extended_resources(self) -> list[str]:
        """The names of the resources that device plugins report, such as ``rdma/hca``."""
        return [name for name in self.status.allocatable if is_extended(name)]

    def barring_taints(self, tolerations: Sequence[Toleration]) -> list[Taint]:
        """The taints that keep a pod with ``tolerations`` off the node."""
        return [
            taint
            for taint in self.spec.taints
            if taint.effect != "PreferNoSchedule"
            and taint.key != "node.kubernetes.io/unschedulable"  # see spec.unschedulable
            and not any(_tolerates(row, taint) for row in tolerations)
        ]


class PodStatus(ApiObject):
    phase: str = "Unknown"
    conditions: tuple[Condition, ...] = ()
    reason: str = ""
    container_statuses: tuple[dict[str, Any], ...] = ()
    init_container_statuses: tuple[dict[str, Any], ...] = ()


class PodSpec(ApiObject):
    node_name: str = ""


class Pod(ApiObject):
    """A pod, as far as its place and its readiness matter."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def daemon_set(self) -> str | None:
        """The name of the DaemonSet that the pod belongs to."""
        return next((owner.name for owner in self.metadata.owner_references if owner.kind == "DaemonSet"), None)

    @property
    def ready(self) -> bool:
        return any(row.type == "Ready" and row.status == "True" for row in self.status.conditions)

    def __str__(self) -> str:
        """The state of the pod as ``kubectl get pods`` shows it: the reason of a waiting container, or the phase."""
        for row in (*self.status.init_container_statuses, *self.status.container_statuses):
            state = row.get("state", {})
            reason = state.get("waiting", {}).get("reason") or state.get("terminated", {}).get("reason")
            if reason and reason not in ("Completed", "PodInitializing"):
                return f"{self.metadata.name}: {reason}"
        return f"{self.metadata.name}: {self.status.reason or self.status.phase}"


class KnownTerms(Frozen):
    """Content of data/kubernetes.yaml: condition → status that reports a problem; prefixes of labels; namespaces.

    ``operator_namespaces``: namespace → regular expression of the names of the pods there that belong to operators.
    """

    bad_conditions: dict[str, str]
    topology_prefixes: tuple[str, ...]
    operator_namespaces: dict[str, str]


@cache
def known() -> KnownTerms:
    """The conditions, labels and namespaces of data/kubernetes.yaml."""
    content = data_files.read("kubernetes.yaml")
    return KnownTerms(
        bad_conditions={kind: row["status"] for row in content["conditions"] for kind in row["types"]},
        topology_prefixes=tuple(row["prefix"] for row in content["topology_labels"]),
        operator_namespaces={row["name"]: row.get("pods", "") for row in content["operator_namespaces"]},
    )


def parse_nodes(objects: Sequence[Mapping[str, Any]]) -> tuple[Node, ...]:
    """The nodes of ``kubectl get nodes -o json``. Raises SeatrialError for an object that is not a node."""
    return _parse(objects, Node)


def parse_pods(objects: Sequence[Mapping[str, Any]]) -> tuple[Pod, ...]:
    """The pods of ``kubectl get pods -o json``. Raises SeatrialError for an object that is not a pod."""
    return _parse(objects, Pod)


def _parse(objects: Sequence[Mapping[str, Any]], kind: type[Item]) -> tuple[Item, ...]:
    try:
        return tuple(kind.model_validate(each) for each in objects)
    except ValidationError as error:
        raise SeatrialError(f"kubectl returned an invalid {kind.__name__}: {first_validation_error(error)}") from error


def device_count(quantity: str) -> int:
    """The number in a quantity of devices, such as ``8`` or ``1k``. Raises SeatrialError for any other text."""
    match = _QUANTITY.fullmatch(quantity)
    if not match:
        raise SeatrialError(f"invalid number of devices: {quantity!r}, expected a whole number such as 8 or 1k")
    return int(match[1]) * _FACTORS[match[2]]


def is_extended(resource: str) -> bool:
    """Whether a device plugin reports ``resource``: extended resources have a domain, such as ``rdma/hca``."""
    return "/" in resource


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect not in (None, taint.effect) or toleration.key not in (None, taint.key):
        return False
    return toleration.operator == "Exists" or (toleration.value or "") == taint.value
