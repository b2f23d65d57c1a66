"""The report as one HTML file without scripts and external resources; charts are inline SVG.

The template escapes all text; this module provides its data.
"""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from seatrial import __version__
from seatrial.judge.insights import RARE_FAULTS
from seatrial.model import DecisionValue, Outcome, Trial
from seatrial.report import charts
from seatrial.report.appendix import appendix, telemetry_notes
from seatrial.report.document import Document
from seatrial.report.figures import NOT_PASSED, Figure, headline
from seatrial.report.identity import gpus_of, serial_digest, variable_lines, versions
from seatrial.report.node_map import node_groups
from seatrial.report.not_seen import not_seen, unseen_slowdowns
from seatrial.report.parts import cause_text, failing_text, parts, problems
from seatrial.report.tables import shared_facts
from seatrial.report.text import clean, split_code, utc
from seatrial.report.view import (
    METHOD,
    CheckView,
    check_views,
    coverage,
    decision_style,
    decision_title,
    launchers,
    machine_size,
    metrics_without_threshold,
)
from seatrial.report.why_not import next_step
from seatrial.util.text import and_more, plural

# The symbol next to each outcome and decision, so that colour is not the only difference
SYMBOLS: dict[str, str] = {
    Outcome.PASS: "✓",
    Outcome.WARN: "!",
    Outcome.FAIL: "✗",
    Outcome.SKIP: "–",
    Outcome.UNJUDGED: "?",
    Outcome.ERROR: "⊘",
    DecisionValue.ACCEPTED: "✓",
    DecisionValue.REJECTED: "✗",
    DecisionValue.INCOMPLETE: "!",
}
LIMITS = {
    "parts": 8,  # parts on the first screen
    "figures": 9,  # figures on the first screen
    "problems": 40,  # problems with details; of more, the page has only the names
    "values": 10,  # subjects of a figure, worst first; figures.csv has all
    "rows": 200,  # figures in a table
    "artifacts": 20,
    "reasons": 8,
}


def render(trial: Trial, record_sha256: str = "") -> str:
    """The trial as one HTML page. Only its links to artifacts and telemetry need the run directory.

    ``record_sha256``: of trial.json, if it is known.
    """
    template = _environment().get_template("template.html.j2")
    gpus, bad_parts = gpus_of(trial), parts(trial)
    found = problems(bad_parts)
    return template.render(
        trial=trial,
        decision=trial.decision,
        title=decision_title(trial),
        failing=failing_text(bad_parts),
        causes=cause_text(bad_parts),
        decision_style=decision_style(trial.decision),
        problems=found,
        do=next_step(trial, found),
        headline=headline(trial),
        coverage=coverage(trial),
        versions=versions(trial),
        gpus=gpus,
        serial_digest=serial_digest(gpus),
        record_sha256=record_sha256,
        metrics_without_threshold=metrics_without_threshold(trial.decision),
        not_seen=not_seen(trial),
        unseen_slowdowns=unseen_slowdowns(trial),
        launcher=launchers(trial),
        machine_size=machine_size(trial),
        node_groups=node_groups(trial),
        checks=check_views(trial),
        variables=variable_lines(trial),
        dashboards=trial.telemetry.dashboards if trial.telemetry else (),
        appendix=appendix(trial, gpus),
        telemetry_notes=list(telemetry_notes(trial.telemetry)) if trial.telemetry else [],
    )


def render_document(document: Document) -> str:
    """A comparison or another document as one HTML page, in the style of the report."""
    titles = [(f"section-{number}", section.title) for number, section in enumerate(document.sections)]
    template = _environment().get_template("document.html.j2")
    return template.render(document=document, titles=titles, version=__version__)


def _charts(check: CheckView) -> list[charts.Chart]:
    """The charts of a check; subjects that did not pass are highlighted, and limits are marked at their sizes."""
    not_passed = frozenset(verdict.subject for verdict in check.verdicts if verdict.outcome in NOT_PASSED)
    all_series = [series for measurement in check.measurements for series in measurement.series]
    return charts.charts(all_series, not_passed, check.figures)


def _distribution(figure: Figure) -> charts.Distribution | None:
    """The distribution of a figure with its limit; None for booleans, and for values that are equal."""
    if len(set(figure.values)) < 2 or figure.unit == "bool":
        return None
    return charts.distribution(figure.values, figure.limit, figure.expected, figure.op)


@cache
def _environment() -> Environment:
    """The Jinja environment, cached: compiling the template takes longer than rendering it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters.update(
        and_more=lambda names, count: and_more(list(names), count),
        split_code=split_code,
        plural=plural,
        utc=utc,
        href=href,
        command=shlex.join,
        charts=_charts,
        distribution=_distribution,
        facts=lambda check: shared_facts(check.measurements, METHOD),
        telemetry_charts=charts.telemetry_charts,
    )
    environment.globals.update(SYMBOLS=SYMBOLS, BAD=NOT_PASSED, LIMITS=LIMITS, RARE_FAULTS=RARE_FAULTS, plot=charts)
    return environment


def _finalize(value: Any) -> Any:
    """Text of the record without terminal sequences and unprintable characters, before it is escaped."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def href(path: str) -> str:
    """A relative link into the run directory; empty for a path outside it."""
    if path.startswith("/") or ".." in Path(path).parts:
        return ""
    return "./" + quote(path, errors="replace")  # with "./" first, "javascript:" and "//host" are file names
