"""The structure of reports: all checks are present, the worst outcomes are first."""

from __future__ import annotations

import io
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from seatrial import report
from seatrial.model import DecisionValue, Measurement, Metric, Outcome, Reason, ReasonCode, Verdict
from seatrial.report import html_page, junit, markdown, prometheus
from seatrial.report.terminal import summary
from seatrial.report.view import (
    MAX_OVERVIEW,
    CheckView,
    check_views,
    coverage,
    decision_title,
    launchers,
    machine_size,
    outcome_counts,
)
from tests.report import samples


def check(*metrics: tuple[str, float, str, str], verdicts: tuple[Verdict, ...] = ()) -> CheckView:
    """A check with metrics (name, value, unit, subject)."""
    measured = tuple(Metric(name=n, value=v, unit=u, subject=s) for n, v, u, s in metrics)
    return CheckView("x", "X", "Other", verdicts, (Measurement(check="x", subject="n", metrics=measured),))


def verdict(subject: str, outcome: Outcome, metric: str = "", detail: str = "because", meaning: str = "") -> Verdict:
    return Verdict(check="x", subject=subject, outcome=outcome, metric=metric, detail=detail, meaning=meaning)


def test_checks_are_in_the_order_of_the_phases() -> None:
    assert [(view.phase, view.name) for view in check_views(samples.accepted())] == [
        ("Environment", "gpu.inventory"),
        ("Environment", "host.inventory"),
        ("Interconnect", "collectives.all_reduce"),
        ("Single-GPU training", "train.cnn"),
        ("Distributed training", "train.ddp"),
    ]


def test_a_check_outside_the_catalog_comes_last() -> None:
    trial = samples.accepted().model_copy(update={"verdicts": (verdict("n", Outcome.FAIL),)})
    assert (check_views(trial)[-1].name, check_views(trial)[-1].phase) == ("x", "Other")


def test_a_planned_check_without_a_verdict_is_unjudged() -> None:
    trial = samples.accepted().model_copy(update={"verdicts": (), "measurements": ()})
    views = check_views(trial)
    assert len(views) == 5
    assert {view.outcome for view in views} == {Outcome.UNJUDGED}


def test_figures_are_those_with_problems_then_with_a_rule_then_families_by_size() -> None:
    verdicts = (verdict("n", Outcome.PASS, "with_rule"), verdict("n", Outcome.WARN, "problem"))
    metrics = ["busbw.8GiB", "latency.1", "busbw.64MiB", "with_rule", "problem"]
    view = check(*((name, 1.0, "s", "n") for name in metrics), verdicts=verdicts)
    assert [row.metric for row in view.figures] == ["problem", "with_rule", "busbw.64MiB", "busbw.8GiB", "latency.1"]


def test_a_figure_without_a_rule_has_a_range() -> None:
    (row,) = check(("t", 40.0, "°C", "n/gpu2"), ("t", 90.0, "°C", "n/gpu10")).figures
    assert (row.outcome, row.measured, row.measured_text, row.n) == (None, None, "40–90 °C", 2)
    assert row.values == (40, 90)


def test_the_values_of_one_subject_are_its_samples() -> None:
    metric = Metric(name="b", value=2.0, unit="GB/s", subject="cluster", samples=(1.0, 2.0, 4.0))
    view = CheckView("x", "X", "Other", (), (Measurement(check="x", subject="n", metrics=(metric,)),))
    assert (view.figures[0].values, view.figures[0].measured) == ((1, 2, 4), 2)


def test_the_overview_says_why_a_check_is_unjudged() -> None:
    unjudged = replace(verdict("n", Outcome.UNJUDGED, "m", "no SKU"), reasons=(Reason.NO_REFERENCE,), value=2.0)
    assert "no SKU" in check(("m", 2.0, "GB/s", "n"), verdicts=(unjudged,)).overview_text


def test_coverage_lists_what_an_option_excluded() -> None:
    groups = coverage(samples.rejected())
    assert groups["Excluded by --skip"] == ["train.ddp"]
    assert set(groups["Covered"]) == {"host.inventory", "gpu.inventory", "collectives.all_reduce"}
    assert groups["Without a verdict"] == ["train.cnn"]


def test_a_method_that_several_processes_share_is_shown_once() -> None:
    facts_by_process = [{"method": "one way"}, {"method": "one way"}, {}, {"method": "another way"}]
    measurements = tuple(Measurement(check="x", subject="n", facts=facts) for facts in facts_by_process)
    assert CheckView("x", "X", "Other", (), measurements).methods == ["one way", "another way"]


def test_outcome_counts_omit_zeros() -> None:
    verdicts = [verdict("n", Outcome.PASS), verdict("n", Outcome.FAIL), verdict("n", Outcome.PASS)]
    assert outcome_counts(verdicts) == [(Outcome.FAIL, 1), (Outcome.PASS, 2)]


def test_size_and_launcher() -> None:
    trial = samples.rejected()
    assert (machine_size(trial), launchers(trial)) == ("2 nodes × 4 GPUs", "local")
    without_jobs = trial.model_copy(update={"jobs": (), "results": ()})
    assert (machine_size(without_jobs), launchers(without_jobs)) == ("no job planned", "auto")


def test_methods_that_differ_only_in_numbers_are_shown_once() -> None:
    methods = ["9.9 s, 192 windows", "9.9 s, 192 windows", "10.0 s, 195 windows", "not on gloo"]
    view = check()
    measured = tuple(
        Measurement(check="x", subject=f"n/gpu{index}", facts={"method": method})
        for index, method in enumerate(methods)
    )
    assert replace(view, measurements=measured).methods == [
        "9.9 s, 192 windows (1 other process used the same method, with other numbers)",
        "not on gloo",
    ]
    assert replace(view, measurements=measured[:2]).methods == ["9.9 s, 192 windows"]


@pytest.mark.parametrize("cpu_only", [True, False])
def test_every_report_marks_a_cpu_only_decision(cpu_only: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a reader would take ACCEPTED on a dashboard, in a ticket or in CI for a test of GPUs."""
    hardware = "CPU ONLY: 1 node, no GPU" if cpu_only else "1 node, 4 GPUs"
    trial = samples.accepted()
    decision = trial.decision.model_copy(update={"tested_hardware": hardware, "cpu_only": cpu_only})
    trial = trial.model_copy(update={"decision": decision})
    summary(trial, Console(width=100))
    assert ("CPU ONLY" in capsys.readouterr().out) is cpu_only
    assert (f"<h1>ACCEPTED{' (CPU ONLY)' if cpu_only else ''}</h1>") in html_page.render(trial)
    assert markdown.render(trial).startswith("## ACCEPTED (CPU ONLY): ") is cpu_only
    assert f'\nseatrial_cpu_only{{trial="acceptance"}} {cpu_only:d}\n' in prometheus.render(trial)
    assert ('name="seatrial acceptance (CPU ONLY)"' in junit.render(trial)) is cpu_only


@pytest.mark.parametrize(("cpu_only", "style"), [(True, "cpu-only"), (False, "accepted")])
def test_accepted_cpu_only_trial_has_its_own_colour(cpu_only: bool, style: str) -> None:
    trial = samples.accepted()
    trial = trial.model_copy(update={"decision": trial.decision.model_copy(update={"cpu_only": cpu_only})})
    page = html_page.render(trial)
    assert (f'<section class="decision {style}"' in page, f'<svg class="seal {style}"' in page) == (True, True)
    file = io.StringIO()
    summary(trial, Console(file=file, force_terminal=True, color_system="standard"))
    assert ("\x1b[1;32mACCEPTED" in file.getvalue()) is not cpu_only


def test_incomplete_without_gpu_is_an_error_for_ci() -> None:
    """All verdicts pass, so that a JUnit report of the checks alone would be green."""
    trial = samples.accepted()
    update = {"value": DecisionValue.INCOMPLETE, "reason_code": ReasonCode.NO_GPU, "cpu_only": True}
    trial = trial.model_copy(update={"decision": trial.decision.model_copy(update=update)})
    (error,) = ET.fromstring(junit.render(trial)).iter("error")
    assert error.get("type") == "no_gpu"


def test_headline_names_unknown_gpus() -> None:
    trial = samples.accepted()
    update = {"value": DecisionValue.INCOMPLETE, "unknown_gpus": ("NVIDIA X999",)}
    trial = trial.model_copy(update={"decision": trial.decision.model_copy(update=update)})
    assert decision_title(trial) == "INCOMPLETE (unknown GPU model NVIDIA X999)"


class TestOverviewText:
    CPU_BUSY = Metric(name="cpu_busy", value=53.8, unit="%", subject="n")

    def text(self, outcome: Outcome, detail: str, *metrics: Metric) -> str:
        verdict = Verdict("x", "n", outcome, detail=detail)
        return CheckView(
            "x", "X", "Other", (verdict,), (Measurement(check="x", subject="n", metrics=metrics),)
        ).overview_text

    def test_a_skipped_check_has_its_reason(self) -> None:
        assert self.text(Outcome.SKIP, "the node has no NVIDIA GPU", self.CPU_BUSY) == "the node has no NVIDIA GPU"

    def test_an_error_has_its_reason(self) -> None:
        assert self.text(Outcome.ERROR, "8 GPUs expected, 0 usable") == "8 GPUs expected, 0 usable"
        assert len(self.text(Outcome.ERROR, "word " * 40)) <= MAX_OVERVIEW

    def test_other_checks_have_their_key_figure(self) -> None:
        assert self.text(Outcome.ERROR, "timed out", self.CPU_BUSY) == "timed out"
        assert self.text(Outcome.PASS, "", self.CPU_BUSY).startswith("cpu_busy")


def test_markdown_has_the_reason_of_a_skipped_check() -> None:
    verdict = Verdict("host.load", "n", Outcome.SKIP, detail="the node has no NVIDIA GPU")
    measurement = Measurement(check="host.load", subject="n", metrics=(TestOverviewText.CPU_BUSY,))
    trial = samples.accepted().model_copy(update={"verdicts": (verdict,), "measurements": (measurement,)})
    (row,) = (line for line in report.render(trial, "markdown").splitlines() if line.startswith("| host.load"))
    assert "the node has no NVIDIA GPU" in row
