"""All judged values as one CSV table: what the page of a large cluster leaves out."""

from __future__ import annotations

import csv
import io

from seatrial.model import Outcome, Trial
from seatrial.report.figures import figures
from seatrial.report.identity import Gpu, gpus_of
from seatrial.report.text import clean, single_line

COLUMNS = (
    *("outcome", "check", "metric", "subject", "value", "unit", "expected", "share", "op", "limit", "source"),
    *("serial", "uuid", "slot", "message"),
)
# A spreadsheet would take a text that starts with one of these characters for a formula
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render(trial: Trial) -> str:
    """One row for each verdict that has a value, is bad or could not be measured."""
    gpus, file = gpus_of(trial), io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for verdict in trial.verdicts:
        if verdict.outcome is Outcome.SKIP:
            continue
        (row,) = figures((verdict,))
        gpu = gpus.get(verdict.subject, Gpu())
        value, expected, share, limit = map(_number, (row.measured, row.expected, row.share, row.limit))
        names = map(_cell, (verdict.outcome, verdict.check, verdict.metric, verdict.subject))
        message = "" if row.limit is not None else verdict.message
        rest = map(_cell, (row.source, gpu.serial, gpu.uuid, gpu.slot, message))
        writer.writerow([*names, value, _cell(row.unit), expected, share, _cell(row.op), limit, *rest])
    return file.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _cell(text: str) -> str:
    text = single_line(clean(text))
    return f"'{text}" if text.startswith(_FORMULA) else text
