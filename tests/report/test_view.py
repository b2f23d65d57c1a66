"""A trial arranged for reading: nothing vanishes, the worst comes first."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from seatrial import report
from seatrial.model import Measurement, Metric, Outcome, Verdict
from seatrial.report import html_page, junit, markdown, prometheus
from seatrial.report.terminal import summary
from seatrial.report.view import CheckView, chapters, grouped, launchers, machine_size, outcome_counts, problems
from tests.report import samples


def check(*metrics: tuple[str, float, str, str], verdicts: tuple[Verdict, ...] = ()) -> CheckView:
    """A check with metrics (name, value, unit, subject)."""
    measured = tuple(Metric(name=n, value=v, unit=u, subject=s) for n, v, u, s in metrics)
    return CheckView("x", "X", "Other", verdicts, (Measurement(check="x", subject="n", metrics=measured),))


def verdict(subject: str, outcome: Outcome, metric: str = "", detail: str = "because", why: str = "") -> Verdict:
    return Verdict(check="x", subject=subject, outcome=outcome, metric=metric, detail=detail, meaning=why)


def test_chapters_are_the_phases_in_order() -> None:
    names = [(chapter.title, [view.name for view in chapter.checks]) for chapter in chapters(samples.accepted())]
    assert names == [
        ("Environment", ["gpu.inventory", "host.inventory"]),
        ("Interconnect", ["collectives.all_reduce"]),
        ("Single-GPU training", ["train.cnn"]),
        ("Distributed training", ["train.ddp"]),
    ]


def test_a_check_that_the_catalog_does_not_know_stands_under_other() -> None:
    trial = samples.accepted().model_copy(update={"verdicts": (verdict("n", Outcome.FAIL),)})
    assert [view.name for chapter in chapters(trial) if chapter.title == "Other" for view in chapter.checks] == ["x"]


def test_a_planned_check_without_a_verdict_does_not_vanish() -> None:
    trial = samples.accepted().model_copy(update={"verdicts": (), "measurements": ()})
    views = [view for chapter in chapters(trial) for view in chapter.checks]
    assert len(views) == 5
    assert {view.outcome for view in views} == {Outcome.UNJUDGED}


def test_rows_put_trouble_first_then_the_judged_then_families() -> None:
    verdicts = (verdict("n", Outcome.PASS, "judged"), verdict("n", Outcome.WARN, "late"))
    metrics = [("busbw.1", 1.0), ("latency.1", 1.0), ("busbw.2", 2.0), ("judged", 1.0), ("late", 9.0)]
    view = check(*((name, value, "s", "n") for name, value in metrics), verdicts=verdicts)
    assert [row.name for row in view.rows] == ["late", "judged", "busbw.1", "busbw.2", "latency.1"]


def test_rows_of_a_family_go_up_by_size_however_they_were_measured() -> None:
    names = ("busbw.1GiB", "busbw.64MiB", "busbw.1000004B", "gemm.tf32", "gemm.bf16")
    view = check(*((name, 1.0, "x", "n") for name in names))
    assert [row.name for row in view.rows] == ["busbw.1000004B", "busbw.64MiB", "busbw.1GiB", "gemm.tf32", "gemm.bf16"]
    assert view.key_figure.startswith("busbw.1GiB ")


def test_a_row_holds_all_subjects_worst_first_and_their_median() -> None:
    verdicts = (verdict("n/gpu10", Outcome.FAIL, "t"), verdict("n/gpu2", Outcome.PASS, "t"))
    view = check(
        ("t", 40.0, "°C", "n/gpu2"), ("t", 90.0, "°C", "n/gpu10"), ("t", 41.0, "°C", "n/gpu3"), verdicts=verdicts
    )
    row = view.rows[0]
    assert [reading.subject for reading in row.readings] == ["n/gpu10", "n/gpu2", "n/gpu3"]
    assert (row.value, row.range, row.subject_text) == ("41 °C", "40–90", "median of 3")
    assert row.outcomes == [(Outcome.FAIL, 1), (Outcome.PASS, 1)]


def test_equal_values_have_no_range() -> None:
    row = check(("w", 16, "lanes", "n/gpu0"), ("w", 16, "lanes", "n/gpu1")).rows[0]
    assert (row.value, row.range, row.subject_text) == ("16 lanes", "", "2 subjects")


def test_one_subject_shows_the_range_of_its_samples() -> None:
    metric = Metric(name="b", value=2.0, unit="GB/s", subject="cluster", samples=(1.0, 2.0, 4.0))
    view = CheckView("x", "X", "Other", (), (Measurement(check="x", subject="n", metrics=(metric,)),))
    assert (view.rows[0].range, view.rows[0].subject_text) == ("1–4", "cluster")


def test_a_metric_that_a_rule_missed_stands_there_with_the_reason() -> None:
    row = check(verdicts=(verdict("n", Outcome.ERROR, "absent", "absent was not measured"),)).rows[0]
    assert (row.value, row.remark) == ("not measured", "absent was not measured")


def test_many_different_reasons_do_not_fill_the_table() -> None:
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
        ([("wrong", 0, "count"), ("speed", 5, "s")], [("wrong", Outcome.PASS)], "speed 5 s (no threshold)"),
        ([("speed", 5, "s")], [("speed", Outcome.SKIP)], "speed 5 s (no threshold)"),
        ([], [], ""),
    ],
)
def test_the_key_figure_is_what_a_reader_looks_for(
    metrics: list[tuple[str, float, str]], verdicts: list[tuple[str, Outcome]], expected: str
) -> None:
    given = tuple(verdict("n", outcome, name) for name, outcome in verdicts)
    assert check(*((*metric, "n") for metric in metrics), verdicts=given).key_figure == expected


def test_how_fast_it_is_comes_before_what_else_was_judged() -> None:
    passed = (verdict("n", Outcome.PASS, "loss_drop"),)
    view = check(("loss_drop", 5, "nats", "n"), ("speed", 9, "GB/s", "n"), verdicts=passed)
    assert view.key_figure == "loss_drop 5 nats"
    assert replace(view, performance_metrics=("spe*",)).key_figure == "speed 9 GB/s (no threshold)"


def test_how_it_was_measured_is_told_once_unless_processes_differ() -> None:
    told = [{"method": "so"}, {"method": "so"}, {}, {"method": "otherwise"}]
    measurements = tuple(Measurement(check="x", subject="n", facts=facts) for facts in told)
    assert CheckView("x", "X", "Other", (), measurements).methods == ["so", "otherwise"]


def test_troubles_are_grouped_worst_first() -> None:
    groups = problems(samples.fleet())
    said = [(group.first.outcome, group.first.check, len(group.verdicts)) for group in groups]
    assert said == [
        (Outcome.FAIL, "gpu.inventory", 2),
        (Outcome.ERROR, "train.ddp", 1),
        (Outcome.WARN, "host.inventory", 24),
        (Outcome.WARN, "collectives.all_reduce", 1),
    ]


def test_one_cause_that_stopped_many_checks_is_told_once() -> None:
    refused = [
        Verdict(check=name, subject="cluster", outcome=Outcome.ERROR, detail="sbatch: invalid account")
        for name in ("a.one", "b.two", "c.three")
    ]
    other = Verdict(check="d.four", subject="cluster", outcome=Outcome.ERROR, detail="exit code 1")
    failed = [replace(one, outcome=Outcome.FAIL) for one in refused[:2]]
    trial = samples.accepted().model_copy(update={"verdicts": (*refused, other, *failed)})
    told = [(group.first.outcome, group.title, group.check_names) for group in problems(trial)]
    assert told == [
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
    assert screen.getvalue().count("sbatch: invalid account") == 3, "as an ERROR once, and of two failures"


def test_what_all_of_a_group_say_is_told_once() -> None:
    (group,) = grouped(
        [verdict("n1", Outcome.FAIL, "m", "m is 1", "bad"), verdict("n2", Outcome.FAIL, "m", "m is 2", "bad")]
    )
    assert (group.meaning, [group.verdict_text(one) for one in group.verdicts]) == ("bad", ["m is 1", "m is 2"])


def test_reasons_that_differ_are_told_whole() -> None:
    (group,) = grouped([verdict("n1", Outcome.FAIL, "", "a", "b"), verdict("n2", Outcome.FAIL, "", "a", "c")])
    assert (group.meaning, [group.verdict_text(one) for one in group.verdicts]) == ("", ["a: b", "a: c"])


def test_tally_leaves_out_what_never_was() -> None:
    verdicts = [verdict("n", Outcome.PASS), verdict("n", Outcome.FAIL), verdict("n", Outcome.PASS)]
    assert outcome_counts(verdicts) == [(Outcome.FAIL, 1), (Outcome.PASS, 2)]


def test_size_and_launcher() -> None:
    trial = samples.rejected()
    assert (machine_size(trial), launchers(trial)) == ("2 nodes × 4 GPUs", "local")
    nothing = trial.model_copy(update={"jobs": (), "results": ()})
    assert (machine_size(nothing), launchers(nothing)) == ("no job planned", "auto")


def test_what_processes_tell_alike_but_for_numbers_is_told_once() -> None:
    told = ["9.9 s, 192 windows", "9.9 s, 192 windows", "10.0 s, 195 windows", "not on gloo"]
    view = check()
    measured = tuple(Measurement(check="x", subject=f"n/gpu{at}", facts={"method": how}) for at, how in enumerate(told))
    assert replace(view, measurements=measured).methods == [
        "9.9 s, 192 windows (1 other process: same method, other numbers)",
        "not on gloo",
    ]
    assert replace(view, measurements=measured[:2]).methods == ["9.9 s, 192 windows"]


@pytest.mark.parametrize("cpu_only", [True, False])
def test_every_report_marks_a_cpu_only_decision(cpu_only: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Who sees ACCEPTED on a dashboard, in a ticket or in CI must not take it for that of GPUs."""
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
