"""The gauges that telemetry samples during a job, and the summary of the samples in the record of a trial.

All samples are in ``RUN/jobs/<job>/telemetry.jsonl.gz``.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from seatrial.model.base import Count, Frozen, Number, Seconds

Kind = Literal["gpu", "host"]
HOST = "host"  # device name of the gauges of a node


@dataclass(frozen=True)
class Gauge:
    """A sampled quantity; a rate is the mean since the previous sample."""

    name: str
    unit: str
    title: str
    digits: int = 0  # decimals


GPU_GAUGES = (
    Gauge("sm_util", "%", "GPU utilisation"),
    Gauge("memory_util", "%", "Memory utilisation"),
    Gauge("memory_used_bytes", "B", "Frame buffer used"),
    Gauge("power_w", "W", "Power", 1),
    Gauge("temperature_c", "°C", "Temperature"),
    Gauge("sm_clock_mhz", "MHz", "SM clock"),
    Gauge("pcie_rx_gbs", "GB/s", "PCIe received", 3),  # NVML measures over 20 ms
    Gauge("pcie_tx_gbs", "GB/s", "PCIe sent", 3),
    Gauge("nvlink_rx_gbs", "GB/s", "NVLink received", 3),
    Gauge("nvlink_tx_gbs", "GB/s", "NVLink sent", 3),
)
CLOCKS_EVENT_REASONS = "clocks_event_reasons"  # NVML's bit mask of reasons for lower clocks
HOST_GAUGES = (
    Gauge("cpu_util", "%", "CPU utilisation", 1),
    Gauge("memory_used_bytes", "B", "Memory used"),
    Gauge("disk_read_mbs", "MB/s", "Disk read", 3),
    Gauge("disk_write_mbs", "MB/s", "Disk written", 3),
    Gauge("network_rx_mbs", "MB/s", "Network received", 3),
    Gauge("network_tx_mbs", "MB/s", "Network sent", 3),
    Gauge("rdma_rx_gbs", "GB/s", "RDMA received", 3),
    Gauge("rdma_tx_gbs", "GB/s", "RDMA sent", 3),
)
GAUGES: dict[Kind, tuple[Gauge, ...]] = {"gpu": GPU_GAUGES, "host": HOST_GAUGES}
SAMPLER_CPU_SECONDS = "sampler_cpu_s"  # CPU time of the sampler since its start

# NVML's reasons for lower clocks, except user settings and idle. The power cap is normal at full load, so it does not
# count as throttling
POWER_CAP = "software power cap"
HARDWARE_SLOWDOWN = "hardware slowdown"
THROTTLE_REASONS = (
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
    HARDWARE_SLOWDOWN,
)
THROTTLED = "throttled"  # dashboard gauge: number of GPUs, one curve for each reason for lower clocks
NOT_SAMPLED = "not sampled"  # label of the curve of the gauge THROTTLED that counts GPUs without samples
SAMPLER_CPU_LIMIT = 0.01  # CPU time of a sampler at one sample per second, as a share of one core


class Load(Frozen):
    """The load of one GPU during one check; ``samples`` is at least 1.

    ``throttled_share``: reason → share of the samples with this reason. "hardware slowdown" counts only in samples
    without a thermal or power brake reason.
    ``sm_clock_mhz_min``: over samples with at least 50 % utilisation, since an idle GPU lowers its clock.
    """

    check: str
    gpu: str
    samples: Count
    sm_util_mean: Number | None = None
    power_w_mean: Number | None = None
    power_w_max: Number | None = None
    temperature_c_max: Number | None = None
    sm_clock_mhz_min: Number | None = None
    throttled_share: dict[str, Number] = {}


class Span(Frozen):
    """Begin and end of a check in seconds since the start of its phase, without the pauses between checks."""

    check: str
    begin: Number
    end: Number


class Track(Frozen):
    """One curve of a dashboard: one value per step, None without samples.

    For many devices there are curves of the minimum, the median and the maximum, and of the outliers.
    """

    gauge: str
    label: str
    role: Literal["device", "min", "median", "max"] = "device"
    values: tuple[Number | None, ...]


class Dashboard(Frozen):
    """The gauges of one kind during one phase; each value is the mean over ``step_s`` seconds."""

    phase: str
    kind: Kind
    devices: Count = Field(description="number of GPUs or nodes")
    seconds: Seconds
    step_s: Number = Field(gt=0)
    spans: tuple[Span, ...]
    cuts: tuple[Number, ...] = Field(
        default=(), description="positions in seconds at which a pause between checks is omitted"
    )
    tracks: tuple[Track, ...]


class Telemetry(Frozen):
    """A summary of the samples taken during the jobs of a trial."""

    files: tuple[str, ...] = Field(default=(), description="files with the samples, relative to the run directory")
    loads: tuple[Load, ...] = Field(
        default=(), description="by check; for more than 64 GPUs only throttled GPUs and extremes"
    )
    unsampled_gpus: dict[str, int] = Field(default={}, description="check → number of GPUs without samples")
    dashboards: tuple[Dashboard, ...] = ()
    min_sample_rate_hz: Number | None = Field(default=None, description="samples per second of the GPU with the fewest")
    max_sample_rate_hz: Number | None = None
    sampler_cpu_share: Number | None = Field(
        default=None, description="CPU time of the most expensive sampler, as a share of one core"
    )
    unreadable_gauges: dict[str, str] = Field(
        default={}, description="gauge → why it was not readable, and on how many devices"
    )
    warnings: tuple[str, ...] = ()

    @property
    def exceeds_cpu_limit(self) -> bool:
        """Whether a sampler used more CPU time than SAMPLER_CPU_LIMIT."""
        return self.sampler_cpu_share is not None and self.sampler_cpu_share > SAMPLER_CPU_LIMIT
