"""Clocks event reasons reported by NVML during a check → findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from seatrial.checks.check import Check
from seatrial.diagnose.signatures import signatures
from seatrial.model import Finding
from seatrial.model.telemetry import HARDWARE_SLOWDOWN, Load, Telemetry
from seatrial.util.text import and_more

MAX_NAMED = 8
_THROTTLED = "telemetry throttled_share"  # in metric.also_measured_by
_SOURCE = "NVML, nvmlDeviceGetCurrentClocksEventReasons, sampled during the job"
# Reason → the signature of its line in nvidia-smi -q. A power cap is normal at full load.
_SIGNATURES = {
    "software thermal slowdown": "thermal.software_slowdown",
    "hardware thermal slowdown": "thermal.hardware_slowdown",
    "hardware power brake": "thermal.power_brake",
    HARDWARE_SLOWDOWN: "thermal.power_brake",
}
_NO_REASON = (
    "The GPU reduced its clocks by half or more, without a thermal or power brake reason: its power draw rose too "
    "fast (in a single sample it may be a regular change of clocks)."
)


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
    by_reason = {reason: [load for load in loads if reason in load.throttled_share] for reason in _SIGNATURES}
    return tuple(_finding(reason, throttled_loads) for reason, throttled_loads in by_reason.items() if throttled_loads)


def _finding(reason: str, loads: Sequence[Load]) -> Finding:
    signature = next(each for each in signatures() if each.id == _SIGNATURES[reason])
    meaning = _NO_REASON if reason == HARDWARE_SLOWDOWN else signature.cause
    gpus = list(dict.fromkeys(load.gpu for load in loads))
    worst = max(loads, key=lambda load: (load.throttled_share[reason], load.samples))
    most_samples = max(round(load.samples * load.throttled_share[reason]) for load in loads)
    temperature = f", up to {worst.temperature_c_max:g} °C" if worst.temperature_c_max is not None else ""
    samples = f"{worst.samples} samples" if worst.samples > 1 else "one sample"
    return Finding(
        title=f"GPUs were throttled: {reason}",
        subject=and_more(gpus, MAX_NAMED),
        confidence="high" if most_samples > 1 else "medium",
        evidence=f"{meaning} Worst: {worst.gpu} during {worst.check}, in {worst.throttled_share[reason]:.0%} of "
        f"{samples}{temperature}.",
        first_command=signature.first_command,
        fix=signature.fix,
        source=_SOURCE,
    )
