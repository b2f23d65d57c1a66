"""Samples joined with the checks that ran at the same time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from seatrial.model import Measurement
from seatrial.model.telemetry import HARDWARE_SLOWDOWN, Load, Telemetry
from seatrial.telemetry.aggregate import (
    MAX_LOADS,
    CheckInterval,
    TelemetryAggregator,
    check_intervals,
    load_during_check,
)
from seatrial.telemetry.files import DeviceSamples

REASONS = {
    "1": "idle",
    "4": "software power cap",
    "8": "hardware slowdown",
    "32": "software thermal slowdown",
    "64": "hardware thermal slowdown",
    "128": "hardware power brake",
}
PHASES = {"a": "One", "b": "One", "c": "Two"}


def measured(
    check: str,
    started: float,
    seconds: float,
    subject: str = "n0/gpu0",
    rank: int | None = 0,
    skipped: str | None = None,
) -> Measurement:
    return Measurement(check=check, subject=subject, rank=rank, started=started, seconds=seconds, skipped=skipped)


def device(times: range | list[float], name: str = "gpu0", node: str = "n0", **columns: Any) -> DeviceSamples:
    fields = {"node": node, "device": name, "attempt": 1, "rank": 0, "hz": 1.0, "reasons": REASONS, "time": list(times)}
    return DeviceSamples.model_validate(fields | columns)


def aggregate(measurements: list[Measurement], *devices: DeviceSamples, hz: float = 1.0) -> TelemetryAggregator:
    aggregator = TelemetryAggregator(PHASES, measurements, hz)
    for samples in devices:
        aggregator.add(samples)
    return aggregator


def dashboard(telemetry: Telemetry, phase: str = "One") -> dict[tuple[str, str], tuple[float | None, ...]]:
    (board,) = [dashboard for dashboard in telemetry.dashboards if dashboard.phase == phase]
    return {(track.gauge, track.label): track.values for track in board.tracks}


def test_check_interval_spans_all_processes_of_a_node() -> None:
    intervals = check_intervals(
        [
            measured("b", 20, 5),
            measured("a", 10, 5, "n0/gpu0"),
            measured("a", 9, 3, "n0/gpu1", 1),
            measured("a", 500, 5, "n1/rank2", 2),
            measured("a", 30, 0),  # an error of the launcher
            measured("c", 1, 1, "cluster", None),
        ]
    )
    assert intervals == {
        "n0": [CheckInterval("a", 9, 15), CheckInterval("b", 20, 25)],
        "n1": [CheckInterval("a", 500, 505)],
    }


def test_gpu_load_of_a_check() -> None:
    gpu = device(
        range(100, 110),
        sm_util=[0, 100, 100, 0, 100, 0, 0, 0, 0, 0],
        power_w=[80, 700, 690, 90, 500, 999, 0, 0, 0, 0],
        temperature_c=[30, 50, 61, 60, 59, 99, 0, 0, 0, 0],
        sm_clock_mhz=[345, 1500, 1400, 345, 1980, 100, 0, 0, 0, 0],
        clocks_event_reasons=[1, 4, 36, 1, 4, 32, 0, 0, 0, 0],
    )
    load = load_during_check(gpu, CheckInterval("a", 99.9, 104.5))
    assert load
    assert load == Load(
        check="a",
        gpu="n0/gpu0",
        samples=4,
        sm_util_mean=75.0,
        power_w_mean=495.0,
        power_w_max=700,
        temperature_c_max=61,
        sm_clock_mhz_min=1400,  # not 345, the clock while idle
        throttled_share={"software power cap": 0.75, "software thermal slowdown": 0.25},
    )
    assert load_during_check(gpu, CheckInterval("b", 104.1, 104.9)) is None, "too short for a sample"


def test_gauges_that_were_not_read_are_none() -> None:
    gpu = device(range(3), power_w=[None, None, None], temperature_c=[40, 41, 42])
    load = load_during_check(gpu, CheckInterval("a", 0, 2))
    assert load
    assert (load.power_w_mean, load.power_w_max, load.sm_clock_mhz_min, load.throttled_share) == (None, None, None, {})


def test_samples_without_values_of_a_gpu_do_not_count() -> None:
    """The GPU is read in one of three samples."""
    gpu = device(
        range(7),
        power_w=[700, None, None, 690, None, None, None],
        clocks_event_reasons=[0, None, None, 32, *[None] * 3],
    )
    load = load_during_check(gpu, CheckInterval("a", 1.5, 5.5))
    assert load
    assert (load.samples, load.power_w_mean, load.throttled_share) == (1, 690, {"software thermal slowdown": 1.0})
    assert load_during_check(gpu, CheckInterval("b", 3.5, 6)) is None


def test_first_second_of_a_check_is_skipped() -> None:
    """device.burn ran at 690 W until 110.4 s; NVML's power is a mean over the last second."""
    gpu = device(range(100, 121), power_w=[690.0] * 12 + [120.0] * 9)
    load = load_during_check(gpu, CheckInterval("transfer.host", 110.4, 119))
    assert load
    assert (load.samples, load.power_w_max) == (8, 120)
    assert load_during_check(gpu, CheckInterval("device.digests", 110.4, 111.3)) is None


def test_gpu_load_uses_the_gpus_interval_or_else_the_nodes() -> None:
    """The second GPU ends the first check six seconds after the first GPU."""
    measurements = [
        measured("a", 100, 4),
        measured("b", 104, 16),
        measured("a", 100, 10, "n0/gpu1", 1),
        measured("b", 110, 10, "n0/gpu1", 1),
    ]
    power = [300.0] * 5 + [700.0] * 16
    gpus = [device(range(100, 121), f"gpu{n}", power_w=power) for n in range(3)]
    power_w = {(load.check, load.gpu): load.power_w_mean for load in aggregate(measurements, *gpus).summary().loads}
    assert power_w["a", "n0/gpu0"] == 300
    assert power_w["b", "n0/gpu0"] == 700
    assert power_w["a", "n0/gpu1"] == power_w["a", "n0/gpu2"] == 540.0
    assert len(power_w) == 6


def test_checks_without_a_sample_list_their_number_of_gpus() -> None:
    """The sampler reads one of two GPUs in turn; another device has samples of another time."""
    measurements = [measured("a", 100, 0.9), measured("b", 101, 1.5), measured("c", 104, 1.9, skipped="no GPU")]
    turns = ([1.0, None] * 4, [None, 1.0] * 4)
    gpus = [device(range(100, 108), f"gpu{n}", power_w=turn) for n, turn in enumerate(turns)]
    other_time = device(range(10), "gpu0", power_w=[1.0] * 10)
    summary = aggregate(measurements, *gpus, other_time).summary()
    assert summary.unsampled_gpus == {"a": 2, "b": 1}
    assert [(load.check, load.gpu, load.samples) for load in summary.loads] == [("b", "n0/gpu0", 1)]


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        (8, {HARDWARE_SLOWDOWN}),
        (8 | 4 | 1, {HARDWARE_SLOWDOWN, "software power cap"}),
        (8 | 64, {"hardware thermal slowdown"}),
        (8 | 128, {"hardware power brake"}),
        (8 | 32 | 4, {"software thermal slowdown", "software power cap"}),
        (1, set()),
    ],
)
def test_hardware_slowdown_is_omitted_if_another_reason_explains_it(mask: int, reasons: set[str]) -> None:
    gpu = device(range(4), clocks_event_reasons=[mask] * 4)
    load = load_during_check(gpu, CheckInterval("a", 0, 3))
    assert load
    assert set(load.throttled_share) == reasons
    assert gpu.throttle_reasons(mask) == reasons


def test_unexplained_hardware_slowdown_counts_beside_thermal_samples() -> None:
    load = load_during_check(device(range(5), clocks_event_reasons=[0, 8, 72, 0, 0]), CheckInterval("a", 0, 4))
    assert load
    assert load.throttled_share == {HARDWARE_SLOWDOWN: 0.25, "hardware thermal slowdown": 0.25}


def test_samples_and_checks_are_joined_by_each_nodes_clock() -> None:
    """The second node's clock is an hour ahead."""
    measurements = [measured("a", 100, 10), measured("a", 3700, 10, "n1/gpu0", 1)]
    ahead = device(range(3695, 3715), node="n1", power_w=[600.0] * 20)
    behind = device(range(95, 115), power_w=[300.0] * 20)
    summary = aggregate(measurements, behind, ahead).summary()
    assert [(load.gpu, load.power_w_mean, load.samples) for load in summary.loads] == [
        ("n0/gpu0", 300.0, 10),  # without the first second
        ("n1/gpu0", 600.0, 10),
    ]
    (board,) = summary.dashboards
    assert (board.seconds, board.devices) == (10, 2)
    assert dashboard(summary)["power_w", "n1/gpu0"][:10] == (600.0,) * 10


def test_time_of_other_phases_is_cut_from_the_axis() -> None:
    measurements = [measured("a", 100, 10), measured("c", 110, 50), measured("b", 160, 5)]
    times = range(100, 166)
    telemetry = aggregate(measurements, device(times, power_w=[float(n) for n in range(66)])).summary()
    board = telemetry.dashboards[0]
    assert (board.phase, board.seconds, board.cuts) == ("One", 15, (10.0,))
    assert [(span.check, span.begin, span.end) for span in board.spans] == [("a", 0, 10), ("b", 10, 15)]
    values = dashboard(telemetry)["power_w", "n0/gpu0"]
    assert values[:10] == tuple(range(10))
    assert values[11:15] == (61, 62, 63, 64)


def throttled(telemetry: Telemetry) -> dict[str, tuple[float | None, ...]]:
    return {label: values for (gauge, label), values in dashboard(telemetry).items() if gauge == "throttled"}


def sampled_in_turn(gpus: int, per_sample: int, seconds: int, mask: int) -> list[DeviceSamples]:
    turns = [{(per_sample * second + n) % gpus for n in range(per_sample)} for second in range(seconds)]
    columns = [[mask if gpu in turn else None for turn in turns] for gpu in range(gpus)]
    return [device(range(seconds), f"gpu{n}", clocks_event_reasons=column) for n, column in enumerate(columns)]


def test_throttled_gpus_are_counted_until_their_node_ends_the_check() -> None:
    measurements = [measured("a", 0, 4), measured("a", 0, 9, "n1/gpu0", 1)]
    gpus = [
        device(range(10), clocks_event_reasons=[32] * 10),
        device(range(10), node="n1", clocks_event_reasons=[32] * 10),
    ]
    assert throttled(aggregate(measurements, *gpus).summary()) == {"software thermal slowdown": (2,) * 5 + (1,) * 5}


def sample_rates(telemetry: Telemetry) -> tuple[float | None, float | None]:
    return telemetry.min_sample_rate_hz, telemetry.max_sample_rate_hz


def test_minimum_and_maximum_sample_rate() -> None:
    gpus = sampled_in_turn(8, 3, 40, 0)
    assert sample_rates(aggregate([], *gpus).summary()) == (0.375, 0.375)
    gpus.append(device(range(40), "gpu8", power_w=[1.0, *[None] * 19] * 2))
    assert sample_rates(aggregate([], *gpus).summary()) == (0.05, 0.375)
    assert sample_rates(aggregate([], device(range(5), power_w=[1.0] * 5)).summary()) == (None, None), (
        "too short for a rate"
    )


def test_record_of_a_thousand_nodes_is_small() -> None:
    """Only the two extremes and one throttled GPU are listed."""
    names = [f"n{number}" for number in range(1024)]
    measurements = [measured(check, at, 10, f"{name}/gpu0") for name in names for check, at in (("a", 0), ("b", 20))]
    aggregator = TelemetryAggregator(PHASES, measurements, 1.0)
    for number, name in enumerate(names):
        power = [600.0 + number] * 31
        aggregator.add(device(range(31), "gpu0", name, power_w=power, clocks_event_reasons=[32 * (number == 77)] * 31))
    summary = aggregator.summary()
    assert len(summary.model_dump_json()) < 10_000
    assert {load.check for load in summary.loads} == {"a", "b"}
    listed = [load.gpu for load in summary.loads if load.check == "a"]
    assert listed == ["median of 1024", "n0/gpu0", "n1023/gpu0", "n77/gpu0"]
    assert len(listed) <= MAX_LOADS


def gaps(aggregator: TelemetryAggregator) -> list[tuple[str, int]]:
    """(node, seconds) of each message."""
    messages = aggregator.sampling_gaps()
    return [(message.partition(":")[0], int(message.split(" s ")[0].split()[-1])) for message in messages]


@pytest.mark.parametrize(
    ("times", "gap_s"),
    [
        (range(100, 161), None),
        (range(110, 161), None),
        (range(100, 120), 41),
        ([*range(100, 110), *range(150, 161)], 41),
        ([], 60),
    ],
)
def test_sampling_gap_is_reported(times: list[float], gap_s: int | None) -> None:
    host = device(list(times), "host", cpu_util=[1.0] * len(times))
    assert gaps(aggregate([measured("a", 100, 60)], host)) == ([] if gap_s is None else [("n0", gap_s)])


def test_node_without_samples_is_reported() -> None:
    assert gaps(aggregate([measured("a", 100, 60, "n5/gpu0")])) == [("n5", 60)]


def test_gap_between_checks_is_not_reported() -> None:
    """The job was restarted between them."""
    measurements = [measured("a", 100, 10), measured("b", 300, 10)]
    host = device([*range(100, 111), *range(300, 311)], "host")
    assert aggregate(measurements, host).sampling_gaps() == []


def test_cpu_share_of_the_sampler() -> None:
    host = device(range(101), "host", sampler_cpu_s=[0.25 + 0.004 * n for n in range(101)])
    assert aggregate([], host).summary().sampler_cpu_share == pytest.approx(0.004)
    assert aggregate([], device(range(3), "host", sampler_cpu_s=[0.2, 0.4, 0.9])).summary().sampler_cpu_share is None


def test_unreadable_gauge_is_listed_once_with_its_reason() -> None:
    gpus = [device(range(3), f"gpu{n}", unreadable={"sm_util": "no permission"}) for n in range(8)]
    assert aggregate([], *gpus).summary().unreadable_gauges == {"gpu.sm_util": "no permission (8×)"}


def test_empty_devices_and_unordered_times_are_accepted() -> None:
    unusual = [device([], "gpu0"), device([5.0, 1.0, 3.0], "gpu1", power_w=[1.0, None, 2.0]), device([math.pi], "host")]
    assert aggregate([measured("a", 0, 10)], *unusual).summary().loads
