"""The tracks of a dashboard: means over time, throttled GPUs, and bands of many devices."""

from __future__ import annotations

import pytest

from seatrial.model.telemetry import NOT_SAMPLED, Load
from seatrial.telemetry.aggregate import MAX_LOADS, select_loads
from seatrial.telemetry.curves import REASON_VALID_S
from tests.telemetry.test_aggregate import dashboard, device, in_turn, joined, measured, throttled


def test_long_phases_are_drawn_in_means() -> None:
    gpu = device(range(1200), power_w=[100.0, 300.0] * 600)
    summary = joined([measured("a", 0, 1199)], gpu).summary()
    values = dashboard(summary)["power_w", "n0/gpu0"]
    assert summary.dashboards[0].step_s == pytest.approx(10, abs=0.01)
    assert len(values) == 121
    assert set(values[:100]) <= {200.0, 180.0, 220.0, 190.9, 209.1}


def test_reasons_are_counted_over_gpus() -> None:
    gpus = [device(range(5), f"gpu{n}", clocks_event_reasons=[1, 4 * (n < 3), 36, 0, 0]) for n in range(4)]
    tracks = dashboard(joined([measured("a", 0, 4)], *gpus).summary())
    assert {label: values for (gauge, label), values in tracks.items() if gauge == "throttled"} == {
        "software power cap": (0, 3, 4, 0, 0),
        "software thermal slowdown": (0, 0, 4, 0, 0),
    }


def test_gpus_that_are_looked_at_in_turn_stay_throttled_until_their_next_look() -> None:
    """Eight GPUs, all too hot, three looked at in each sample."""
    found = throttled(joined([measured("a", 0, 9)], *in_turn(8, 3, 10, 32)).summary())
    assert found == {
        "software thermal slowdown": (3, 6, 8, 8, 8, 8, 8, 8, 8, 8),
        NOT_SAMPLED: (5, 2, 0, 0, 0, 0, 0, 0, 0, 0),
    }


def test_a_look_that_says_otherwise_ends_it() -> None:
    gpu = device(range(8), clocks_event_reasons=[None, 32, None, None, 0, None, 32, 0])
    assert throttled(joined([measured("a", 0, 7)], gpu).summary())["software thermal slowdown"] == (
        *(None, 1, 1, 1),
        *(0, 0, 1, 0),
    )


def test_nobody_knows_of_a_gpu_that_was_not_looked_at_for_long() -> None:
    gpus = [
        device(range(60), "gpu0", clocks_event_reasons=[32] + [None] * 59),
        device(range(60), "gpu1", clocks_event_reasons=[0] * 60),
    ]
    found = throttled(joined([measured("a", 0, 59)], *gpus).summary())
    lasts = int(REASON_VALID_S)
    assert found["software thermal slowdown"] == (1,) * (lasts + 1) + (0,) * (59 - lasts)
    assert found[NOT_SAMPLED] == (0,) * (lasts + 1) + (1,) * (59 - lasts)


@pytest.mark.parametrize("turn", [1, -1])
def test_what_a_gpu_said_beside_another_attempt_is_not_forgotten(turn: int) -> None:
    """The first sampler ended with its job; the second began six seconds later."""
    attempts = [
        device(range(3), clocks_event_reasons=[32] * 3),
        device(range(6, 10), attempt=2, clocks_event_reasons=[0] * 4),
    ]
    found = throttled(joined([measured("a", 0, 9)], *attempts[::turn]).summary())
    assert found == {"software thermal slowdown": (1,) * 6 + (0,) * 4}


def test_where_nothing_was_throttled_nobody_asks_who_was_not_looked_at() -> None:
    assert joined([measured("a", 0, 9)], *in_turn(8, 3, 10, 0)).summary().dashboards == ()


def test_many_gpus_are_a_band_and_those_that_keep_away_from_it() -> None:
    gpus = [device(range(5), f"gpu{n}", temperature_c=[50.0 + n % 4 + 20 * (n == 7)] * 5) for n in range(16)]
    (board,) = joined([measured("a", 0, 4)], *gpus).summary().dashboards
    assert [(track.role, track.label, track.values[0]) for track in board.tracks] == [
        ("min", "min", 50),
        ("median", "median", 52),
        ("max", "max", 73),
        ("device", "n0/gpu7", 73),
    ]


def test_a_few_gpus_are_all_in_the_record() -> None:
    own = [Load(check="a", gpu=f"n0/gpu{n}", samples=1) for n in range(MAX_LOADS)]
    assert list(select_loads(own)) == own
