"""All judged values as one CSV table: what the page of a large cluster leaves out."""

from __future__ import annotations

import csv
import io

from seatrial.model import Outcome, Trial
from seatrial.report.figures import figures, outcome_rank
from seatrial.report.text import clean, single_line

COLUMNS = ("outcome", "check", "metric", "subject", "value", "unit", "limit", "expected")
# A spreadsheet would take a text that starts with one of these characters for a formula
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render(trial: Trial) -> str:
    """One row for each verdict that has a value, is bad or could not be measured; worst outcome first.

    A value of a rule without a number, such as "== 0 errors", has a row only if it did not pass.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for verdict in sorted(trial.verdicts, key=lambda verdict: outcome_rank(verdict.outcome)):
        (row,) = figures((verdict,))
        if verdict.outcome is Outcome.SKIP or (verdict.outcome is Outcome.PASS and row.margin is None):
            continue
        names = map(_cell, (verdict.outcome, verdict.check, verdict.metric, verdict.subject))
        value = "" if row.measured is None else f"{row.measured:.6g}"
        limit = "" if row.limit is None else f"{row.op} {row.limit:.6g}"
        expected = "" if row.expected is None else f"{row.expected:.6g}"
        writer.writerow([*names, value, _cell(row.unit), limit, expected])
    return file.getvalue()


def _cell(text: str) -> str:
    text = single_line(clean(text))
    return f"'{text}" if text.startswith(_FORMULA) else text
