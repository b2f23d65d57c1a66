from __future__ import annotations

import pytest

from seatrial.diagnose.throttling import throttling_findings
from seatrial.model.telemetry import HARDWARE_SLOWDOWN, POWER_CAP, THROTTLE_REASONS, Load, Telemetry


def telemetry(*gpus: str, samples: int = 20, **shares: float) -> Telemetry:
    reasons = {name.replace("_", " "): share for name, share in shares.items()}
    loads = [
        Load(check="device.burn", gpu=gpu, samples=samples, temperature_c_max=88, throttled_share=reasons)
        for gpu in gpus
    ]
    return Telemetry(loads=tuple(loads))


def test_heat_is_a_finding_with_the_gpu_the_check_and_the_share() -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu3", software_thermal_slowdown=0.25))
    assert finding.title == "GPUs were throttled: software thermal slowdown"
    assert (finding.subject, finding.confidence) == ("n0/gpu3", "high")
    assert "n0/gpu3 during device.burn: in 25% of 20 looks, at up to 88 °C" in finding.evidence
    assert "TEMPERATURE" in finding.first_command


def test_a_power_brake_points_at_the_supply() -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu3", hardware_power_brake=1.0))
    assert "POWER" in finding.first_command


@pytest.mark.parametrize("nothing", [None, Telemetry(), telemetry("n0/gpu0", software_power_cap=1.0)])
def test_full_load_is_none(nothing: Telemetry | None) -> None:
    assert POWER_CAP not in THROTTLE_REASONS
    assert throttling_findings(nothing) == ()


@pytest.mark.parametrize(
    ("samples", "share", "confidence", "words"),
    [
        (1, 1.0, "medium", "in 100% of one look"),
        (6, 0.167, "medium", "in 17% of 6 looks"),  # one look: the share is rounded
        (20, 0.05, "medium", "in 5% of 20 looks"),
        (3, 0.667, "high", "in 67% of 3 looks"),
    ],
)
def test_one_look_is_no_certainty(samples: int, share: float, confidence: str, words: str) -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu0", samples=samples, hardware_thermal_slowdown=share))
    assert finding.confidence == confidence
    assert words in finding.evidence


def test_a_slowdown_that_gives_no_cause_is_a_finding() -> None:
    (finding,) = throttling_findings(telemetry("n0/gpu3", hardware_slowdown=0.5))
    assert finding.title.endswith(HARDWARE_SLOWDOWN)
    assert "POWER" in finding.first_command


def test_every_reason_of_heat_or_power_has_a_finding() -> None:
    load = Load(check="a", gpu="n0/gpu3", samples=9, throttled_share=dict.fromkeys(THROTTLE_REASONS, 0.5))
    assert len(throttling_findings(Telemetry(loads=(load,)))) == len(THROTTLE_REASONS)


def test_a_hot_room_is_one_finding() -> None:
    (finding,) = throttling_findings(telemetry(*(f"n{n}/gpu0" for n in range(100)), hardware_thermal_slowdown=0.5))
    assert finding.subject.endswith("n7/gpu0 and 92 more")
