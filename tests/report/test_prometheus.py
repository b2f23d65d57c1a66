"""The Prometheus report, metrics.prom."""

from __future__ import annotations

import re
import subprocess

import pytest

from seatrial.checks import catalog
from seatrial.model import Measurement, Metric, Trial
from seatrial.report.prometheus import render
from tests.report import samples
from tests.report.conftest import assert_golden, tool

LINE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)')


def measured(*metrics: Metric) -> Trial:
    measurement = Measurement(check="x", subject="n", metrics=metrics)
    return samples.accepted().model_copy(update={"measurements": (measurement,), "jobs": (), "verdicts": ()})


def values(trial: Trial) -> dict[tuple[str, str], float]:
    samples_by_key = {}
    for line in render(trial).splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            assert (match[1], match[2]) not in samples_by_key, f"twice: {line}"
            samples_by_key[match[1], match[2]] = float(match[3])
    return samples_by_key


def promtool(text: str) -> str:
    """The output of promtool, and its exit code if it is not 0; empty for valid text."""
    command = [tool("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}" + (f"exit {done.returncode}" if done.returncode else "")


def test_golden() -> None:
    assert_golden("report-rejected.prom", render(samples.rejected()))


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_promtool_accepts_every_sample(sample: str) -> None:
    assert promtool(render(samples.SAMPLES[sample]())) == ""


def test_promtool_rejects_invalid_text() -> None:
    assert "no help text" in promtool('# TYPE seatrial_x gauge\nseatrial_x{a="b"} 1\n')
    assert "exit" in promtool("seatrial_x{a=b} 1\n")


def test_infinity_has_the_notation_of_prometheus() -> None:
    trial = samples.accepted().model_copy(update={"seconds": float("inf")})
    text = render(trial)
    assert re.search(r"^seatrial_last_run_duration_seconds\{.*\} \+Inf$", text, re.MULTILINE)
    huge = render(measured(Metric(name="m", value=1e308, unit="GB/s", subject="n")))
    assert re.search(r"^seatrial_measured_bytes_per_second\{.*\} \+Inf$", huge, re.MULTILINE)
    assert re.search(r"\} -Inf$", render(measured(Metric(name="m", value=-1e308, unit="GB/s", subject="n"))), re.M)
    assert promtool(text) == promtool(huge) == ""


def test_promtool_accepts_the_unit_of_every_check() -> None:
    units = {unit for check in catalog().values() for unit in check.units.values()}
    assert units
    trial = measured(*(Metric(name=f"m{i}", value=1, unit=unit, subject="n") for i, unit in enumerate(sorted(units))))
    assert promtool(render(trial)) == ""


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_names_and_labels_are_unique_and_explained_once(sample: str) -> None:
    trial = samples.SAMPLES[sample]()
    text = render(trial)
    names = {name for name, _ in values(trial)}
    assert all(name.startswith("seatrial_") for name in names)
    for kind in ("HELP", "TYPE"):
        assert sorted(re.findall(rf"^# {kind} (\S+)", text, re.MULTILINE)) == sorted(names)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_exactly_one_decision_is_1(sample: str) -> None:
    trial = samples.SAMPLES[sample]()
    decisions = {labels: value for (name, labels), value in values(trial).items() if name == "seatrial_decision"}
    assert sorted(decisions.values()) == [0, 0, 1]
    (labels_of_decision,) = (labels for labels, value in decisions.items() if value)
    assert f'decision="{trial.decision.value}"' in labels_of_decision


@pytest.mark.parametrize(
    ("value", "unit", "name", "expected"),
    [
        (356.5, "GB/s", "seatrial_measured_bytes_per_second", 356.5e9),
        (1.5, "GiB", "seatrial_measured_bytes", 1.5 * 2**30),
        (98.7, "%", "seatrial_measured_ratio", 0.987),
        (24.77, "us", "seatrial_measured_seconds", 24.77e-6),
        (2, "ms", "seatrial_measured_seconds", 0.002),
        (7, "count", "seatrial_measured", 7),
        (1, "bool", "seatrial_measured", 1),
        (0.5, "ratio", "seatrial_measured_ratio", 0.5),
        (9000, "tokens/s/GPU", "seatrial_measured_tokens_per_second_per_gpu", 9000),
        (12, "images/s", "seatrial_measured_images_per_second", 12),
        (4096, "files", "seatrial_measured_files", 4096),
    ],
)
def test_values_are_in_base_units(value: float, unit: str, name: str, expected: float) -> None:
    trial = measured(Metric(name="m", value=value, unit=unit, subject="n"))
    labels = 'trial="acceptance",check="x",subject="n",metric="m"'
    assert values(trial)[name, labels] == pytest.approx(expected, rel=1e-11)


def test_of_two_values_with_the_same_labels_the_last_counts() -> None:
    trial = measured(*(Metric(name="m", value=value, unit="s", subject="n") for value in (1, 2)))
    assert [value for (name, _), value in values(trial).items() if name == "seatrial_measured_seconds"] == [2]


def test_labels_are_escaped() -> None:
    trial = measured(Metric(name='a"b\\c\nd', value=1, unit="s", subject="n"))
    assert r'metric="a\"b\\c\nd"' in render(trial)


def test_messages_are_not_in_labels() -> None:
    text = render(samples.rejected())
    assert all(verdict.message not in text for verdict in samples.rejected().verdicts if verdict.fix)
    assert {key for line in text.splitlines() for key in re.findall(r'[{,]([a-z]+)="', line)} == {
        "trial",
        "check",
        "subject",
        "metric",
        "outcome",
        "decision",
        "kind",
        "confidence",
        "serial",
    }
