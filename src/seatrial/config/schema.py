"""What a trial may say: the schema of its YAML file. The reason for a default stands beside it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from seatrial.model import Frozen, ParsedThreshold

MAX_NAME_BYTES = 200  # bytes: with the time before it, a file name of 255 bytes can hold it

# A month: whatever is meant to wait for longer is a slip of the pen, and the system's timers take no 1e300 seconds.
Seconds = Annotated[float, Field(gt=0, le=31 * 24 * 3600)]


def _folder_name(name: str) -> str:
    if not name.strip() or "/" in name or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"runs lie in a folder of this name: expected 1 to {MAX_NAME_BYTES} bytes without '/'")
    return name


def _variable_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("no name of an environment variable: expected letters, digits and _, no digit first")
    return name


class Cluster(Frozen):
    """What was promised. Absent promises are not judged; a promise that is not kept fails."""

    nodes: int = Field(default=1, ge=1, le=1_000_000)  # more, here and below, is a slip of the pen
    gpus_per_node: int | None = Field(default=None, ge=0, le=1_000)


class Limits(Frozen):
    """Seconds after which seatrial stops waiting. Generous: they catch hangs, not slowness."""

    # importing torch from a cold network filesystem on many nodes has been seen to take minutes
    startup_s: Seconds = 180
    # every rank gives a sign of life each second from a thread of its own; a minute of silence is no hiccup
    heartbeat_timeout_s: Seconds = 60


class Telemetry(Frozen):
    """A sampler beside every job on a node: GPU and host, for the dashboards of the report. It judges nothing."""

    enabled: bool = True
    # what dashboards of clusters show; NVML's own figures are means over up to a second
    hz: float = Field(default=1.0, gt=0, le=10, description="samples a second")


class CheckSettings(Frozen):
    """One check in a trial: whether the decision needs it, thresholds that outrank the check's own, its options."""

    required: bool = True
    limit_s: Seconds | None = Field(default=None, description="in place of the check's own time limit")
    expect: dict[str, ParsedThreshold] = {}
    # off: who writes a threshold wants to know that it holds, and a check that did not apply has not shown it
    may_skip: bool = Field(
        default=False,
        description="accept without the thresholds of `expect` where the check cannot apply; the decision names them",
    )
    options: dict[str, JsonValue] = {}


class Environment(Frozen):
    """How a job on a node gets its environment, in this order: a file to source, modules, a virtual environment."""

    source: str | None = Field(default=None, description="a shell file to source, such as /shared/env.sh")
    modules: tuple[str, ...] = ()
    venv: str | None = Field(default=None, description="a virtual environment; else the python that seatrial runs in")
    hf_home: str | None = Field(default=None, description="HF_HOME, on a filesystem that all nodes share")


class Container(Frozen):
    """A wrapper around what runs on a node."""

    runtime: Literal["none", "apptainer", "pyxis"] = "none"
    image: str | None = None
    mounts: tuple[str, ...] = Field(
        default=(), description="SOURCE:TARGET[:OPTIONS]; the run directory is always there"
    )


class Slurm(Frozen):
    """What goes into the header of an sbatch script, and how long to wait for it."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    gres: str | None = Field(default=None, description="such as gpu:h100:8; by default gpu:<gpus_per_node>")
    # a measurement beside somebody else's job measures that job
    exclusive: bool = True
    mem: str | None = Field(default="0", description="0 is all of a node's memory")
    cpus_per_task: int | None = Field(default=None, gt=0, description="by default all CPUs of the allocation")
    time_min: int | None = Field(default=None, gt=0, description="by default what the checks may take")
    extra: tuple[str, ...] = Field(default=(), description="further lines for the header, without #SBATCH")
    # a fresh cluster has no queue; one with users has, and the reason is shown while waiting
    queue_s: Seconds = Field(default=600, description="give up when the job has not started by then")
    # used for the rendezvous where the first node's name does not resolve everywhere
    interface: str = "eth0"
    scratch: str = Field(
        default="/tmp", description="on each node: keeps what a job writes until it is fetched, where no RUN is shared"
    )


class Config(Frozen):
    """A resolved trial."""

    name: Annotated[str, AfterValidator(_folder_name)]
    description: str = ""
    launcher: Literal["auto", "local", "slurm", "torchrun"] = "auto"
    baseline: str | None = Field(default=None, description="a file of `seatrial baseline learn`")
    cluster: Cluster = Cluster()
    limits: Limits = Limits()
    # on: a node is sent back for what it does twice, and a minute more is cheap beside that
    retry: bool = Field(
        default=True,
        description="measure once more what fell short of a performance figure: it fails only when it does so twice",
    )
    slurm: Slurm = Slurm()
    environment: Environment = Environment()
    container: Container = Container()
    telemetry: Telemetry = Telemetry()
    env: dict[Annotated[str, AfterValidator(_variable_name)], str] = Field(
        default={}, description="variables for the workers, such as NCCL_DEBUG"
    )
    checks: dict[str, CheckSettings]
