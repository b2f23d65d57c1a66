"""Curves, shades and legends of dashboards, and their texts in the HTML report."""

from __future__ import annotations

import re

import pytest

from seatrial.model import Phase, Trial
from seatrial.model.telemetry import THROTTLED, Dashboard, Span, Telemetry, Track
from seatrial.report.charts import LARGEST
from seatrial.report.dashboards import FRAME, DashboardView, dashboards, missing_dashboards
from seatrial.report.html_page import render
from seatrial.report.view import chapters
from tests.report import samples
from tests.report.sample_telemetry import telemetry
from tests.report.test_html_page import Page, words

CHECK = "collectives.all_reduce"


def board(
    *tracks: Track, seconds: float = 10, step_s: float = 1, devices: int = 1, **other_fields: object
) -> DashboardView:
    fields = {"phase": "P", "kind": "gpu", "devices": devices, "seconds": seconds, "step_s": step_s, "spans": ()}
    dashboard = Dashboard.model_validate({**fields, "tracks": tracks, **other_fields})
    (view,) = dashboards(Telemetry(dashboards=(dashboard,)), "P", [])
    return view


def track(values: list[float | None], gauge: str = "power_w", label: str = "n0/gpu0", role: str = "device") -> Track:
    return Track.model_validate({"gauge": gauge, "label": label, "role": role, "values": values})


def test_a_point_is_in_the_middle_of_its_step() -> None:
    (panel,) = board(track([0.0, 500.0, 500.0, 500.0, 0.0]), seconds=5).panels
    assert (FRAME.x_range, FRAME.y_range) == ((84, 646), (204, 30))
    assert panel.curves[0].path == "M140 204l113 -174l224 0l113 174"
    assert (panel.title, panel.y_label, panel.range_text) == ("Power", "W", "0–500 W")


def test_a_line_is_interrupted_at_long_gaps_but_not_where_gpus_are_read_in_turn() -> None:
    (panel,) = board(track([1.0, None, None, None, 1.0, 1.0]), seconds=6).panels
    assert panel.curves[0].path.count("M") == 1
    (panel,) = board(track([1.0, 1.0, *[None] * 11, 1.0, 1.0]), seconds=15).panels
    assert panel.curves[0].path.count("M") == 2


def test_the_summary_has_the_distance_of_the_points_of_gpus_that_are_read_in_turn() -> None:
    assert "one point per 1 s" in board(track([1.0] * 9 + [None])).summary
    values = [1.0, None, None, None, 2.0, None, None, None]
    assert "one point per 4 s" in board(track(values), seconds=8).summary


def test_an_axis_that_counts_gpus_has_whole_numbers() -> None:
    (panel,) = board(track([0.0, 2.0], gauge=THROTTLED, label="software power cap")).panels
    assert [label for _, label in panel.y.ticks] == ["0", "1", "2", "3", "4"]


def test_a_line_is_interrupted_at_a_cut_of_the_time_axis() -> None:
    view = board(track([1.0] * 10), cuts=(5.0,))
    assert view.panels[0].curves[0].path.count("M") == 2
    assert view.cuts == (sum(FRAME.x_range) / 2,)


def test_a_single_value_is_a_short_line() -> None:
    (panel,) = board(track([1.0, 1.0, *[None] * 12, 3.0]), seconds=15).panels
    assert panel.curves[0].path.endswith("h2")


def test_memory_is_in_gib_and_percent_axes_end_at_100() -> None:
    memory, util = board(track([2.0**30, 3.0 * 2**30], "memory_used_bytes"), track([1.0, 2.0], "sm_util")).panels[::-1]
    assert (memory.range_text, memory.y_label) == ("1–3 GiB", "GiB")
    assert util.y.high == 100


def test_a_gauge_with_fewer_than_two_values_has_no_panel() -> None:
    view = board(track([1.0, None]), track([None, None], "sm_util"), track([1.0, 2.0], "temperature_c"))
    assert [panel.title for panel in view.panels] == ["Temperature"]
    empty = Dashboard(phase="P", kind="gpu", devices=1, seconds=1, step_s=1, spans=(), tracks=(track([1.0]),))
    assert dashboards(Telemetry(dashboards=(empty,)), "P", []) == []
    assert dashboards(None, "P", []) == []


def test_a_device_has_the_same_style_in_all_panels_and_is_in_the_common_legend() -> None:
    view = board(
        track([1.0, 2.0], label="n0/gpu10"),
        track([1.0, 2.0], label="n0/gpu2"),
        track([1.0, 2.0], "temperature_c", "n0/gpu10"),
        track([0.0, 1.0], THROTTLED, "software power cap"),
        devices=2,
    )
    assert [(curve.label, curve.style) for curve in view.legend] == [("n0/gpu2", 0), ("n0/gpu10", 1)]
    power, temperature, throttled = view.panels
    assert [curve.style for curve in power.curves] == [1, 0]
    assert [curve.style for curve in temperature.curves] == [1]
    assert [panel.legend for panel in (power, temperature)] == [(), ()]
    assert [curve.label for curve in throttled.legend] == ["software power cap"]


def test_many_devices_are_a_band_with_median_and_outliers() -> None:
    roles = [track([value] * 3, label=role, role=role) for role, value in (("min", 1.0), ("median", 2.0), ("max", 3.0))]
    view = board(*roles, track([9.0] * 3, label="n7/gpu1"), seconds=3, devices=64)
    (panel,) = view.panels
    assert panel.band.endswith("Z")
    assert [curve.label for curve in panel.curves] == ["median", "n7/gpu1"]
    assert ([curve.label for curve in panel.legend], view.band_label) == (["n7/gpu1"], "all 64")


def test_checks_are_shaded_and_numbered_if_wide_enough() -> None:
    spans = (Span(check="a", begin=-1, end=6), Span(check="b", begin=6, end=6.1), Span(check="c", begin=6.1, end=99))
    shades = board(track([1.0] * 10), spans=spans).shades
    assert [shade.number for shade in shades] == ["1", "", "3"]
    assert shades[0].x == FRAME.x_range[0]
    assert shades[-1].x + shades[-1].width == pytest.approx(FRAME.x_range[1])
    assert shades[1].title == "2 b: 6.0 to 6.1 s"


@pytest.mark.parametrize("value", [LARGEST * 1e8, -LARGEST * 1e8, 5e-324, -1.0, 0.0])
@pytest.mark.parametrize("seconds", [LARGEST * 1e8, 0.0, 5e-324])
def test_extreme_values_of_a_damaged_record_have_small_coordinates(value: float, seconds: float) -> None:
    view = board(track([value, 0.0]), seconds=seconds, step_s=abs(seconds) or 1.0)
    for number in re.findall(r"-?\d+", view.panels[0].curves[0].path):
        assert abs(int(number)) < 10 * FRAME.width


def test_the_page_has_the_dashboards_of_each_phase() -> None:
    html = render(samples.with_telemetry())
    page = Page(html)
    text = words(page.text)
    assert "GPU dashboard 4 GPUs, 60 s, one point per 1 s 1 collectives.all_reduce 2 x 3 collectives.all_reduce" in text
    assert "CPU dashboard 1 node, 60 s" in text
    assert "collectives.all_reduce h200-01/gpu3 21 98 %" in text
    assert "software power cap 20 %, software thermal slowdown 10 %" in text
    assert "collectives.all_reduce (1 GPU)." in text
    assert "collectives.transport" not in text, "its phase has no dashboard"
    assert "Samples per second and GPU: 0.25 to 0.33. Highest CPU use of a sampler: 0.41 % of one core." in text
    assert "h200-01: no telemetry samples for 41 s while checks ran" in text
    assert "./jobs/ranks/telemetry.jsonl.gz" in page.values("href")
    assert html.index("Interconnect: GPU dashboard") > html.index('id="telemetry"')


@pytest.mark.parametrize(("share", "is_marked"), [(0.01, False), (0.0101, True)])
def test_cpu_use_of_a_sampler_above_the_limit_is_marked(share: float, is_marked: bool) -> None:
    with_share = telemetry("h200-01", 4).model_copy(update={"sampler_cpu_share": share})
    html = render(samples.accepted().model_copy(update={"telemetry": with_share}))
    assert ('<b class="warn">above the limit of 1 %' in html) is is_marked


def trial_with_samplers() -> Trial:
    """A trial whose jobs have samplers, with dashboards of the phase Interconnect only."""
    trial = samples.with_telemetry()
    return trial.model_copy(update={"jobs": tuple(job.model_copy(update={"telemetry_hz": 1.0}) for job in trial.jobs)})


def missing_by_phase(trial: Trial) -> dict[str, str]:
    return {chapter.title: missing_dashboards(trial, chapter.title, chapter.checks) for chapter in chapters(trial)}


def test_a_phase_without_a_dashboard_has_a_reason() -> None:
    missing = missing_by_phase(trial_with_samplers())
    assert missing[Phase.INTERCONNECT] == ""
    assert re.fullmatch(
        r"No GPU dashboard and no CPU dashboard: fewer than two samples in the \d+\.\d s of its checks\.",
        missing[Phase.SINGLE_GPU],
    )
    assert missing[Phase.SINGLE_GPU] in words(Page(render(trial_with_samplers())).text)


def test_no_dashboard_is_missing_without_samples_to_expect() -> None:
    trial = trial_with_samplers()
    skipped = tuple(entry.model_copy(update={"skipped": "no GPU"}) for entry in trial.measurements)
    assert not any(missing_by_phase(trial.model_copy(update={"measurements": skipped})).values())
    assert not any(missing_by_phase(trial.model_copy(update={"telemetry": None})).values())
    assert not any(missing_by_phase(samples.with_telemetry()).values()), "no job had a sampler"


def test_the_page_of_a_trial_without_telemetry_does_not_mention_it() -> None:
    text = Page(render(samples.accepted())).text
    assert "dashboard" not in text
    assert "Telemetry" not in text


def test_a_phase_has_its_own_dashboards_with_gpus_first() -> None:
    views = dashboards(telemetry("n0", 4), Phase.INTERCONNECT, [CHECK])
    assert [view.title for view in views] == ["GPU dashboard", "CPU dashboard"]
    assert [len(view.loads) for view in views] == [4, 0]
    assert dashboards(telemetry("n0", 4), Phase.DEVICE, [CHECK]) == []


def test_telemetry_of_512_gpus_adds_little_to_the_page() -> None:
    without_telemetry = samples.accepted()
    page = render(without_telemetry.model_copy(update={"telemetry": telemetry("n0", 512)}))
    assert len(page) - len(render(without_telemetry)) < 60_000
