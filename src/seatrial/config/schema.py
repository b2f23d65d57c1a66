"""The schema of a trial file. A comment gives the reason for each default that is not obvious."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, PlainSerializer, model_validator

from seatrial.config.kubernetes import Kubernetes, full_match
from seatrial.model import Frozen, ParsedThreshold

# A setting of a trial: its origin (a flag, variable or file), its dotted key and its value
Override = tuple[str, str, Any]

MAX_NAME_BYTES = 200  # the run directory is TIME-NAME: a file name has at most 255 bytes

# At most a month: larger values are typing errors, and the system's timers do not accept some of them
MAX_SECONDS = 31 * 24 * 3600
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
_UNIT_SECONDS = {"d": 24 * 3600, "h": 3600, "m": 60, "s": 1}


def _duration(value: object) -> object:
    """Return the seconds of a text such as ``30m``; other values unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", value)
    seconds = float(match[1]) * _UNIT_SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError("expected a number and s, m, h or d, such as 8m or 24h, above 0 and at most 31d")
    return seconds


def duration_setting(seconds: float) -> str:
    """Return a duration as a setting such as ``budget`` accepts it: 180 → ``3m``, 86400 → ``24h``."""
    unit = next((unit for unit in "hm" if seconds % _UNIT_SECONDS[unit] == 0), "s")
    return f"{seconds / _UNIT_SECONDS[unit]:g}{unit}"


def _folder_name(name: str) -> str:
    if not name.strip() or "/" in name or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"part of the run directory's name: expected 1 to {MAX_NAME_BYTES} bytes without '/'")
    return name


def _gigabits(value: object) -> float:
    """Return the Gbit/s of a text such as ``100 Gb/s``; a number without a unit could be bytes, and is rejected."""
    if not (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*Gb/s\s*", str(value))):
        raise ValueError("not a rate of a network interface: expected a number and Gb/s, such as 100 Gb/s")
    return float(match[1])


Gigabits = Annotated[
    float,
    BeforeValidator(_gigabits),
    Field(gt=0, le=100_000),
    PlainSerializer(lambda value: f"{value} Gb/s", return_type=str),
]


VariableName = Annotated[
    str,
    full_match(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable: letters, digits and _, no digit first"),
]


class Fabric(Frozen):
    """A network between nodes that is not RDMA: collectives are compared with the rate of the nodes' interfaces."""

    kind: Literal["tcp"]
    rate: Gigabits | None = Field(
        default=None,
        description="rate of a node's interface, such as 100 Gb/s; used where the interface reports none, as in a VM",
    )


class Cluster(Frozen):
    """The expected size of the cluster. A smaller cluster fails; a size that is not set is not judged."""

    nodes: int = Field(default=1, ge=1, le=1_000_000)  # larger values, here and below, are typing errors
    min_nodes: int | None = Field(
        default=None,
        ge=1,
        description="with Slurm: if nodes are missing, run on at least this many; the decision is then never ACCEPTED",
    )
    gpus_per_node: int | None = Field(default=None, ge=0, le=1_000)
    topology: str | None = Field(
        default=None,
        description="a file with racks and switches of the nodes, or Slurm's topology.conf or topology.yaml; by "
        "default Slurm's topology, if it has one",
    )
    fabric: Fabric | None = Field(default=None, description="{kind: tcp} for a cluster without an RDMA network")

    @model_validator(mode="after")
    def _min_nodes_at_most_nodes(self) -> Self:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes is {self.min_nodes}, expected at most nodes, which is {self.nodes}")
        return self


class Limits(Frozen):
    """Time limits in seconds. They are long: they detect hangs, not slow hardware."""

    # importing torch on many nodes from a network filesystem without a warm cache took minutes
    startup_s: Seconds = 180
    # a thread of every rank writes a heartbeat each second, even during a collective
    heartbeat_timeout_s: Seconds = 60


class Telemetry(Frozen):
    """The sampler of GPU and host gauges on every node, for dashboards and findings. No verdict uses it."""

    enabled: bool = True
    # the usual rate of cluster dashboards; NVML averages its gauges over up to a second
    hz: float = Field(default=1.0, gt=0, le=10, description="samples per second")


class CheckSettings(Frozen):
    """One check of a trial: whether it is required, additional thresholds, time limit and options."""

    required: bool = True
    limit_s: Seconds | None = Field(default=None, description="replaces the check's time limit")
    expect: dict[str, ParsedThreshold] = {}
    override: bool = Field(
        default=False,
        description="the thresholds in `expect` replace the check's rules on the same metrics, except those without "
        "which broken hardware would pass; the decision names the replaced rules",
    )
    # off by default: if a check does not apply here, nothing proves that its thresholds are met
    may_skip: bool = Field(
        default=False,
        description="if the check does not apply here, its thresholds do not prevent ACCEPTED; the decision lists it",
    )
    options: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _override_has_thresholds(self) -> Self:
        if self.override and not self.expect:
            raise ValueError("override: true needs a threshold in expect, which replaces the check's rule")
        return self


class Environment(Frozen):
    """The environment of a job on a node, set up in this order: sourced file, modules, virtual environment."""

    source: str | None = Field(default=None, description="a shell file to source, such as /shared/env.sh")
    modules: tuple[str, ...] = ()
    venv: str | None = Field(
        default=None, description="a virtual environment; by default the Python that runs seatrial"
    )
    hf_home: str | None = Field(default=None, description="HF_HOME, on a shared filesystem")


class Container(Frozen):
    """The container of the worker. Its image must have torch, and the version of seatrial that starts the trial."""

    runtime: Literal["none", "apptainer", "docker", "podman", "pyxis"] = "none"
    image: str | None = Field(default=None, description="a file, or a name that the runtime knows")
    mounts: tuple[str, ...] = Field(
        default=(), description="SOURCE:TARGET[:OPTIONS]; the run directory is always mounted"
    )


class JobPlacement(Frozen):
    """The account of Slurm jobs, and the nodes on which they may run; None: Slurm's default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None


class Slurm(JobPlacement):
    """Options of sbatch scripts, the time limit for pending jobs, and paths and interfaces of the nodes."""

    gres: str | None = Field(default=None, description="such as gpu:h100:8; by default gpu:<gpus_per_node>")
    # jobs of other users on the node would change the measurements
    exclusive: bool = True
    mem: str | None = Field(default="0", description="0: all memory of a node")
    cpus_per_task: int | None = Field(default=None, gt=0, description="by default all CPUs of the allocation")
    time_min: int | None = Field(
        default=None,
        gt=0,
        description="time limit in minutes; by default limits.startup_s plus four times the typical duration of each "
        "check: at least 10 minutes, at most limits.startup_s plus all time limits",
    )
    extra: tuple[str, ...] = Field(default=(), description="further sbatch options, without #SBATCH")
    # a new cluster has no queue; on a busy cluster the progress shows Slurm's reason while the job is pending
    queue_s: Seconds = Field(default=600, description="cancel a job that is pending for longer, in seconds")
    # torchrun's rendezvous uses the address of this interface if some node does not resolve the first node's name
    interface: str = "eth0"
    scratch: str = Field(
        default="/tmp",
        description="directory on each node for results until they are fetched, if the run directory is not shared",
    )


class Config(Frozen):
    """A resolved trial."""

    name: Annotated[str, AfterValidator(_folder_name)]
    description: str = ""
    launcher: Literal["auto", "local", "slurm", "torchrun", "kubernetes"] = "auto"
    baseline: str | None = Field(default=None, description="a file of `seatrial baseline learn`")
    group: str | None = Field(
        default=None, min_length=1, description="a group that may read the run directory; by default only its owner may"
    )
    budget: Annotated[Seconds, BeforeValidator(_duration)] | None = Field(
        default=None, description="time under load of the checks that have the option budget_s, such as 8m, 30m or 24h"
    )
    cluster: Cluster = Cluster()
    limits: Limits = Limits()
    # on by default: a second measurement costs a minute, a node returned by mistake costs days
    retry: bool = Field(
        default=True,
        description="repeat a check that violates a performance threshold; it fails only if two of up to three runs do",
    )
    localize: bool = Field(
        default=True,
        description="search for the slow node, GPU, rail or path if a multi-node check violates a threshold",
    )
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()
    environment: Environment = Environment()
    container: Container = Container()
    telemetry: Telemetry = Telemetry()
    env: dict[VariableName, str] = Field(default={}, description="variables for the workers, such as NCCL_DEBUG")
    checks: dict[str, CheckSettings]

    @model_validator(mode="after")
    def _min_nodes_needs_slurm(self) -> Self:
        if self.cluster.min_nodes is not None and not self.uses_slurm:
            raise ValueError(
                "cluster.min_nodes (--min-nodes) needs --launcher slurm, which knows the missing nodes: with another "
                "launcher set --nodes to the number of available nodes"
            )
        return self

    @model_validator(mode="after")
    def _kubernetes_settings_are_consistent(self) -> Self:
        if self.launcher != "kubernetes":
            return self
        if not self.kubernetes.image:
            workload = self.kubernetes.workload
            launcher = "kubernetes" if workload == "job" else f"kubernetes ({workload})"
            raise ValueError(
                f"kubernetes.image is required with launcher {launcher}: --set kubernetes.image=IMAGE, an image with "
                "torch and seatrial"
            )
        if (names := self.kubernetes.nodes) and len(set(names)) != self.cluster.nodes:
            raise ValueError(
                f"kubernetes.nodes has {len(set(names))} nodes, cluster.nodes (--nodes) is {self.cluster.nodes}: "
                "expected the same number"
            )
        if self.container != Container():
            raise ValueError(
                "container.* is for other launchers: with launcher kubernetes the image is kubernetes.image, and "
                "volumes come from kubernetes.claim"
            )
        if self.environment.venv:
            raise ValueError(
                f"environment.venv {self.environment.venv} is a directory of this host, which pods lack: install "
                "seatrial in kubernetes.image and set environment.venv to null"
            )
        return self

    @property
    def umask(self) -> str:
        """The umask of all processes that write to the run directory, in octal."""
        return "027" if self.group else "077"

    @property
    def uses_slurm(self) -> bool:
        """Whether Slurm starts the jobs: launcher slurm, or launcher auto with several nodes."""
        return self.launcher == "slurm" or (self.launcher == "auto" and self.cluster.nodes > 1)

    def has_shared_folder(self, check: str) -> bool:
        """Whether the nodes may share a folder for ``check``; several pods share only the claim and given paths."""
        if self.launcher != "kubernetes" or self.cluster.nodes == 1:
            return True
        return bool(self.kubernetes.claim or self.checks[check].options.get("paths"))
