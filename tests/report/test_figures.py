"""The figures of a trial: value, limit, expected value, worst part."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.model import Basis, BasisKind, Outcome, Verdict
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import figures as module
from seatrial.report.figures import Figure, figures, headline, outcome_rank
from tests.report import samples

SKU = Basis(BasisKind.SKU, "X", 200.0, "GB/s", source="page", fail_below=0.9, warn_below=0.95)
RATE = Verdict("device.memory", "n/gpu0", Outcome.PASS, "copy", value=190.0, unit="GB/s", basis=SKU, ratio=0.95)


def only(*verdicts: Verdict) -> Figure:
    (figure,) = figures(verdicts)
    return figure


def test_share_of_a_reference_value() -> None:
    figure = only(RATE)
    assert (figure.measured, figure.expected, figure.op, figure.limit) == (190, 200, ">=", 180)
    assert figure.share == 0.95
    assert figure.margin == pytest.approx(190 / 180)
    assert (figure.source, figure.n) == ("SKU X", 1)


def test_a_warning_is_compared_with_the_limit_that_it_violates() -> None:
    figure = only(replace(RATE, outcome=Outcome.WARN, value=185.0))
    assert figure.limit == 190
    assert figure.margin is not None
    assert figure.margin < 1


def test_a_bad_row_has_the_worst_value_and_its_part_not_a_median() -> None:
    bad = replace(RATE, subject="n/gpu7", outcome=Outcome.FAIL, value=90.0)
    worse = replace(bad, subject="n/gpu3", value=60.0)
    figure = only(RATE, bad, worse, replace(RATE, subject="n/gpu1", value=1.0))  # PASS, although lower
    assert (figure.measured, figure.worst_part, figure.outcome, figure.n) == (60, "n/gpu3", Outcome.FAIL, 4)


@pytest.mark.parametrize(
    ("op", "limit", "value", "margin"),
    [
        (">=", 10.0, 5.0, 0.5),
        ("<=", 10.0, 5.0, 2.0),
        ("<", 10.0, 20.0, 0.5),
        ("==", 0.0, 3.0, None),
        ("<=", 0.0, 3.0, None),
    ],
)
def test_margin_is_above_one_if_the_limit_is_met(op: str, limit: float, value: float, margin: float | None) -> None:
    figure = only(
        replace(RATE, basis=Basis(BasisKind.RULE, expected=limit, unit="GB/s", op=op), value=value, ratio=None)
    )
    assert (figure.margin, figure.expected) == (margin, None)


def test_a_threshold_of_the_trial_has_the_reference_value_as_expected_value() -> None:
    figure = only(replace(RATE, basis=Basis(BasisKind.TRIAL, "mine", 150.0, "GB/s", ">"), value=100.0, ratio=0.5))
    assert (figure.expected, figure.limit, figure.op) == (200, 150, ">")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_value_that_cannot_be_has_no_share_and_no_margin(value: float) -> None:
    figure = only(replace(RATE, value=value))
    assert (figure.share, figure.margin) == (None, None)
    assert figure.measured_text


def test_the_same_error_of_several_checks_is_one_figure() -> None:
    errors = [Verdict(name, "cluster", Outcome.ERROR, detail="no account") for name in ("a.one", "b.two")]
    other = Verdict("c.three", "cluster", Outcome.ERROR, detail="exit code 1")
    assert [figure.checks for figure in figures([*errors, other])] == [("a.one", "b.two"), ("c.three",)]


def test_headline_of_a_real_run_has_one_speed_of_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "catalog", catalog)
    trial = load_trial(record_path("2026-11-23-2xh200/busy-gpu"))
    rows = headline(trial)
    assert [row.outcome for row in rows] == sorted((row.outcome for row in rows), key=outcome_rank)
    assert len({row.checks for row in rows}) == len(rows)
    gemm = next(row for row in rows if row.checks == ("device.gemm",))
    assert (gemm.metric, gemm.worst_part, gemm.outcome) == ("tflops.bf16", "vm/gpu1", Outcome.FAIL)
    assert gemm.margin is not None
    assert gemm.margin < 1
    assert all(row.margin is not None and row.margin < module.LAX_MARGIN for row in rows)


def test_a_trial_without_measurements_has_no_figures() -> None:
    assert headline(samples.accepted().model_copy(update={"verdicts": (), "measurements": ()})) == []
