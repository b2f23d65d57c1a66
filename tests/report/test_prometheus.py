"""The Prometheus report, metrics.prom."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace

import pytest
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.model import Trial
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import figures, view
from seatrial.report.prometheus import MAX_PARTS, _base_unit, _escaped, _number, render
from tests.report import samples
from tests.report.conftest import assert_golden, tool

LINE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)')


@pytest.fixture
def busy_gpu(monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A real record with two GPUs, and the real catalog."""
    for module in (figures, view):
        monkeypatch.setattr(module, "catalog", catalog)
    return load_trial(record_path("2026-11-23-2xh200/busy-gpu"))


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
    assert promtool(text) == ""
    assert (_number(-math.inf), _number(math.nan)) == ("-Inf", "NaN")


def test_promtool_accepts_the_unit_of_every_check() -> None:
    units = {unit for check in catalog().values() for unit in check.units.values()}
    assert units
    names = [f"seatrial_measured_{_base_unit(unit)[0]}".rstrip("_") for unit in sorted(units)]
    assert promtool("".join(f"# HELP {name} x\n# TYPE {name} gauge\n{name} 1\n" for name in dict.fromkeys(names))) == ""


def test_headline_figures_have_the_values_of_their_parts_worst_first(busy_gpu: Trial) -> None:
    of_copy = {labels: value for (_, labels), value in values(busy_gpu).items() if 'metric="copy"' in labels}
    measured = [line for line in render(busy_gpu).splitlines() if 'metric="copy",subject="vm/' in line]
    assert len(of_copy) == 2
    assert measured[0].startswith("seatrial_headline_margin_ratio{") or "vm/gpu1" in measured[0]
    worst, other = (line for line in measured if line.startswith("seatrial_measured_bytes_per_second"))
    assert ("vm/gpu1" in worst, "vm/gpu0" in other) == (True, True)


def test_of_thousands_of_parts_the_worst_have_samples(busy_gpu: Trial) -> None:
    copy = next(verdict for verdict in busy_gpu.verdicts if verdict.metric == "copy" and verdict.outcome == "FAIL")
    many = tuple(replace(copy, subject=f"n{n}/gpu0", value=1000.0 + n) for n in range(3000))
    text = render(busy_gpu.model_copy(update={"verdicts": many}))
    assert text.count("seatrial_part_bad{") == text.count("seatrial_measured_bytes_per_second{") == MAX_PARTS
    assert 'subject="n99/gpu0"' in text
    assert 'subject="n100/gpu0"' not in text


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
    ("unit", "name", "factor"),
    [
        ("GB/s", "bytes_per_second", 1e9),
        ("GiB", "bytes", 2**30),
        ("%", "ratio", 0.01),
        ("us", "seconds", 1e-6),
        ("count", "", 1),
        ("bool", "", 1),
        ("ratio", "ratio", 1),
        ("tokens/s/GPU", "tokens_per_second_per_gpu", 1),
        ("images/s", "images_per_second", 1),
    ],
)
def test_values_are_in_base_units(unit: str, name: str, factor: float) -> None:
    assert _base_unit(unit) == (name, factor)


def test_labels_are_escaped() -> None:
    assert _escaped('a"b\\c\nd') == r"a\"b\\c\nd"


def test_messages_are_not_in_labels() -> None:
    text = render(samples.rejected())
    assert all(verdict.message not in text for verdict in samples.rejected().verdicts if verdict.fix)
    assert {key for line in text.splitlines() for key in re.findall(r'[{,]([a-z]+)="', line)} == {
        "trial",
        "check",
        "subject",
        "outcome",
        "decision",
        "kind",
        "serial",
    }
