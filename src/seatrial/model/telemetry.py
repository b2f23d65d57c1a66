"""What telemetry watches beside a job, by name and unit, and what a trial's record keeps of it.

The samples themselves lie in ``RUN/jobs/<job>/telemetry.jsonl.gz``; the record has what a report needs of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, FiniteFloat

from seatrial.model.base import Frozen

Kind = Literal["gpu", "host"]
HOST = "host"  # the device that stands for the node itself


@dataclass(frozen=True)
class Gauge:
    """One thing that is watched. A rate is the mean over the time since the sample before."""

    name: str
    unit: str
    title: str
    digits: int = 0  # that are kept behind the point


GPU_GAUGES = (
    Gauge("sm_util", "%", "GPU utilisation"),
    Gauge("memory_util", "%", "Memory utilisation"),
    Gauge("memory_used_bytes", "B", "Frame buffer used"),
    Gauge("power_w", "W", "Power", 1),
    Gauge("temperature_c", "°C", "Temperature"),
    Gauge("sm_clock_mhz", "MHz", "SM clock"),
    Gauge("pcie_rx_gbs", "GB/s", "PCIe received", 3),  # NVML looks at 20 ms of each time
    Gauge("pcie_tx_gbs", "GB/s", "PCIe sent", 3),
    Gauge("nvlink_rx_gbs", "GB/s", "NVLink received", 3),
    Gauge("nvlink_tx_gbs", "GB/s", "NVLink sent", 3),
)
CLOCKS_EVENT_REASONS = "clocks_event_reasons"  # NVML's bits: why clocks are lower than they could be
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
SAMPLER_CPU_SECONDS = "sampler_cpu_s"  # what the sampler itself has taken of a CPU since it began

# The reasons for lower clocks that are neither a person's choice nor rest; the first is what full load does
POWER_CAP = "software power cap"
HARDWARE_SLOWDOWN = "hardware slowdown"
THROTTLE_REASONS = (
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
    HARDWARE_SLOWDOWN,
)
THROTTLED = "throttled"  # the gauge of a dashboard that counts the GPUs for which a reason was given
NOT_SAMPLED = "not looked at"  # and those of which nobody knows
SAMPLER_CPU_LIMIT = 0.01  # of one core, at one sample a second


class Load(Frozen):
    """What one GPU did during one check. ``samples``: how often it was looked at, at least once.

    ``throttled`` has the share of the looks that a reason was seen in; "hardware slowdown" only without a cause beside.
    ``sm_clock_mhz_min`` is of the looks with a utilisation of at least half: an idle GPU lowers its clock.
    """

    check: str
    gpu: str
    samples: int
    sm_util_mean: FiniteFloat | None = None
    power_w_mean: FiniteFloat | None = None
    power_w_max: FiniteFloat | None = None
    temperature_c_max: FiniteFloat | None = None
    sm_clock_mhz_min: FiniteFloat | None = None
    throttled_share: dict[str, FiniteFloat] = {}


class Span(Frozen):
    """When a check ran: seconds since the phase began, without what was cut out of it."""

    check: str
    begin: FiniteFloat
    end: FiniteFloat


class Track(Frozen):
    """One curve: a value for each step of its dashboard, None where nothing was read.

    Of many devices there are the least, the median and the greatest value, and those that keep away from the rest.
    """

    gauge: str
    label: str
    role: Literal["device", "least", "median", "greatest"] = "device"
    values: tuple[FiniteFloat | None, ...]


class Dashboard(Frozen):
    """The gauges of one kind over one phase. Each value is the mean over a step."""

    phase: str
    kind: Kind
    devices: int
    seconds: FiniteFloat
    step_s: FiniteFloat = Field(gt=0)
    spans: tuple[Span, ...]
    cuts: tuple[FiniteFloat, ...] = Field(default=(), description="where other phases ran: their time is left out")
    tracks: tuple[Track, ...]


class Telemetry(Frozen):
    """What was sampled beside a trial's jobs, as far as the record keeps it."""

    files: tuple[str, ...] = Field(default=(), description="the samples, relative to the run directory")
    loads: tuple[Load, ...] = Field(
        default=(), description="by check; of more than 64 GPUs only those that were throttled or had an extreme"
    )
    unsampled_gpus: dict[str, int] = Field(default={}, description="check → GPUs that were not looked at while it ran")
    dashboards: tuple[Dashboard, ...] = ()
    min_sample_rate_hz: FiniteFloat | None = Field(
        default=None, description="looks a second at the GPU with the fewest"
    )
    max_sample_rate_hz: FiniteFloat | None = None
    sampler_cpu_share: FiniteFloat | None = Field(
        default=None, description="of one core, of the costliest sampler, at work"
    )
    unreadable_gauges: dict[str, str] = Field(
        default={}, description="gauge → why it could not be read, and of how many devices"
    )
    warnings: tuple[str, ...] = ()

    @property
    def exceeds_cpu_limit(self) -> bool:
        """Whether a sampler took more than it is to keep to."""
        return self.sampler_cpu_share is not None and self.sampler_cpu_share > SAMPLER_CPU_LIMIT
