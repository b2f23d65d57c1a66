"""The page for a contract: each value with a limit, the limit, and the interval of the measured value (Markdown)."""

from __future__ import annotations

from seatrial.model import Metric, Trial
from seatrial.report import markdown
from seatrial.report.document import Document, Section
from seatrial.report.figures import NOT_PASSED, Figure, figures, outcome_rank
from seatrial.report.formatting import format_range
from seatrial.report.tables import Table
from seatrial.report.view import decision_title, machine_size
from seatrial.util.quantiles import median_interval

COLUMNS = ("row", "outcome", "measured", "limit", "interval", "part", "n", "source of the limit")


def render(trial: Trial) -> str:
    """The decision, and a row for each metric with a numerical limit or without PASS; worst outcome first.

    ``measured``: the worst of ``n`` values. ``interval``: see _interval.
    """
    metrics = {
        (measurement.check, metric.name, metric.subject): metric
        for measurement in (*trial.measurements, *trial.retries)  # a retry replaces the first value
        for metric in measurement.metrics
    }
    rows = []
    for figure in sorted(figures(trial.verdicts), key=lambda figure: outcome_rank(figure.outcome)):
        if figure.margin is not None or figure.outcome in NOT_PASSED:
            interval = _interval(figure, metrics.get((figure.checks[0], figure.metric, figure.worst_part)))
            cells = figure.name, str(figure.outcome), figure.measured_text, figure.limit_text, interval
            rows.append((*cells, figure.worst_part, str(figure.n), figure.source))
    lines = [
        trial.decision.reason,
        f"tested: {machine_size(trial)}, {trial.decision.tested_hardware}; seatrial {trial.seatrial}",
        "measured: the worst value of n; interval: 95 % confidence interval of the median of its samples, or their "
        "range if they are few; none for a single sample",
    ]
    section = Section(trial.name, lines, Table("", rows, COLUMNS))
    return markdown.render_document(Document("Contract", decision_title(trial), trial.decision.value, [section]))


def _interval(row: Figure, metric: Metric | None) -> str:
    """The 95 % confidence interval of the median of the worst part's samples, or with few samples their range."""
    if metric is None or len(metric.samples) < 2 or metric.value != row.measured:
        return ""
    return format_range(median_interval(metric.samples) or metric.samples, metric.unit)
