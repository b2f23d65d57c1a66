"""The formats by name, and the files of a run: all or nothing each, trial.json first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial import report
from seatrial.model import Measurement, Metric, Series, Timing, Trial, UsageError
from seatrial.report.charts import FRAME, charts
from tests.paths import ROOT
from tests.report import samples
from tests.report.paths import points_of

FILES = ["trial.json", "junit.xml", "metrics.prom", "report.html"]


def test_the_formats_are_imported_only_when_asked_for() -> None:
    late = {"jinja2", "rich", "seatrial.report.html_page"}
    code = f"import sys, seatrial.report; sys.exit(bool({late} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_json_is_the_whole_record() -> None:
    trial = samples.rejected()
    assert Trial.model_validate_json(report.render(trial, "json")) == trial


@pytest.mark.parametrize("format", report.FORMATS)
@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_every_sample_in_every_format_is_text_that_utf8_can_hold(sample: str, format: str) -> None:
    text = report.render(samples.SAMPLES[sample](), format)
    assert text.endswith("\n") or format == "html"
    assert len(text.encode()) > 500


LARGEST, LEAST = 1.7976931348623157e308, 5e-324
EXTREMES = {
    "largest": [LARGEST, LARGEST],
    "from end to end": [-LARGEST, LARGEST, 0.0],
    "most negative": [-LARGEST, -LARGEST],
    "min": [LEAST, 0.0],
    "least and largest": [LEAST, LARGEST],
    "neighbours": [1e16, 1e16 + 2],
}


def extreme(values: list[float], units: str) -> Trial:
    """A record whose every number is one of these: finite, and no figure of any machine."""
    unit, _, x_unit = units.partition(" over ")
    metrics = [Metric(name="m", value=one, unit=unit, subject=f"n/gpu{i}") for i, one in enumerate(values)]
    single = Metric(name="s", value=values[0], unit=unit, subject="n", samples=tuple(values))
    curve = Series(name="c", subject="n", x=tuple(values), y=tuple(values), x_unit=x_unit, y_unit=unit)
    return samples.accepted().model_copy(
        update={
            "started": values[0],
            "seconds": values[-1],
            "timings": tuple(Timing(name="t", kind="check", seconds=one) for one in values),
            "measurements": (
                Measurement(check="x.y", subject="n", metrics=(*metrics, single), series=(curve,), seconds=values[0]),
            ),
        }
    )


@pytest.mark.parametrize("units", ["us over B", "GB/s over step", "B over s", " over "])
@pytest.mark.parametrize("name", EXTREMES)
def test_every_finite_number_is_rendered(name: str, units: str) -> None:
    for format in report.FORMATS:
        assert report.render(extreme(EXTREMES[name], units), format)


@pytest.mark.parametrize("name", EXTREMES)
def test_the_axes_of_extremes_stay_in_the_picture(name: str) -> None:
    for units in ("us over B", "GB/s over step"):
        (chart,) = charts(extreme(EXTREMES[name], units).measurements[0].series, frozenset())
        places = [number for curve in chart.curves for point in points_of(curve.path) for number in point]
        assert all(0 <= place <= FRAME.width for place in places), places
        assert all(len(label) < 24 for _, label in (*chart.x.ticks, *chart.y.ticks))


def test_a_time_that_is_none_is_said_to_be_unknown() -> None:
    for seconds in (1e308, -1e308, 1e12, float("nan")):
        trial = samples.accepted().model_copy(update={"started": seconds})
        assert "unknown time" in report.render(trial, "html")
        assert "unknown time" in report.render(trial, "markdown")
        assert "timestamp=" not in report.render(trial, "junit")
    assert "timestamp=" in report.render(samples.accepted(), "junit")


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'pdf': expected html, junit, prometheus, json, markdown"):
        report.render(samples.accepted(), "pdf")


def test_all_files_are_written_and_nothing_else(tmp_path: Path) -> None:
    assert report.write_all(samples.accepted(), tmp_path) == [tmp_path / name for name in FILES]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_the_source_of_truth_is_written_first() -> None:
    assert list(report.FILES) == FILES


# A limit on the size of a file, set by the kernel, stands for the full disk: report.html does not fit, the rest does.
FULL_DISK = """
import resource, sys
from pathlib import Path
from seatrial import report
from tests.report import samples
from tests.report.paths import points_of
trial = samples.accepted()
assert len(report.render(trial, "json")) < 50_000 < len(report.render(trial, "html"))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    report.write_all(trial, Path(sys.argv[1]))
except report.NotWritten as error:
    print(error)
"""


def test_on_a_full_disk_all_files_stay_as_they_were(tmp_path: Path) -> None:
    """A junit.xml that says ACCEPTED beside a trial that could not be recorded would be believed."""
    (tmp_path / "report.html").write_text("of the run before")
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("could not write report.html (File too large) in ")
    assert (tmp_path / "report.html").read_text() == "of the run before"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]  # no half file is left behind


def test_what_can_be_written_is_written_when_not_all_can_be(tmp_path: Path) -> None:
    (tmp_path / "trial.json").mkdir()
    with pytest.raises(report.NotWritten, match=r"could not write trial\.json \(Is a directory\)"):
        report.write_all(samples.accepted(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trial.json"]
    assert report.write_some(samples.accepted(), tmp_path) == [tmp_path / name for name in FILES[1:]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_a_folder_that_is_not_there_is_told_with_every_file(tmp_path: Path) -> None:
    with pytest.raises(report.NotWritten, match=r"trial\.json.*junit\.xml.*metrics\.prom.*report\.html"):
        report.write_all(samples.accepted(), tmp_path / "missing")


def test_a_format_that_stumbles_is_named_and_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(trial: Trial) -> str:
        raise ZeroDivisionError(trial.name)

    monkeypatch.setitem(vars(report)["FORMATS"], "junit", stumble)
    with pytest.raises(report.NotWritten, match=r"could not render junit\.xml \(ZeroDivisionError"):
        report.write_all(samples.accepted(), tmp_path)
    report.write_some(samples.accepted(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(set(FILES) - {"junit.xml"})
