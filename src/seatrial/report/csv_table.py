"""All judged values as one CSV table: what the page of a large cluster leaves out."""

from __future__ import annotations

import csv
import io

from seatrial.model import Outcome, Trial
from seatrial.report.figures import figures, outcome_rank
from seatrial.report.identity import Gpu, gpus_of
from seatrial.report.text import single_line

COLUMNS = ("outcome", "check", "metric", "subject", "value", "unit", "limit", "expected", "serial")
# A spreadsheet would take a text that starts with one of these characters for a formula
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render(trial: Trial) -> str:
    """One row for each verdict that has a value, is bad or could not be measured; worst outcome first.

    A value of a rule without a number, such as "== 0 errors", has a row only if it did not pass. Rows that passed have
    no serial number: the page lists those of all GPUs.
    """
    gpus, file = gpus_of(trial), io.StringIO()
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
        serial = gpus.get(verdict.subject, Gpu()).serial if verdict.outcome is not Outcome.PASS else ""
        writer.writerow([*names, value, _cell(row.unit), _cell(limit), expected, _cell(serial)])
    return file.getvalue()


def _cell(text: str) -> str:
    text = single_line(text)
    return f"'{text}" if text.startswith(_FORMULA) else text
