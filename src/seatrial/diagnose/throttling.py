"""Clocks event reasons that NVML gave while a check ran → findings."""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.model import Finding
from seatrial.model.telemetry import HARDWARE_SLOWDOWN, Load, Telemetry
from seatrial.util.text import and_more

MAX_NAMED = 8
_SOURCE = "NVML, nvmlDeviceGetCurrentClocksEventReasons, sampled beside the job"
_HEAT = (
    "nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
    "Look at inlet temperature, fans and coolant, and at the seat of the heat sink where one GPU is hotter than its "
    "neighbours; then run the check again.",
)
_POWER = (
    "nvidia-smi -q -d POWER,PERFORMANCE",
    "Look at power supplies and their cables, and at what the rack's power limit is; the BMC's event log names the "
    "supply that asked for it.",
)
# What the reasons mean: NVML API reference, nvmlClocksEventReasons. A power cap is what full load does; it is no fault.
_MEANING = {
    "software thermal slowdown": ("the driver lowered the clocks because GPU or memory was too hot", *_HEAT),
    "hardware thermal slowdown": ("the GPU halved its clocks or more because it was too hot", *_HEAT),
    "hardware power brake": ("something outside the GPU, the power supply say, had its clocks lowered", *_POWER),
    HARDWARE_SLOWDOWN: (
        "the GPU halved its clocks or more, and told neither of heat nor of a power brake: it drew too much power too "
        "fast (in a single look it may be no more than a change of clocks)",
        *_POWER,
    ),
}


def throttling_findings(telemetry: Telemetry | None) -> tuple[Finding, ...]:
    """A finding for each reason of heat or of the power supply that any GPU gave during a check. Pure."""
    loads = telemetry.loads if telemetry else ()
    by_reason = {reason: [load for load in loads if reason in load.throttled_share] for reason in _MEANING}
    return tuple(_finding(reason, throttled_loads) for reason, throttled_loads in by_reason.items() if throttled_loads)


def _finding(reason: str, loads: Sequence[Load]) -> Finding:
    meaning, command, fix = _MEANING[reason]
    gpus = list(dict.fromkeys(load.gpu for load in loads))
    worst = max(loads, key=lambda load: (load.throttled_share[reason], load.samples))
    most_samples = max(round(load.samples * load.throttled_share[reason]) for load in loads)
    heat = f", at up to {worst.temperature_c_max:g} °C" if worst.temperature_c_max is not None else ""
    looks = f"{worst.samples} looks" if worst.samples > 1 else "one look"
    return Finding(
        title=f"GPUs were throttled: {reason}",
        subject=and_more(gpus, MAX_NAMED),
        confidence="high" if most_samples > 1 else "medium",
        evidence=f"{meaning}. Most of all {worst.gpu} during {worst.check}: in {worst.throttled_share[reason]:.0%} of "
        f"{looks}{heat}.",
        first_command=command,
        fix=fix,
        source=_SOURCE,
    )
