"""The CSV table of all judged values."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from seatrial.model import Outcome
from seatrial.report.csv_table import COLUMNS, render
from tests.report import samples


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_every_verdict_except_skip_has_a_row(sample: str) -> None:
    trial = samples.SAMPLES[sample]()
    rows = list(csv.DictReader(io.StringIO(render(trial))))
    judged = [verdict for verdict in trial.verdicts if verdict.outcome is not Outcome.SKIP]
    assert [row["outcome"] for row in rows] == [verdict.outcome for verdict in judged]
    assert all(set(row) == set(COLUMNS) for row in rows)
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "@", "\t"))]


@pytest.mark.parametrize("name", ["=cmd()", "+1", "-1", "@x", "\t=1"])
def test_a_formula_is_text(name: str) -> None:
    trial = samples.rejected()
    hostile = replace(trial.verdicts[0], subject=name, metric=name)
    (row,) = csv.DictReader(io.StringIO(render(trial.model_copy(update={"verdicts": (hostile,)}))))
    assert row["subject"].startswith("'") or not name.strip().startswith(("=", "+", "-", "@"))
