"""Findings from clocks event reasons."""

from __future__ import annotations

import pytest

from seatrial.checks import catalog
from seatrial.diagnose.throttling import throttling_findings
from seatrial.model import VerdictKey
from seatrial.model.telemetry import HARDWARE_SLOWDOWN, POWER_CAP, THROTTLE_REASONS, Load, Telemetry


def telemetry(*gpus: str, samples: int = 20, **shares: float) -> Telemetry:
    reasons = {name.replace("_", " "): share for name, share in shares.items()}
    loads = [
        Load(check="device.burn", gpu=gpu, samples=samples, temperature_c_max=88, throttled_share=reasons)
        for gpu in gpus
    ]
    return Telemetry(loads=tuple(loads))


def test_thermal_slowdown_is_a_finding_with_gpu_check_and_share() -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu3", software_thermal_slowdown=0.25), {})
    assert finding.title == "GPUs were throttled: software thermal slowdown"
    assert (finding.subject, finding.confidence) == ("n0/gpu3", "high")
    for text in ("n0/gpu3", "device.burn", "25% of 20", "88 °C"):
        assert text in finding.evidence
    assert "TEMPERATURE" in finding.first_command


def test_throttling_that_a_cause_explains_is_not_reported_again() -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu3", software_thermal_slowdown=0.25), {})
    key = VerdictKey(check="device.burn", subject="n0/gpu3", metric="throttled_share")
    cause = finding.model_copy(update={"cause": "thermal_slowdown", "explains": (key,)})
    throttled = telemetry("n0/gpu3", "n0/gpu5", software_thermal_slowdown=0.25)
    assert [each.subject for each in throttling_findings(throttled, catalog(), [cause])] == ["n0/gpu5"]
    other = finding.model_copy(update={"explains": (key.model_copy(update={"metric": "drift"}),)})
    assert [each.subject for each in throttling_findings(throttled, catalog(), [other])] == ["n0/gpu3, n0/gpu5"]


def test_first_command_for_a_power_brake_queries_power() -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu3", hardware_power_brake=1.0), {})
    assert "POWER" in finding.first_command


@pytest.mark.parametrize("nothing", [None, Telemetry(), telemetry("n0/gpu0", software_power_cap=1.0)])
def test_power_cap_is_no_finding(nothing: Telemetry | None) -> None:
    assert POWER_CAP not in THROTTLE_REASONS
    assert throttling_findings(nothing, {}) == ()


@pytest.mark.parametrize(
    ("samples", "share", "confidence", "text"),
    [
        (1, 1.0, "medium", "100% of one"),
        (6, 0.167, "medium", "17% of 6"),  # one sample, rounded
        (20, 0.05, "medium", "5% of 20"),
        (3, 0.667, "high", "67% of 3"),
    ],
)
def test_reason_in_one_sample_has_medium_confidence(samples: int, share: float, confidence: str, text: str) -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu0", samples=samples, hardware_thermal_slowdown=share), {})
    assert finding.confidence == confidence
    assert text in finding.evidence


def test_slowdown_without_a_cause_is_a_finding() -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu3", hardware_slowdown=0.5), {})
    assert finding.title.endswith(HARDWARE_SLOWDOWN)
    assert "POWER" in finding.first_command


def test_every_throttle_reason_has_a_finding() -> None:
    load = Load(check="a", gpu="n0/gpu3", samples=9, throttled_share=dict.fromkeys(THROTTLE_REASONS, 0.5))
    assert len(throttling_findings(Telemetry(loads=(load,)), {})) == len(THROTTLE_REASONS)


def test_many_throttled_gpus_are_one_finding() -> None:
    (finding,) = throttling_findings(telemetry(*(f"n{n}/gpu0" for n in range(100)), hardware_thermal_slowdown=0.5), {})
    assert finding.subject.endswith("n7/gpu0 and 92 more")
