"""Report formats, and the files of a run: all or none are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial import report
from seatrial.judge.insights import RARE_FAULTS
from seatrial.model import Insight, Measurement, Metric, Series, Timing, Trial, UsageError
from seatrial.report import junit
from seatrial.report.charts import WIDTH, charts
from tests.paths import ROOT
from tests.report import samples
from tests.report.svg_paths import points_of

FILES = ["trial.json", "junit.xml", "metrics.prom", "figures.csv", "report.html"]


def test_formats_are_imported_at_their_first_use() -> None:
    lazy_modules = {"jinja2", "rich", "seatrial.report.html_page"}
    code = f"import sys, seatrial.report; sys.exit(bool({lazy_modules} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_json_has_all_but_the_verdicts_that_judging_gives_again() -> None:
    trial = samples.rejected()
    verdicts = tuple(verdict for verdict in trial.verdicts if verdict.outcome != "PASS")
    read = Trial.model_validate_json(report.render(trial, "json"))
    assert read == trial.model_copy(update={"verdicts": verdicts})
    assert 0 < len(verdicts) < len(trial.verdicts)


@pytest.mark.parametrize("format", ["html", "markdown"])
def test_the_rare_faults_that_a_soak_would_have_shown_stand_on_the_first_page(format: str) -> None:
    insight = Insight(check="device.soak", title=RARE_FAULTS, text="seen with 13 % (N = 1)")
    text = report.render(samples.accepted().model_copy(update={"insights": (insight,)}), format)
    assert "13 % (N = 1)" in text.split("Headline figures")[0]


@pytest.mark.parametrize("format", report.FORMATS)
@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_every_sample_in_every_format_is_utf8(sample: str, format: str) -> None:
    text = report.render(samples.SAMPLES[sample](), format)
    assert text.endswith("\n") or format == "html"
    assert len(text.encode()) > 200


LARGEST, SMALLEST = 1.7976931348623157e308, 5e-324
EXTREMES = {
    "largest": [LARGEST, LARGEST],
    "largest of both signs": [-LARGEST, LARGEST, 0.0],
    "most negative": [-LARGEST, -LARGEST],
    "smallest": [SMALLEST, 0.0],
    "smallest and largest": [SMALLEST, LARGEST],
    "adjacent floats": [1e16, 1e16 + 2],
}


def extreme(values: list[float], units: str) -> Trial:
    """A trial whose metrics, curves and times have only these values."""
    unit, _, x_unit = units.partition(" over ")
    metrics = [Metric(name="m", value=value, unit=unit, subject=f"n/gpu{i}") for i, value in enumerate(values)]
    single = Metric(name="s", value=values[0], unit=unit, subject="n", samples=tuple(values))
    curve = Series(name="c", subject="n", x=tuple(values), y=tuple(values), x_unit=x_unit, y_unit=unit)
    return samples.accepted().model_copy(
        update={
            "started": abs(values[0]),
            "seconds": abs(values[-1]),
            "timings": tuple(Timing(name="t", kind="check", seconds=abs(value)) for value in values),
            "measurements": (
                Measurement(
                    check="x.y", subject="n", metrics=(*metrics, single), series=(curve,), seconds=abs(values[0])
                ),
            ),
        }
    )


@pytest.mark.parametrize("units", ["us over B", "GB/s over step", "B over s", " over "])
@pytest.mark.parametrize("name", EXTREMES)
def test_every_format_renders_extreme_values(name: str, units: str) -> None:
    for format in report.FORMATS:
        assert report.render(extreme(EXTREMES[name], units), format)


@pytest.mark.parametrize("name", EXTREMES)
def test_curves_of_extreme_values_are_within_the_chart(name: str) -> None:
    for units in ("us over B", "GB/s over step"):
        (chart,) = charts(extreme(EXTREMES[name], units).measurements[0].series, frozenset())
        coordinates = [number for curve in chart.curves for point in points_of(curve.path) for number in point]
        assert all(0 <= coordinate <= WIDTH for coordinate in coordinates), coordinates
        assert all(len(label) < 24 for _, label in (*chart.x.ticks, *chart.y.ticks))


def test_an_invalid_start_time_is_unknown() -> None:
    for seconds in (1e308, 1e12, float("inf")):
        trial = samples.accepted().model_copy(update={"started": seconds})
        assert "unknown time" in report.render(trial, "html")
        assert "unknown time" in report.render(trial, "markdown")
        assert "timestamp=" not in report.render(trial, "junit")
    assert "timestamp=" in report.render(samples.accepted(), "junit")


def test_the_error_of_an_unknown_format_lists_the_formats() -> None:
    with pytest.raises(UsageError, match=r"'pdf': expected html, junit, prometheus, json, markdown, csv, summary"):
        report.render(samples.accepted(), "pdf")


def test_write_all_writes_exactly_these_files(tmp_path: Path) -> None:
    assert report.write_all(samples.accepted(), tmp_path) == [tmp_path / name for name in FILES]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_trial_json_is_written_first() -> None:
    assert list(report.FILES) == FILES


# RLIMIT_FSIZE simulates a full disk: report.html does not fit, the other files do
FULL_DISK = """
import resource, sys
from pathlib import Path
from seatrial import report
from tests.report import samples
from tests.report.svg_paths import points_of
trial = samples.accepted()
assert len(report.render(trial, "json")) < 50_000 < len(report.render(trial, "html"))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    report.write_all(trial, Path(sys.argv[1]))
except report.NotWritten as error:
    print(error)
"""


def test_on_a_full_disk_no_file_is_changed(tmp_path: Path) -> None:
    """Otherwise junit.xml could report ACCEPTED for a trial without a record."""
    (tmp_path / "report.html").write_text("of an earlier run")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("could not write report.html (File too large) in ")
    assert (tmp_path / "report.html").read_text() == "of an earlier run"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]  # no temporary file is left


def test_write_some_writes_the_other_files(tmp_path: Path) -> None:
    (tmp_path / "trial.json").mkdir()
    with pytest.raises(report.NotWritten, match=r"could not write trial\.json \(Is a directory\)"):
        report.write_all(samples.accepted(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trial.json"]
    assert report.write_some(samples.accepted(), tmp_path) == [tmp_path / name for name in FILES[1:]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_a_missing_folder_is_an_error_for_every_file(tmp_path: Path) -> None:
    with pytest.raises(report.NotWritten, match=r"trial\.json.*junit\.xml.*metrics\.prom.*figures\.csv.*report\.html"):
        report.write_all(samples.accepted(), tmp_path / "missing")


def test_a_format_that_fails_is_named_and_the_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trial: Trial) -> str:
        raise ZeroDivisionError(trial.name)

    monkeypatch.setattr(junit, "render", fail)
    with pytest.raises(report.NotWritten, match=r"could not render junit\.xml \(ZeroDivisionError"):
        report.write_all(samples.accepted(), tmp_path)
    report.write_some(samples.accepted(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(set(FILES) - {"junit.xml"})
