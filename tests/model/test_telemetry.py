"""The summary of telemetry in the record of a trial."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from seatrial.model.telemetry import GAUGES, SAMPLER_CPU_LIMIT, Dashboard, Load, Telemetry, Track


@pytest.mark.parametrize(
    ("share", "exceeds"), [(None, False), (SAMPLER_CPU_LIMIT, False), (math.nextafter(SAMPLER_CPU_LIMIT, 1), True)]
)
def test_sampler_exceeds_its_cpu_limit(share: float | None, exceeds: bool) -> None:
    assert Telemetry(sampler_cpu_share=share).exceeds_cpu_limit is exceeds


def test_each_gauge_of_a_kind_has_one_unit() -> None:
    for kind, gauges in GAUGES.items():
        assert len({gauge.name for gauge in gauges}) == len(gauges), kind
        assert all(gauge.unit and gauge.title for gauge in gauges), kind


def test_values_are_finite_and_steps_positive() -> None:
    Track(gauge="power_w", label="gpu0", values=(1.0, None))
    with pytest.raises(ValidationError, match="finite number"):
        Track(gauge="power_w", label="gpu0", values=(math.nan,))
    with pytest.raises(ValidationError, match="finite number"):
        Load(check="gpu.burn", gpu="n0/gpu0", samples=1, throttled_share={"hardware slowdown": math.inf})
    with pytest.raises(ValidationError, match="step_s"):
        Dashboard(phase="nodes", kind="gpu", devices=1, seconds=1, step_s=0, spans=(), tracks=())
