"""The CSV table of all judged values."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from seatrial.model import Outcome
from seatrial.report.csv_table import COLUMNS, render
from seatrial.report.figures import outcome_rank
from tests.report import samples


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_every_value_with_a_numerical_limit_and_every_bad_one_has_a_row_worst_first(sample: str) -> None:
    trial = samples.SAMPLES[sample]()
    rows = list(csv.DictReader(io.StringIO(render(trial))))
    bad = [verdict.outcome for verdict in trial.verdicts if verdict.outcome not in (Outcome.PASS, Outcome.SKIP)]
    assert [row["outcome"] for row in rows[: len(bad)]] == sorted(bad, key=outcome_rank)
    assert all(row["outcome"] == "PASS" and row["limit"] for row in rows[len(bad) :])
    assert all(set(row) == set(COLUMNS) for row in rows)
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "@", "\t"))]


@pytest.mark.parametrize("name", ["=cmd()", "+1", "-1", "@x", "\t=1"])
def test_a_formula_is_text(name: str) -> None:
    trial = samples.rejected()
    hostile = replace(trial.verdicts[0], subject=name, metric=name)
    (row,) = csv.DictReader(io.StringIO(render(trial.model_copy(update={"verdicts": (hostile,)}))))
    assert row["subject"].startswith("'") or not name.strip().startswith(("=", "+", "-", "@"))
