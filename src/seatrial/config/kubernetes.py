"""Settings of the Kubernetes launcher: the group ``kubernetes`` of a trial file."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from seatrial.model import Frozen

# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_SUBDOMAIN = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"


def full_match(pattern: str, expected: str) -> AfterValidator:
    """Return a validator that accepts texts of at most 253 characters which match the whole pattern."""

    def validate(text: str) -> str:
        if len(text) > 253 or not re.fullmatch(pattern, text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(validate)


ObjectName = Annotated[
    str,
    full_match(_DNS_SUBDOMAIN, "a name of Kubernetes: lower-case letters, digits, - and .; a letter or digit first"),
]
Namespace = Annotated[
    str, full_match(_DNS_LABEL, "a namespace: at most 63 lower-case letters, digits and -; a letter or digit first")
]
LabelKey = Annotated[
    str, full_match(rf"({_DNS_SUBDOMAIN}/)?{_LABEL_NAME}", "a label key, such as topology.kubernetes.io/zone")
]
LabelValue = Annotated[str, full_match(rf"({_LABEL_NAME})?", "a label value: at most 63 letters, digits, -, _ and .")]
Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
    full_match(_QUANTITY, "a quantity of Kubernetes, such as 8, 500m or 64Gi"),
]
PositiveQuantity = Annotated[Quantity, full_match(r".*[1-9].*", "a quantity above 0, such as 16Gi")]
# registry/repository:tag@digest: neither a space nor an upper-case letter in the repository
ImageName = Annotated[
    str,
    full_match(
        r"([A-Za-z0-9.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?",
        "an image name, such as registry.example/seatrial:1.0",
    ),
]
Registry = Annotated[
    str, full_match(r"[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*", "a registry, such as mirror.example:5000/cache")
]
AbsolutePath = Annotated[
    str,
    # pods have a volume of their own at /dev/shm
    full_match(
        r"(?!/dev/shm$)(?!.*/\.\.(/|$))/[A-Za-z0-9_./-]*[A-Za-z0-9_-]", "an absolute path without .., not /dev/shm"
    ),
]
Capability = Annotated[str, full_match(r"[A-Z][A-Z_]*", "a capability without CAP_, such as IPC_LOCK")]
# the resource of NVIDIA's device plugin; pods request cluster.gpus_per_node of it
GPU_RESOURCE = "nvidia.com/gpu"


class Toleration(Frozen):
    """A toleration of pods."""

    key: LabelKey | None = Field(default=None, description="not set: tolerates every taint")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="not set: every effect"
    )

    @model_validator(mode="after")
    def _value_fits_operator(self) -> Self:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists takes no value")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("operator Equal needs a key: set key, or operator: Exists")
        return self


class Claim(Frozen):
    """A PersistentVolumeClaim on which the pods' results stay; they are also fetched through the pods' logs."""

    name: ObjectName
    path: AbsolutePath = Field(default="/seatrial", description="where pods mount it; each pod writes below this path")


class Kueue(Frozen):
    """Settings for Kueue, which then admits the workload: a queue, and the topology level that holds all pods."""

    queue: ObjectName = Field(description="the LocalQueue")
    required_topology: LabelKey | None = Field(default=None, description="label key of the level that holds all pods")
    preferred_topology: LabelKey | None = Field(default=None, description="the same, as a preference")

    @model_validator(mode="after")
    def _at_most_one_topology(self) -> Self:
        if self.required_topology and self.preferred_topology:
            raise ValueError("set required_topology or preferred_topology, not both")
        return self


class PodOverlay(Frozen):
    """Fields of a pod that only some clusters need, mostly for RDMA."""

    resources: dict[LabelKey, PositiveQuantity] = Field(
        default={}, description="requests and limits of a pod beside its GPUs, such as rdma/ib: 1 or memory: 512Gi"
    )
    annotations: dict[LabelKey, str] = Field(
        default={}, description="of pods, such as k8s.v1.cni.cncf.io/networks of Multus"
    )
    capabilities: tuple[Capability, ...] = Field(default=(), description="such as IPC_LOCK; needs run_as_user: 0")
    privileged: bool = False
    host_network: bool = Field(default=False, description="pods use the network of their node")
    # any user but root: 65532 is the user `nonroot` of common base images
    run_as_user: int = Field(default=65532, ge=0, le=2**31 - 1, description="user id of the pod; 0 is root")
    runtime_class: ObjectName | None = None
    priority_class: ObjectName | None = None
    scheduler: ObjectName | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if GPU_RESOURCE in self.resources:
            raise ValueError(f"resources: {GPU_RESOURCE} is cluster.gpus_per_node (--gpus-per-node); set it there")
        for name, quantity in self.resources.items():
            if "/" in name and not re.fullmatch(r"[0-9]+([kMGTPE]|[KMGTPE]i)?", quantity):
                raise ValueError(f"resources: {name}: expected a whole number of devices (got {quantity!r})")
        if self.capabilities and self.run_as_user:
            raise ValueError(
                f"capabilities need run_as_user: 0, since Kubernetes gives user {self.run_as_user} no capabilities"
            )
        return self


class Kubernetes(Frozen):
    """The workload that runs on Kubernetes. ``job`` needs no operator: an Indexed Job and a headless Service."""

    workload: Literal["job", "jobset", "trainjob"] = "job"
    context: str | None = Field(default=None, description="context of the kubeconfig; by default the current one")
    namespace: Namespace | None = Field(default=None, description="by default the namespace of the context")
    image: ImageName | None = Field(
        default=None, description="has torch and seatrial in the version that starts the trial; required"
    )
    registry: Registry | None = Field(
        default=None, description="a mirror, such as mirror.example:5000/cache; replaces the registry of the image"
    )
    image_pull_secrets: tuple[ObjectName, ...] = ()
    service_account: ObjectName | None = None
    node_selector: dict[LabelKey, LabelValue] = {}
    nodes: tuple[ObjectName, ...] = Field(default=(), description="run on exactly these nodes; by default on any")
    # the taint that GPU node pools usually have
    tolerations: tuple[Toleration, ...] = (Toleration(key=GPU_RESOURCE, operator="Exists", effect="NoSchedule"),)
    claim: Claim | None = Field(default=None, description="by default results are on the node until they are fetched")
    # NCCL needs a few hundred MiB for 8 ranks, data loaders more; /dev/shm counts as memory of the pod
    shm_size: PositiveQuantity = Field(default="16Gi", description="limit of /dev/shm, which is in memory")
    # a new cluster has no queue; the reason is shown while pods are pending
    queue_s: float = Field(
        default=600,
        gt=0,
        le=31 * 24 * 3600,
        description="delete a workload whose pods are pending for longer, in seconds",
    )
    kueue: Kueue | None = Field(default=None, description="{queue: NAME}: Kueue admits the workload")
    runtime: ObjectName = Field(default="torch-distributed", description="the ClusterTrainingRuntime of a trainjob")
    overlay: PodOverlay = PodOverlay()

    @model_validator(mode="after")
    def _trainjob_fits_its_runtime(self) -> Self:
        """A TrainJob cannot patch these fields of its runtime (PodSpecPatch of Kubeflow Trainer)."""
        fields = ("host_network", "priority_class", "runtime_class", "scheduler")
        if self.workload == "trainjob" and (not_patched := [name for name in fields if getattr(self.overlay, name)]):
            raise ValueError(
                f"overlay.{not_patched[0]}: a TrainJob cannot set it; set it in a ClusterTrainingRuntime, and name "
                "that with kubernetes.runtime"
            )
        return self
