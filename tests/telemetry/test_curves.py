"""The tracks of a dashboard: means over time, throttled GPUs, and bands of many devices."""

from __future__ import annotations

import pytest

from seatrial.model.telemetry import NOT_SAMPLED, Load
from seatrial.telemetry.aggregate import MAX_LOADS, select_loads
from seatrial.telemetry.curves import REASON_VALID_S
from tests.telemetry.test_aggregate import aggregate, dashboard, device, measured, sampled_in_turn, throttled


def test_long_phase_is_reduced_to_means() -> None:
    gpu = device(range(1200), power_w=[100.0, 300.0] * 600)
    summary = aggregate([measured("a", 0, 1199)], gpu).summary()
    values = dashboard(summary)["power_w", "n0/gpu0"]
    assert summary.dashboards[0].step_s == pytest.approx(10, abs=0.01)
    assert len(values) == 121
    assert set(values[:100]) <= {200.0, 180.0, 220.0, 190.9, 209.1}


def test_throttled_gpus_are_counted_by_reason() -> None:
    gpus = [device(range(5), f"gpu{n}", clocks_event_reasons=[1, 4 * (n < 3), 36, 0, 0]) for n in range(4)]
    tracks = dashboard(aggregate([measured("a", 0, 4)], *gpus).summary())
    assert {label: values for (gauge, label), values in tracks.items() if gauge == "throttled"} == {
        "software power cap": (0, 3, 4, 0, 0),
        "software thermal slowdown": (0, 0, 4, 0, 0),
    }


def test_throttle_reason_holds_until_the_next_sample() -> None:
    """Eight GPUs, all throttled, three of them read in each sample."""
    counts = throttled(aggregate([measured("a", 0, 9)], *sampled_in_turn(8, 3, 10, 32)).summary())
    assert counts == {
        "software thermal slowdown": (3, 6, 8, 8, 8, 8, 8, 8, 8, 8),
        NOT_SAMPLED: (5, 2, 0, 0, 0, 0, 0, 0, 0, 0),
    }


def test_throttle_reason_ends_with_a_sample_without_it() -> None:
    gpu = device(range(8), clocks_event_reasons=[None, 32, None, None, 0, None, 32, 0])
    assert throttled(aggregate([measured("a", 0, 7)], gpu).summary())["software thermal slowdown"] == (
        *(None, 1, 1, 1),
        *(0, 0, 1, 0),
    )


def test_gpu_counts_as_not_sampled_after_the_valid_time() -> None:
    gpus = [
        device(range(60), "gpu0", clocks_event_reasons=[32] + [None] * 59),
        device(range(60), "gpu1", clocks_event_reasons=[0] * 60),
    ]
    counts = throttled(aggregate([measured("a", 0, 59)], *gpus).summary())
    valid = int(REASON_VALID_S)
    assert counts["software thermal slowdown"] == (1,) * (valid + 1) + (0,) * (59 - valid)
    assert counts[NOT_SAMPLED] == (0,) * (valid + 1) + (1,) * (59 - valid)


@pytest.mark.parametrize("order", [1, -1])
def test_reasons_of_another_attempt_are_kept(order: int) -> None:
    """The first sampler ended with its job; the second started six seconds later."""
    attempts = [
        device(range(3), clocks_event_reasons=[32] * 3),
        device(range(6, 10), attempt=2, clocks_event_reasons=[0] * 4),
    ]
    counts = throttled(aggregate([measured("a", 0, 9)], *attempts[::order]).summary())
    assert counts == {"software thermal slowdown": (1,) * 6 + (0,) * 4}


def test_no_throttle_track_without_throttled_gpus() -> None:
    assert aggregate([measured("a", 0, 9)], *sampled_in_turn(8, 3, 10, 0)).summary().dashboards == ()


def test_many_gpus_become_a_band_and_outliers() -> None:
    gpus = [device(range(5), f"gpu{n}", temperature_c=[50.0 + n % 4 + 20 * (n == 7)] * 5) for n in range(16)]
    (board,) = aggregate([measured("a", 0, 4)], *gpus).summary().dashboards
    assert [(track.role, track.label, track.values[0]) for track in board.tracks] == [
        ("min", "min", 50),
        ("median", "median", 52),
        ("max", "max", 73),
        ("device", "n0/gpu7", 73),
    ]


def test_up_to_max_loads_gpus_are_all_in_the_record() -> None:
    loads = [Load(check="a", gpu=f"n0/gpu{n}", samples=1) for n in range(MAX_LOADS)]
    assert list(select_loads(loads)) == loads
