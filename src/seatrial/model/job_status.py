"""The status of a job as ``seatrial watch`` shows it: state, GPU use, training speed and the end of its log."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from seatrial.model.base import Frozen


class GpuUse(Frozen):
    """The use of one GPU; None: not supported by the GPU, or not readable."""

    node: str
    gpu: str = Field(description="``gpu`` and the NVML index: gpu3")
    utilization: float | None = Field(default=None, description="% of the last sampling period with a running kernel")
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    age_s: float | None = Field(default=None, description="age of the values in seconds; None: just read")


class TrainingSpeed(Frozen):
    """The last steps of ``seatrial train run``. Rates are means over ``steps`` steps; tokens are of all ranks."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    folder: str
    step: int
    max_steps: int | None = None
    loss: float | None = Field(default=None, description="nats per token of the last step; may be NaN or infinite")
    steps: int
    steps_per_second: float
    tokens_per_second: float | None = None
    age_s: float = Field(description="seconds since the last step was written")


class JobStatus(Frozen):
    """The status of a job, a training directory or a run directory; ``notes``: why some part is missing."""

    target: str
    title: str
    state: str
    ended: bool = False
    reason: str = Field(default="", description="why the job is pending, or how it ended")
    start: float | None = Field(default=None, description="Unix seconds; of a pending job Slurm's estimate")
    time_limit_s: float | None = None
    nodes: tuple[str, ...] = ()
    ranks: dict[str, int] = Field(default={}, description="current check and step of a run → number of ranks")
    gpus: tuple[GpuUse, ...] = ()
    training: TrainingSpeed | None = None
    log: str = Field(default="", description="path of the log")
    log_lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
