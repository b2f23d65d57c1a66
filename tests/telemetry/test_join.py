"""Samples against the checks that ran meanwhile."""

from __future__ import annotations

import math
from typing import Any

import pytest

from seatrial.gauges import Load, Telemetry
from seatrial.model import Measurement
from seatrial.telemetry.files import Device
from seatrial.telemetry.join import MOST_LOADS, Joined, Window, loads, remarkable, windows_of

REASONS = {"1": "idle", "4": "software power cap", "32": "software thermal slowdown"}
PHASES = {"a": "One", "b": "One", "c": "Two"}


def measured(check: str, started: float, seconds: float, subject: str = "n0/gpu0", rank: int | None = 0) -> Measurement:
    return Measurement(check=check, subject=subject, rank=rank, started=started, seconds=seconds)


def device(times: range | list[float], name: str = "gpu0", node: str = "n0", **columns: Any) -> Device:
    fields = {"node": node, "device": name, "attempt": 1, "rank": 0, "hz": 1.0, "reasons": REASONS, "time": list(times)}
    return Device.model_validate(fields | columns)


def joined(measurements: list[Measurement], *devices: Device, hz: float = 1.0) -> Joined:
    found = Joined(PHASES, measurements, hz)
    for one in devices:
        found.add(one)
    return found


def dashboard(telemetry: Telemetry, phase: str = "One") -> dict[tuple[str, str], tuple[float | None, ...]]:
    (board,) = [one for one in telemetry.dashboards if one.phase == phase]
    return {(track.gauge, track.label): track.values for track in board.tracks}


def test_a_window_lasts_from_the_first_process_of_a_node_to_the_last() -> None:
    found = windows_of(
        [
            measured("b", 20, 5),
            measured("a", 10, 5, "n0/gpu0"),
            measured("a", 9, 3, "n0/gpu1", 1),
            measured("a", 500, 5, "n1/rank2", 2),
            measured("a", 30, 0),  # told by the launcher
            measured("c", 1, 1, "cluster", None),
        ]
    )
    assert found == {"n0": [Window("a", 9, 15), Window("b", 20, 25)], "n1": [Window("a", 500, 505)]}


def test_what_a_gpu_did_during_a_check() -> None:
    gpu = device(
        range(100, 110),
        sm_util=[0, 100, 100, 0, 100, 0, 0, 0, 0, 0],
        power_w=[80, 700, 690, 90, 500, 999, 0, 0, 0, 0],
        temperature_c=[30, 50, 61, 60, 59, 99, 0, 0, 0, 0],
        sm_clock_mhz=[345, 1500, 1400, 345, 1980, 100, 0, 0, 0, 0],
        clock_reasons=[1, 4, 36, 1, 4, 32, 0, 0, 0, 0],
    )
    (load,) = loads(gpu, Window("a", 100.5, 104.5))
    assert load == Load(
        check="a",
        gpu="n0/gpu0",
        samples=4,
        sm_util_mean=75.0,
        power_w_mean=495.0,
        power_w_max=700,
        temperature_c_max=61,
        sm_clock_mhz_min=1400,  # and not the 345 of its rest
        throttled={"software power cap": 0.75, "software thermal slowdown": 0.25},
    )
    assert list(loads(gpu, Window("b", 104.1, 104.9))) == [], "too short for a sample"


def test_what_was_not_read_is_unknown_and_not_zero() -> None:
    (load,) = loads(device(range(3), power_w=[None, None, None]), Window("a", 0, 2))
    assert (load.power_w_mean, load.power_w_max, load.sm_clock_mhz_min, load.throttled) == (None, None, None, {})


def test_samples_belong_to_checks_by_the_clock_of_their_own_node() -> None:
    """The second node's clock is an hour ahead."""
    measurements = [measured("a", 100, 10), measured("a", 3700, 10, "n1/gpu0", 1)]
    ahead = device(range(3695, 3715), node="n1", power_w=[600.0] * 20)
    behind = device(range(95, 115), power_w=[300.0] * 20)
    summary = joined(measurements, behind, ahead).summary()
    assert [(load.gpu, load.power_w_mean, load.samples) for load in summary.loads] == [
        ("n0/gpu0", 300.0, 11),
        ("n1/gpu0", 600.0, 11),
    ]
    (board,) = summary.dashboards
    assert (board.seconds, board.devices) == (10, 2)
    assert dashboard(summary)["power_w", "n1/gpu0"][:10] == (600.0,) * 10


def test_the_time_of_other_phases_is_cut_out() -> None:
    measurements = [measured("a", 100, 10), measured("c", 110, 50), measured("b", 160, 5)]
    times = range(100, 166)
    telemetry = joined(measurements, device(times, power_w=[float(n) for n in range(66)])).summary()
    board = telemetry.dashboards[0]
    assert (board.phase, board.seconds, board.cuts) == ("One", 15, (10.0,))
    assert [(one.check, one.begin, one.end) for one in board.spans] == [("a", 0, 10), ("b", 10, 15)]
    values = dashboard(telemetry)["power_w", "n0/gpu0"]
    assert values[:10] == tuple(range(10))
    assert values[11:15] == (61, 62, 63, 64)


def test_long_phases_are_drawn_in_means() -> None:
    gpu = device(range(1200), power_w=[100.0, 300.0] * 600)
    summary = joined([measured("a", 0, 1199)], gpu).summary()
    values = dashboard(summary)["power_w", "n0/gpu0"]
    assert summary.dashboards[0].step_s == pytest.approx(10, abs=0.01)
    assert len(values) == 121
    assert set(values[:100]) <= {200.0, 180.0, 220.0, 190.9, 209.1}


def test_reasons_are_counted_over_gpus() -> None:
    gpus = [device(range(5), f"gpu{n}", clock_reasons=[1, 4 * (n < 3), 36, 0, 0]) for n in range(4)]
    tracks = dashboard(joined([measured("a", 0, 4)], *gpus).summary())
    assert {label: values for (gauge, label), values in tracks.items() if gauge == "throttled"} == {
        "software power cap": (0, 3, 4, 0, 0),
        "software thermal slowdown": (0, 0, 4, 0, 0),
    }


def test_many_gpus_are_a_band_and_those_that_keep_away_from_it() -> None:
    gpus = [device(range(5), f"gpu{n}", temperature_c=[50.0 + n % 4 + 20 * (n == 7)] * 5) for n in range(16)]
    (board,) = joined([measured("a", 0, 4)], *gpus).summary().dashboards
    assert [(track.role, track.label, track.values[0]) for track in board.tracks] == [
        ("least", "least", 50),
        ("median", "median", 52),
        ("greatest", "greatest", 73),
        ("device", "n0/gpu7", 73),
    ]


def test_the_record_of_a_thousand_nodes_stays_small() -> None:
    """Every value lies between those of two neighbours: no GPU stands out but one, which was throttled."""
    names = [f"n{number}" for number in range(1024)]
    measurements = [measured(check, at, 10, f"{name}/gpu0") for name in names for check, at in (("a", 0), ("b", 20))]
    found = Joined(PHASES, measurements, 1.0)
    for number, name in enumerate(names):
        power = [600.0 + number] * 31
        found.add(device(range(31), "gpu0", name, power_w=power, clock_reasons=[32 * (number == 77)] * 31))
    summary = found.summary()
    assert len(summary.model_dump_json()) < 10_000
    assert {load.check for load in summary.loads} == {"a", "b"}
    named = [load.gpu for load in summary.loads if load.check == "a"]
    assert named == ["median of 1024", "n0/gpu0", "n1023/gpu0", "n77/gpu0"]
    assert len(named) <= MOST_LOADS


def test_a_few_gpus_are_all_in_the_record() -> None:
    own = [Load(check="a", gpu=f"n0/gpu{n}", samples=1) for n in range(MOST_LOADS)]
    assert list(remarkable(own)) == own


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (range(100, 161), []),
        (range(110, 161), []),
        (range(100, 120), ["n0: no telemetry for 41 s of its checks"]),
        ([*range(100, 110), *range(150, 161)], ["n0: no telemetry for 41 s of its checks"]),
        ([], ["n0: no telemetry for 60 s of its checks"]),
    ],
)
def test_a_sampler_that_died_is_told(times: list[float], told: list[str]) -> None:
    host = device(list(times), "host", cpu_util=[1.0] * len(times))
    assert joined([measured("a", 100, 60)], host).silences() == told


def test_a_node_of_which_nothing_came_is_told() -> None:
    assert joined([measured("a", 100, 60, "n5/gpu0")]).silences() == ["n5: no telemetry for 60 s of its checks"]


def test_silence_between_checks_is_none() -> None:
    """A crash, and the start of torch, lie between them."""
    measurements = [measured("a", 100, 10), measured("b", 300, 10)]
    host = device([*range(100, 111), *range(300, 311)], "host")
    assert joined(measurements, host).silences() == []


def test_the_sampler_tells_what_it_costs() -> None:
    host = device(range(101), "host", sampler_cpu_s=[0.25 + 0.004 * n for n in range(101)])
    assert joined([], host).summary().cpu_share == pytest.approx(0.004)
    assert joined([], device(range(3), "host", sampler_cpu_s=[0.2, 0.4, 0.9])).summary().cpu_share is None


def test_what_could_not_be_read_is_told_once_with_its_reason() -> None:
    gpus = [device(range(3), f"gpu{n}", unread={"sm_util": "no permission"}) for n in range(8)]
    assert joined([], *gpus).summary().absent == {"gpu.sm_util": "no permission (8×)"}


def test_a_clock_that_was_set_back_and_a_device_of_nothing_end_nothing() -> None:
    odd = [device([], "gpu0"), device([5.0, 1.0, 3.0], "gpu1", power_w=[1.0, None, 2.0]), device([math.pi], "host")]
    assert joined([measured("a", 0, 10)], *odd).summary().loads
