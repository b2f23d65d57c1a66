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
    chapters,
    grouped,
    headline,
    launchers,
    machine_size,
    outcome_counts,
    problems,
)
from tests.report import samples


def check(*metrics: tuple[str, float, str, str], verdicts: tuple[Verdict, ...] = ()) -> CheckView:
    """A check with metrics (name, value, unit, subject)."""
    measured = tuple(Metric(name=n, value=v, unit=u, subject=s) for n, v, u, s in metrics)
    return CheckView("x", "X", "Other", verdicts, (Measurement(check="x", subject="n", metrics=measured),))


def verdict(subject: str, outcome: Outcome, metric: str = "", detail: str = "because", meaning: str = "") -> Verdict:
    return Verdict(check="x", subject=subject, outcome=outcome, metric=metric, detail=detail, meaning=meaning)


def test_chapters_are_the_phases_in_order() -> None:
    names = [(chapter.title, [view.name for view in chapter.checks]) for chapter in chapters(samples.accepted())]
    assert names == [
        ("Environment", ["gpu.inventory", "host.inventory"]),
        ("Interconnect", ["collectives.all_reduce"]),
        ("Single-GPU training", ["train.cnn"]),
        ("Distributed training", ["train.ddp"]),
    ]


def test_a_check_outside_the_catalog_is_in_the_chapter_other() -> None:
    trial = samples.accepted().model_copy(update={"verdicts": (verdict("n", Outcome.FAIL),)})
    assert [view.name for chapter in chapters(trial) if chapter.title == "Other" for view in chapter.checks] == ["x"]


def test_a_planned_check_without_a_verdict_is_unjudged() -> None:
    trial = samples.accepted().model_copy(update={"verdicts": (), "measurements": ()})
    views = [view for chapter in chapters(trial) for view in chapter.checks]
    assert len(views) == 5
    assert {view.outcome for view in views} == {Outcome.UNJUDGED}


def test_rows_are_problems_then_metrics_with_a_rule_then_families() -> None:
    verdicts = (verdict("n", Outcome.PASS, "with_rule"), verdict("n", Outcome.WARN, "problem"))
    metrics = [("busbw.1", 1.0), ("latency.1", 1.0), ("busbw.2", 2.0), ("with_rule", 1.0), ("problem", 9.0)]
    view = check(*((name, value, "s", "n") for name, value in metrics), verdicts=verdicts)
    assert [row.name for row in view.rows] == ["problem", "with_rule", "busbw.1", "busbw.2", "latency.1"]


def test_rows_of_a_family_are_sorted_by_size() -> None:
    names = ("busbw.1GiB", "busbw.64MiB", "busbw.1000004B", "gemm.tf32", "gemm.bf16")
    view = check(*((name, 1.0, "x", "n") for name in names))
    assert [row.name for row in view.rows] == ["busbw.1000004B", "busbw.64MiB", "busbw.1GiB", "gemm.tf32", "gemm.bf16"]
    assert view.key_figure.startswith("busbw.1GiB ")


def test_a_row_has_all_subjects_worst_first_and_their_median() -> None:
    verdicts = (verdict("n/gpu10", Outcome.FAIL, "t"), verdict("n/gpu2", Outcome.PASS, "t"))
    view = check(
        ("t", 40.0, "°C", "n/gpu2"), ("t", 90.0, "°C", "n/gpu10"), ("t", 41.0, "°C", "n/gpu3"), verdicts=verdicts
    )
    row = view.rows[0]
    assert [reading.subject for reading in row.readings] == ["n/gpu10", "n/gpu2", "n/gpu3"]
    assert (row.value, row.range_text, row.subject_text) == ("41 °C", "40–90", "median of 3")
    assert row.outcomes == [(Outcome.FAIL, 1), (Outcome.PASS, 1)]


def test_equal_values_have_no_range() -> None:
    row = check(("w", 16, "lanes", "n/gpu0"), ("w", 16, "lanes", "n/gpu1")).rows[0]
    assert (row.value, row.range_text, row.subject_text) == ("16 lanes", "", "2 subjects")


def test_one_subject_shows_the_range_of_its_samples() -> None:
    metric = Metric(name="b", value=2.0, unit="GB/s", subject="cluster", samples=(1.0, 2.0, 4.0))
    view = CheckView("x", "X", "Other", (), (Measurement(check="x", subject="n", metrics=(metric,)),))
    assert (view.rows[0].range_text, view.rows[0].subject_text) == ("1–4", "cluster")


def test_a_missing_metric_with_a_rule_has_a_row_with_the_reason() -> None:
    row = check(verdicts=(verdict("n", Outcome.ERROR, "absent", "absent was not measured"),)).rows[0]
    assert (row.value, row.remark) == ("not measured", "absent was not measured")


def test_of_many_different_reasons_only_the_first_is_shown() -> None:
    verdicts = tuple(verdict(f"n{i}", Outcome.UNJUDGED, "t", f"t is {i}") for i in range(9))
    assert check(verdicts=verdicts).rows[0].remark == "t is 0; and others"


@pytest.mark.parametrize(
    ("metrics", "verdicts", "expected"),
    [
        (
            [("ok", 1, "bool"), ("wrong", 0, "count"), ("busbw.1", 1, "GB/s"), ("busbw.2", 2, "GB/s")],
            [],
            "busbw.2 2 GB/s (no threshold)",
        ),
        ([("busbw.1GiB", 2, "GB/s"), ("busbw.64MiB", 1, "GB/s")], [], "busbw.1GiB 2 GB/s (no threshold)"),
        ([("wrong", 0, "count"), ("speed", 5, "s")], [("wrong", Outcome.FAIL)], "wrong 0"),
        ([("busbw.1", 1, "GB/s"), ("busbw.2", 2, "GB/s")], [("busbw.1", Outcome.PASS)], "busbw.1 1 GB/s"),
        ([("only", 0, "count")], [], "only 0 (no threshold)"),
        ([("nodes", 2, "nodes")], [("nodes", Outcome.PASS)], "nodes 2"),
        ([("wrong", 0, "count"), ("speed", 5, "s")], [("wrong", Outcome.PASS)], "wrong 0; speed 5 s (no threshold)"),
        ([("wrong", 0, "count"), ("speed", 5, "s")], [("speed", Outcome.SKIP)], "speed 5 s (no threshold)"),
        ([("speed", 5, "s")], [("speed", Outcome.SKIP)], "speed 5 s (no threshold)"),
        ([], [], ""),
    ],
)
def test_the_key_figure(
    metrics: list[tuple[str, float, str]], verdicts: list[tuple[str, Outcome]], expected: str
) -> None:
    verdict_list = tuple(verdict("n", outcome, name) for name, outcome in verdicts)
    assert check(*((*metric, "n") for metric in metrics), verdicts=verdict_list).key_figure == expected


def test_the_key_figure_is_the_key_metric_else_a_performance_metric() -> None:
    passed = (verdict("n", Outcome.PASS, "loss_drop"),)
    view = check(("loss_drop", 5, "nats", "n"), ("speed", 9, "GB/s", "n"), ("accuracy", 98, "%", "n"), verdicts=passed)
    assert view.key_figure == "loss_drop 5 nats"
    view = replace(view, speeds=("spe*",))
    assert view.key_figure == "loss_drop 5 nats; speed 9 GB/s (no threshold)"
    assert replace(view, key_metric="accuracy").key_figure == "loss_drop 5 nats; accuracy 98 % (no threshold)"


def test_subjects_with_only_skips_are_not_counted_beside_others() -> None:
    node, host = verdict("n0", Outcome.PASS, "x"), verdict("login", Outcome.SKIP, "y")
    assert check(verdicts=(node, host)).subjects_text == "1 node"
    assert check(verdicts=(host,)).subjects_text == "1 node"


@pytest.mark.parametrize(
    ("reason", "mark"),
    [(Reason.IMPLAUSIBLY_HIGH, "implausibly high"), (Reason.NO_REFERENCE, "no reference value")],
)
def test_the_key_figure_says_why_it_is_unjudged(reason: Reason, mark: str) -> None:
    unjudged = replace(verdict("n0", Outcome.UNJUDGED, "busbw.1GiB"), reasons=(reason,))
    assert check(("busbw.1GiB", 2.0, "GB/s", "n0"), verdicts=(unjudged,)).key_figure == f"busbw.1GiB 2 GB/s ({mark})"


def test_a_method_that_several_processes_share_is_shown_once() -> None:
    facts_by_process = [{"method": "one way"}, {"method": "one way"}, {}, {"method": "another way"}]
    measurements = tuple(Measurement(check="x", subject="n", facts=facts) for facts in facts_by_process)
    assert CheckView("x", "X", "Other", (), measurements).methods == ["one way", "another way"]


def test_problems_are_grouped_worst_first() -> None:
    groups = problems(samples.large_cluster())
    summaries = [(group.first.outcome, group.first.check, len(group.verdicts)) for group in groups]
    assert summaries == [
        (Outcome.FAIL, "gpu.inventory", 2),
        (Outcome.ERROR, "train.ddp", 1),
        (Outcome.WARN, "host.inventory", 24),
        (Outcome.WARN, "collectives.all_reduce", 1),
    ]


def test_the_same_error_of_several_checks_is_one_group() -> None:
    job_errors = [
        Verdict(check=name, subject="cluster", outcome=Outcome.ERROR, detail="sbatch: invalid account")
        for name in ("a.one", "b.two", "c.three")
    ]
    other = Verdict(check="d.four", subject="cluster", outcome=Outcome.ERROR, detail="exit code 1")
    failed = [replace(error, outcome=Outcome.FAIL) for error in job_errors[:2]]
    trial = samples.accepted().model_copy(update={"verdicts": (*job_errors, other, *failed)})
    summaries = [(group.first.outcome, group.title, group.check_names) for group in problems(trial)]
    assert summaries == [
        (Outcome.FAIL, "a.one", ""),
        (Outcome.FAIL, "b.two", ""),
        (Outcome.ERROR, "3 checks", "a.one, b.two, c.three"),
        (Outcome.ERROR, "d.four", ""),
    ]
    for format in ("markdown", "html"):
        text = report.render(trial, format)
        assert "Checks: a.one, b.two, c.three" in text
    screen = io.StringIO()
    summary(trial, Console(file=screen, width=100))
    _, _, below_the_table = screen.getvalue().partition("verdicts:")
    assert below_the_table.count("sbatch: invalid account") == 3, "once for the three errors, twice for the failures"


def test_a_meaning_that_all_verdicts_of_a_group_share_is_shown_once() -> None:
    (group,) = grouped(
        [verdict("n1", Outcome.FAIL, "m", "m is 1", "bad"), verdict("n2", Outcome.FAIL, "m", "m is 2", "bad")]
    )
    assert (group.meaning, [group.verdict_text(entry) for entry in group.verdicts]) == ("bad", ["m is 1", "m is 2"])


def test_different_meanings_are_shown_with_each_verdict() -> None:
    (group,) = grouped([verdict("n1", Outcome.FAIL, "", "a", "b"), verdict("n2", Outcome.FAIL, "", "a", "c")])
    assert (group.meaning, [group.verdict_text(entry) for entry in group.verdicts]) == ("", ["a: b", "a: c"])


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
    assert headline(trial) == "INCOMPLETE (unknown GPU model NVIDIA X999)"


class TestOverviewText:
    CPU_BUSY = Metric(name="cpu_busy", value=53.8, unit="%", subject="n")

    def text(self, outcome: Outcome, detail: str, *metrics: Metric) -> str:
        verdict = Verdict("x", "n", outcome, detail=detail)
        return CheckView(
            "x", "X", "Other", (verdict,), (Measurement(check="x", subject="n", metrics=metrics),)
        ).overview_text

    def test_a_skipped_check_has_its_reason(self) -> None:
        assert self.text(Outcome.SKIP, "the node has no NVIDIA GPU", self.CPU_BUSY) == "the node has no NVIDIA GPU"

    def test_an_error_without_a_key_figure_has_its_reason(self) -> None:
        assert self.text(Outcome.ERROR, "8 GPUs expected, 0 usable") == "8 GPUs expected, 0 usable"
        assert len(self.text(Outcome.ERROR, "word " * 40)) <= MAX_OVERVIEW

    def test_other_checks_have_their_key_figure(self) -> None:
        assert self.text(Outcome.ERROR, "timed out", self.CPU_BUSY).startswith("cpu_busy")
        assert self.text(Outcome.PASS, "", self.CPU_BUSY).startswith("cpu_busy")


def test_markdown_has_the_reason_of_a_skipped_check() -> None:
    verdict = Verdict("host.load", "n", Outcome.SKIP, detail="the node has no NVIDIA GPU")
    measurement = Measurement(check="host.load", subject="n", metrics=(TestOverviewText.CPU_BUSY,))
    trial = samples.accepted().model_copy(update={"verdicts": (verdict,), "measurements": (measurement,)})
    (row,) = (line for line in report.render(trial, "markdown").splitlines() if line.startswith("| host.load"))
    assert "the node has no NVIDIA GPU" in row
