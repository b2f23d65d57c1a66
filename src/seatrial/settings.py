"""What a trial may say: the schema of its YAML file. The reason for a default stands beside it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from seatrial.model import Frozen, ParsedLimit


class Cluster(Frozen):
    """What was promised. Absent promises are not judged; a promise that is not kept fails."""

    nodes: int = Field(default=1, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=0)


class Limits(Frozen):
    """Seconds after which seatrial stops waiting. Generous: they catch hangs, not slowness."""

    # importing torch from a cold network filesystem on many nodes has been seen to take minutes
    startup_s: float = Field(default=180, gt=0)
    # every rank gives a sign of life each second from a thread of its own; a minute of silence is no hiccup
    silence_s: float = Field(default=60, gt=0)


class CheckSettings(Frozen):
    """One check in a trial: whether the decision needs it, thresholds that outrank the check's own, its options."""

    required: bool = True
    limit_s: float | None = Field(default=None, gt=0, description="in place of the check's own time limit")
    expect: dict[str, ParsedLimit] = {}
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
    queue_s: float = Field(default=600, gt=0, description="give up when the job has not started by then")
    # used for the rendezvous where the first node's name does not resolve everywhere
    interface: str = "eth0"
    scratch: str = Field(
        default="/tmp", description="on each node: keeps what a job writes until it is fetched, where no RUN is shared"
    )


class Config(Frozen):
    """A resolved trial."""

    name: str
    description: str = ""
    launcher: Literal["auto", "local", "slurm", "torchrun"] = "auto"
    cluster: Cluster = Cluster()
    limits: Limits = Limits()
    slurm: Slurm = Slurm()
    environment: Environment = Environment()
    container: Container = Container()
    env: dict[str, str] = Field(default={}, description="variables for the workers, such as NCCL_DEBUG")
    checks: dict[str, CheckSettings]
