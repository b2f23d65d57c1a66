"""Invented telemetry of the sample trials."""

from __future__ import annotations

import math

from seatrial.model import Phase
from seatrial.model.telemetry import (
    GAUGES,
    POWER_CAP,
    THROTTLE_REASONS,
    THROTTLED,
    Dashboard,
    Kind,
    Load,
    Span,
    Telemetry,
    Track,
)
from tests.report.sample_data import vary

SCALE = {"%": 100.0, "B": 140e9, "W": 700.0, "°C": 70.0, "MHz": 1980.0, "GB/s": 360.0, "MB/s": 900.0}
STEPS = 60


def telemetry(
    node: str, gpus: int, check: str = "collectives.all_reduce", phase: str = Phase.INTERCONNECT
) -> Telemetry:
    """Telemetry of one phase with one check, in which the last GPU is throttled; more than eight GPUs are a band."""
    names = [f"{node}/gpu{number}" for number in range(gpus)]
    loads = tuple(
        Load(
            check=check,
            gpu=name,
            samples=21,
            sm_util_mean=98.5,
            power_w_mean=vary(420, name, 20),
            power_w_max=699.8,
            temperature_c_max=vary(60, name, 4),
            sm_clock_mhz_min=1905,
            throttled_share={POWER_CAP: 0.2, **({THROTTLE_REASONS[0]: 0.1} if name == names[-1] else {})},
        )
        for name in names[-8:]
    )
    return Telemetry(
        files=("jobs/nodes/telemetry.jsonl.gz", "jobs/ranks/telemetry.jsonl.gz"),
        loads=loads,
        dashboards=(_board(phase, "gpu", names, check), _board(phase, "host", [node], check)),
        unsampled_gpus={"collectives.transport": gpus, check: 1},
        min_sample_rate_hz=0.248,
        max_sample_rate_hz=0.333,
        sampler_cpu_share=0.0041,
        unreadable_gauges={"host.rdma_rx_gbs": "no RDMA port (1×)"},
        warnings=(f"{node}: no telemetry samples for 41 s while checks ran",),
    )


def _board(phase: str, kind: Kind, names: list[str], check: str) -> Dashboard:
    tracks = [track for gauge in GAUGES[kind] for track in _tracks(gauge.name, SCALE[gauge.unit], names)]
    if kind == "gpu":
        tracks.append(Track(gauge=THROTTLED, label=POWER_CAP, values=tuple(float(n > 20) for n in range(STEPS))))
    return Dashboard(
        phase=phase,
        kind=kind,
        devices=len(names),
        seconds=STEPS - 0.5,
        step_s=1.0,
        spans=(
            Span(check=check, begin=0, end=40),
            Span(check="x", begin=41, end=41.2),
            Span(check=check, begin=42, end=59.5),
        ),
        cuts=(41.0,),
        tracks=tuple(tracks),
    )


def _tracks(gauge: str, scale: float, names: list[str]) -> list[Track]:
    if len(names) <= 8:
        return [Track(gauge=gauge, label=name, values=_values(scale, name)) for name in names]
    medians = [value or 0.0 for value in _values(scale, gauge)]
    return [
        Track(gauge=gauge, label="min", role="min", values=tuple(0.9 * value for value in medians)),
        Track(gauge=gauge, label="median", role="median", values=tuple(medians)),
        Track(gauge=gauge, label="max", role="max", values=tuple(1.1 * value for value in medians)),
        Track(gauge=gauge, label=names[-1], values=tuple(1.2 * value for value in medians)),
    ]


def _values(scale: float, key: str) -> tuple[float | None, ...]:
    """A curve with a gap of three steps, as if the sampler was delayed."""
    values = (0.7 * scale * (1 + 0.2 * math.sin(n / 5)) + vary(0, f"{key}{n}", scale / 50) for n in range(STEPS))
    return tuple(None if 22 < n < 26 else round(value, 3) for n, value in enumerate(values))
