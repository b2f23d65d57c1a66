"""Clocks event reasons reported by NVML during a check → findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from seatrial.checks.check import Check
from seatrial.model import Finding
from seatrial.model.telemetry import HARDWARE_SLOWDOWN, Load, Telemetry
from seatrial.util.text import and_more

MAX_NAMED = 8
_THROTTLED = "telemetry throttled_share"  # in metric.also_measured_by
_SOURCE = "NVML, nvmlDeviceGetCurrentClocksEventReasons, sampled during the job"
# First command and fix
_HEAT = (
    "nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
    "Check inlet temperature, fans and coolant. If one GPU is hotter than its neighbours, check the mounting of its "
    "heat sink. Then run the check again.",
)
_POWER = (
    "nvidia-smi -q -d POWER,PERFORMANCE",
    "Check power supplies, their cables and the power limit of the rack. The event log of the BMC names the power "
    "supply that requested the power brake.",
)
# Meaning of the reasons: NVML API reference, nvmlClocksEventReasons. A power cap is normal at full load.
_MEANING = {
    "software thermal slowdown": ("the driver lowered the clocks because the GPU or its memory was too hot", *_HEAT),
    "hardware thermal slowdown": ("the GPU reduced its clocks by half or more because it was too hot", *_HEAT),
    "hardware power brake": ("an external signal, for example from the power supply, lowered the clocks", *_POWER),
    HARDWARE_SLOWDOWN: (
        "the GPU reduced its clocks by half or more, without a thermal or power brake reason: its power draw rose too "
        "fast (in a single sample it may be a regular change of clocks)",
        *_POWER,
    ),
}


def throttling_findings(
    telemetry: Telemetry | None, checks: Mapping[str, Check], causes: Iterable[Finding] = ()
) -> tuple[Finding, ...]:
    """One finding for each thermal or power reason that a GPU reported during a check. Pure.

    Omitted are the checks and GPUs whose own metric of throttling one of ``causes`` explains.
    """
    explained = {
        (key.check, key.subject)
        for cause in causes
        for key in cause.explains
        if (check := checks.get(key.check))
        and (declared := check.declaration(key.metric))
        and _THROTTLED in declared.also_measured_by
    }
    loads = [load for load in (telemetry.loads if telemetry else ()) if (load.check, load.gpu) not in explained]
    by_reason = {reason: [load for load in loads if reason in load.throttled_share] for reason in _MEANING}
    return tuple(_finding(reason, throttled_loads) for reason, throttled_loads in by_reason.items() if throttled_loads)


def _finding(reason: str, loads: Sequence[Load]) -> Finding:
    meaning, command, fix = _MEANING[reason]
    gpus = list(dict.fromkeys(load.gpu for load in loads))
    worst = max(loads, key=lambda load: (load.throttled_share[reason], load.samples))
    most_samples = max(round(load.samples * load.throttled_share[reason]) for load in loads)
    temperature = f", up to {worst.temperature_c_max:g} °C" if worst.temperature_c_max is not None else ""
    samples = f"{worst.samples} samples" if worst.samples > 1 else "one sample"
    return Finding(
        title=f"GPUs were throttled: {reason}",
        subject=and_more(gpus, MAX_NAMED),
        confidence="high" if most_samples > 1 else "medium",
        evidence=f"{meaning}. Worst: {worst.gpu} during {worst.check}, in {worst.throttled_share[reason]:.0%} of "
        f"{samples}{temperature}.",
        first_command=command,
        fix=fix,
        source=_SOURCE,
    )
