"""Kubernetes nodes, pods and events from the output of ``kubectl get``, with the properties that a trial needs of them.

Fields that a trial does not use are ignored: every version of Kubernetes adds some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from seatrial.config.kubernetes import GPU_RESOURCE, Toleration
from seatrial.discover.kubectl import Kubectl
from seatrial.model import Frozen, SeatrialError, first_validation_error
from seatrial.util import data_files

CLIQUE_LABEL = "nvidia.com/gpu.clique"
_NODES_TIMEOUT_S = 300.0  # kubectl takes 17 s of CPU time for 10,000 nodes
# Three columns: namespace/name of the pod, its node, and for each container the number of GPUs that it requests, with
# spaces between these numbers
_GPU_USER_TEMPLATE = (
    r'{range .items[*]}{.metadata.namespace}{"/"}{.metadata.name}{"\t"}{.spec.nodeName}{"\t"}'
    r'{.spec.containers[*].resources.requests.nvidia\.com/gpu}{"\n"}{end}'
)
_QUANTITY = re.compile(r"(\d+)([kMGTPE]|[KMGTPE]i)?")
_FACTORS: dict[str | None, int] = {None: 1}
_FACTORS |= {unit: 1000**power for power, unit in enumerate("kMGTPE", 1)}
_FACTORS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)}
# The kubelet's message of Kubernetes 1.20 to 1.36 goes on with "in 13.351690873s", or with
# "in 27.88s (27.88s including waiting). Image size: 68507108 bytes."
_PULLED = re.compile(r'Successfully pulled image ".*" in ((?:[\d.]+(?:h|m|s|ms|µs|us))+)(?: \(|$)')
# A duration as Go prints it: 1m2.5s
_GO_DURATION = re.compile(r"([\d.]+)(h|ms|m|µs|us|s)")
_GO_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6}
# containerd and CRI-O report "registry.example/seatrial@sha256:…". For an image that was imported on the node, they
# report "sha256:…", which is the digest of its config and must not match.
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")
_NOT_STARTED = {"StartError", "ContainerCannotRun"}  # reasons of a container whose command did not start
# Labels that GPU Operator and Node Feature Discovery set on a node with an NVIDIA GPU, even if no device plugin runs on
# the node. 10de is the PCI vendor NVIDIA, 0302 the PCI class of 3D controllers.
_GPU_LABELS = (
    "nvidia.com/gpu.present",
    *(f"feature.node.kubernetes.io/pci-{kind}10de.present" for kind in ("", "0302_")),
)


class ApiObject(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


Item = TypeVar("Item", bound=ApiObject)


class Owner(ApiObject):
    kind: str
    name: str


class Condition(ApiObject):
    """A condition of a node or pod; ``status``: True, False or Unknown."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, (f"{self.type}={self.status}", self.reason, self.message)))


class Taint(ApiObject):
    key: str
    value: str = ""
    effect: str

    def __str__(self) -> str:
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"


def _at(path: str, default: Any = ...) -> Any:
    """A field by its path in the object of the API."""
    return Field(default, validation_alias=AliasPath(*path.split(".")))


class KubernetesNode(ApiObject):
    """The fields of a node that a trial reads. ``capacities``, ``allocatables``: resource → quantity."""

    name: str = _at("metadata.name")
    labels: dict[str, str] = _at("metadata.labels", {})
    unschedulable: bool = _at("spec.unschedulable", False)
    taints: tuple[Taint, ...] = _at("spec.taints", ())
    capacities: dict[str, str] = _at("status.capacity", {})
    allocatables: dict[str, str] = _at("status.allocatable", {})
    conditions: tuple[Condition, ...] = _at("status.conditions", ())
    kubelet_version: str = _at("status.nodeInfo.kubeletVersion")

    @property
    def ready_condition(self) -> Condition:
        """The condition Ready; its status is Unknown if the node does not report it."""
        reported = (condition for condition in self.conditions if condition.type == "Ready")
        return next(reported, Condition(type="Ready", status="Unknown", reason="not reported"))

    @property
    def problems(self) -> list[Condition]:
        """The conditions other than Ready that report a problem according to data/kubernetes.yaml."""
        bad_status = kubernetes_data().bad_conditions
        return [row for row in self.conditions if bad_status.get(row.type) == row.status]

    @property
    def unknown_conditions(self) -> list[Condition]:
        """The conditions with status True that are neither Ready nor listed in data/kubernetes.yaml."""
        listed = {"Ready", *kubernetes_data().bad_conditions}
        return [row for row in self.conditions if row.type not in listed and row.status == "True"]

    @property
    def has_gpus(self) -> bool:
        """Whether the node has NVIDIA GPUs, by its resources or its labels."""
        return GPU_RESOURCE in self.capacities or any(self.labels.get(label) == "true" for label in _GPU_LABELS)

    @property
    def mig_error(self) -> str:
        """Why ``nvidia.com/gpu`` counts no whole GPUs: MIG instances with the strategy ``single``; else empty.

        The label nvidia.com/mig.strategy does not show this: nodes whose GPUs have no MIG instances have it, too.
        """
        product = self.labels.get("nvidia.com/gpu.product", "")
        return f"MIG enabled; MIG instances are not supported ({product})" if "-MIG-" in product else ""

    @property
    def shared_gpus(self) -> str:
        """How GPUs are shared: MIG by its resources or product, ``time-slicing`` or ``mps``; empty if they are not."""
        # The kubelet keeps a resource that its plugin no longer reports, with 0 devices
        mig = sorted(name for name in self.capacities if name.startswith("nvidia.com/mig-") and self.capacity(name))
        strategy = self.labels.get("nvidia.com/gpu.sharing-strategy", "none")
        return ", ".join(filter(None, [*mig, self.mig_error, "" if strategy == "none" else strategy]))

    @property
    def driver_version(self) -> str | None:
        """The driver version from the labels of GPU Feature Discovery; None without these labels."""
        if version := self.labels.get("nvidia.com/cuda.driver-version.full"):
            return version
        parts = [self.labels.get(f"nvidia.com/cuda.driver.{part}") for part in ("major", "minor", "rev")]
        return ".".join(filter(None, parts)) or None

    @property
    def topology(self) -> dict[str, str]:
        """The labels that give the node's place in the network."""
        return {key: value for key, value in self.labels.items() if key.startswith(kubernetes_data().topology_prefixes)}

    def capacity(self, resource: str) -> int:
        """The number of devices of ``resource``, including unhealthy ones."""
        return device_count(self.capacities.get(resource, "0"))

    def allocatable(self, resource: str) -> int:
        """The number of healthy devices of ``resource``, including those that pods use."""
        return device_count(self.allocatables.get(resource, "0"))

    @property
    def extended_resources(self) -> list[str]:
        """The names of the resources that device plugins report, such as ``rdma/hca``."""
        return [name for name in self.allocatables if is_extended(name)]

    def untolerated_taints(self, tolerations: Sequence[Toleration]) -> list[Taint]:
        """The taints that keep a pod with ``tolerations`` off the node."""
        return [
            taint
            for taint in self.taints
            if taint.effect != "PreferNoSchedule"
            and taint.key != "node.kubernetes.io/unschedulable"  # set with spec.unschedulable, which is judged instead
            and not any(_tolerates(row, taint) for row in tolerations)
        ]


class ContainerState(ApiObject):
    """``reason``: why the container waits or has ended."""

    reason: str = ""
    message: str = ""
    started_at: datetime | None = None


class ContainerStatus(ApiObject):
    name: str
    image_id: str = Field(default="", alias="imageID")
    waiting: ContainerState | None = _at("state.waiting", None)
    running: ContainerState | None = _at("state.running", None)
    terminated: ContainerState | None = _at("state.terminated", None)


class Pod(ApiObject):
    name: str = _at("metadata.name")
    namespace: str = _at("metadata.namespace", "")
    owners: tuple[Owner, ...] = _at("metadata.ownerReferences", ())
    node: str = _at("spec.nodeName", "")
    phase: str = _at("status.phase", "Unknown")
    reason: str = _at("status.reason", "")
    conditions: tuple[Condition, ...] = _at("status.conditions", ())
    containers: tuple[ContainerStatus, ...] = _at("status.containerStatuses", ())
    init_containers: tuple[ContainerStatus, ...] = _at("status.initContainerStatuses", ())

    @property
    def daemon_set(self) -> str | None:
        return next((owner.name for owner in self.owners if owner.kind == "DaemonSet"), None)

    @property
    def ready(self) -> bool:
        return any(row.type == "Ready" and row.status == "True" for row in self.conditions)

    @property
    def started(self) -> bool:
        return self._started_at is not None

    @property
    def start_s(self) -> float | None:
        """The seconds from the pod's scheduling to the start of its container; None if it has not started."""
        times = [row.last_transition_time for row in self.conditions if row.type == "PodScheduled"]
        scheduled_at = times[0] if times else None
        if not self._started_at or not scheduled_at:
            return None
        # The times are from two machines, whose clocks can differ: the difference can be negative
        return max(0.0, (self._started_at - scheduled_at).total_seconds())

    def image_digest(self, container: str) -> str | None:
        """The digest of the container's image in its registry; None if unknown, as for an imported image."""
        image_ids = [status.image_id for status in self.containers if status.name == container]
        match = _DIGEST.search(image_ids[0]) if image_ids else None
        return match[1] if match else None

    @property
    def _started_at(self) -> datetime | None:
        """The start of the first container; None if its command has not started."""
        for status in self.containers[:1]:
            state = status.running or status.terminated
            if state and state.reason not in _NOT_STARTED:
                return state.started_at
        return None

    def __str__(self) -> str:
        """Name and state of the pod as in ``kubectl get pods``, with the message of the scheduler or kubelet."""
        for status in (*self.init_containers, *self.containers):
            waiting, ended = status.waiting, status.terminated
            if waiting and waiting.reason not in ("", "PodInitializing", "ContainerCreating"):
                return ": ".join(filter(None, (self.name, waiting.reason, waiting.message)))
            if ended and ended.reason not in ("", "Completed"):
                return f"{self.name}: {ended.reason}"
        unscheduled = [row for row in self.conditions if row.type == "PodScheduled" and row.status == "False"]
        reasons = (unscheduled[0].reason, unscheduled[0].message) if unscheduled else (self.reason,)
        return ": ".join([self.name, *(filter(None, reasons) if any(reasons) else (self.phase,))])


class Event(ApiObject):
    """An event of the core API; ``about``: the name of its object."""

    about: str = _at("involvedObject.name", "")
    type: str = ""
    reason: str = ""
    message: str = ""

    @property
    def pull_s(self) -> float | None:
        """The seconds that the pull of an image took, by the kubelet's message; None for any other event."""
        match = _PULLED.match(self.message) if self.reason == "Pulled" else None
        if not match:
            return None
        return sum(float(number) * _GO_SECONDS[unit] for number, unit in _GO_DURATION.findall(match[1]))


class KubernetesData(Frozen):
    """Content of data/kubernetes.yaml.

    ``bad_conditions``: condition → the status that reports a problem.
    ``topology_prefixes``: prefixes of the labels that give a node's place in the network.
    ``operator_namespaces``: namespace → regular expression of the names of the pods there that belong to operators.
    """

    bad_conditions: dict[str, str]
    topology_prefixes: tuple[str, ...]
    operator_namespaces: dict[str, str]


@cache
def kubernetes_data() -> KubernetesData:
    content = data_files.read("kubernetes.yaml")
    return KubernetesData(
        bad_conditions={kind: row["status"] for row in content["conditions"] for kind in row["types"]},
        topology_prefixes=tuple(row["prefix"] for row in content["topology_labels"]),
        operator_namespaces={row["name"]: row.get("pods", "") for row in content["operator_namespaces"]},
    )


# kubectl prints only these fields: without images and annotations, the output for 10,000 nodes has 38 MB instead of 265
# MB. It prints maps and lists as JSON, texts without quotes, and nothing for a field that is not set.
_NODE_FIELDS = KubernetesNode.model_fields
_NODE_PATHS = [
    ".".join(map(str, field.validation_alias.path))
    for field in _NODE_FIELDS.values()
    if isinstance(field.validation_alias, AliasPath)
]
_NODE_TEMPLATE = "{range .items[*]}" + '{"\\t"}'.join(f"{{.{path}}}" for path in _NODE_PATHS) + '{"\\n"}{end}'


def read_nodes(client: Kubectl, labels: Mapping[str, str] | None = None) -> Iterator[KubernetesNode]:
    """Yield the nodes that have ``labels``. Raises KubectlError, or SeatrialError for unexpected output."""
    selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items())
    arguments = ["nodes", *([f"--selector={selector}"] if selector else []), f"--output=jsonpath={_NODE_TEMPLATE}"]
    for line in re.finditer(r"(.*)\n", client.run("get", *arguments, timeout_s=_NODES_TIMEOUT_S)):
        yield _parse_node(line[1])


class GpuUser(NamedTuple):
    """A pod that requests GPUs: ``pod`` is namespace/name."""

    pod: str
    node: str
    gpus: int


def read_gpu_users(client: Kubectl) -> Iterator[GpuUser]:
    """Yield the pods of all namespaces that are on a node, request GPUs and have not ended.

    Raises KubectlError, or SeatrialError for unexpected output.
    """
    selector = "--field-selector=spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
    template = f"--output=jsonpath={_GPU_USER_TEMPLATE}"
    output = client.run("get", "pods", "--all-namespaces", selector, template, timeout_s=_NODES_TIMEOUT_S)
    for line in output.splitlines():
        try:
            pod, node, gpus = line.split("\t")
            user = GpuUser(pod, node, sum(map(device_count, gpus.split())))
        except ValueError as error:
            raise SeatrialError(f"kubectl returned an invalid line of a pod ({error}): {line[:80]!r}") from error
        if user.node and user.gpus:
            yield user


# Nodes of one pool have equal resources and taints: with the cache, all nodes share one copy in memory
_parse_cached = lru_cache(64)(json.loads)


def _parse_node(line: str) -> KubernetesNode:
    """The node from one line of output in the format ``_NODE_TEMPLATE``. Raises SeatrialError."""
    try:
        texts = zip(_NODE_FIELDS.items(), line.split("\t"), strict=True)
        return KubernetesNode.model_validate(
            {name: text if field.annotation is str else _parse_cached(text) for (name, field), text in texts if text}
        )
    except ValidationError as error:
        raise SeatrialError(f"kubectl returned an invalid Node: {first_validation_error(error)}") from error
    except ValueError as error:
        raise SeatrialError(f"kubectl returned an invalid line of a node ({error}): {line[:80]!r}") from error


def parse(objects: Sequence[Mapping[str, Any]], kind: type[Item]) -> tuple[Item, ...]:
    """The objects of ``kubectl get … -o json``. Raises SeatrialError for an object of another kind."""
    try:
        return tuple(kind.model_validate(item) for item in objects)
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
