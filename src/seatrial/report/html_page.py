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

from seatrial.model import WORST_FIRST, DecisionValue, JobState, Outcome, Trial
from seatrial.report import charts, dashboards, sections
from seatrial.report.figures import headline
from seatrial.report.identity import gpus_of, serial_digest, versions
from seatrial.report.parts import cause_text, failing_text, parts, problems
from seatrial.report.scaling import scaling_table
from seatrial.report.text import clean, split_code, utc
from seatrial.report.variables import variable_lines
from seatrial.report.view import (
    MAX_SUBJECTS,
    chapters,
    coverage,
    decision_style,
    decision_title,
    launchers,
    machine_size,
    metrics_without_threshold,
    outcome_counts,
)
from seatrial.report.why_not import next_step
from seatrial.util.text import and_more, plural

# The symbol next to each outcome, decision and job state, so that colour is not the only difference
SYMBOLS: dict[str, str] = {
    Outcome.PASS: "✓",
    Outcome.WARN: "!",
    Outcome.FAIL: "✗",
    Outcome.SKIP: "–",
    Outcome.UNJUDGED: "?",
    Outcome.ERROR: "⊘",
    JobState.COMPLETED: "✓",
    JobState.FAILED: "✗",
    JobState.HUNG: "⊘",
    JobState.TIMEOUT: "⊘",
    JobState.CANCELLED: "–",
    JobState.REFUSED: "⊘",
    JobState.REJECTED: "⊘",
    DecisionValue.ACCEPTED: "✓",
    DecisionValue.REJECTED: "✗",  # the name of a job state too
    DecisionValue.INCOMPLETE: "!",
}
MEANINGS: dict[str, str] = {
    Outcome.PASS: "measured; meets the threshold",
    Outcome.WARN: "measured; usable, but needs attention. The trial can be accepted",
    Outcome.FAIL: "measured; violates the threshold: the trial is rejected",
    Outcome.ERROR: "could not be measured: the trial cannot be accepted, if the check is required",
    Outcome.UNJUDGED: "no reference value, or inconclusive: the trial cannot be accepted, if the check is required",
    Outcome.SKIP: "not applicable; the reason is shown",
}
MAX_LISTED = 8  # parts and figures on the first screen
MAX_HEADLINE = 9
MAX_PROBLEMS = 40  # problems with details; of more, the page has only the names


def render(trial: Trial, record_sha256: str = "") -> str:
    """The trial as one HTML page. Only its links to artifacts and telemetry need the run directory.

    ``record_sha256``: of trial.json, if it is known.
    """
    template = _environment().get_template("template.html.j2")
    gpus, bad_parts = gpus_of(trial), parts(trial)
    found = problems(bad_parts)
    return template.render(
        trial=trial,
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
        launcher=launchers(trial),
        machine_size=machine_size(trial),
        counts=outcome_counts(trial.verdicts),
        time=sections.time_bar(trial),
        node_groups=sections.node_groups(trial),
        scaling=scaling_table(trial),
        chapters=chapters(trial),
        variables=variable_lines(trial),
        settings=list(sections.settings(trial.config, trial.origins)),
    )


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
        utc=_utc,
        href=href,
        pretty=sections.pretty,
        command=shlex.join,
    )
    environment.globals.update(
        SYMBOLS=SYMBOLS,
        MEANINGS=MEANINGS,
        WORST_FIRST=WORST_FIRST,
        MAX_HEADLINE=MAX_HEADLINE,
        MAX_LISTED=MAX_LISTED,
        MAX_PROBLEMS=MAX_PROBLEMS,
        MAX_SUBJECTS=MAX_SUBJECTS,
        sections=sections,
        charts=charts,
        dashboards=dashboards,
    )
    return environment


def _finalize(value: Any) -> Any:
    """Text of the record without terminal sequences and unprintable characters, before it is escaped."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def href(path: str) -> str:
    """A relative link into the run directory; empty for a path outside it."""
    if path.startswith("/") or ".." in Path(path).parts:
        return ""
    return "./" + quote(path, errors="replace")  # with "./" first, "javascript:" and "//host" are file names


def _utc(seconds: float) -> str:
    return utc(seconds, "%Y-%m-%d %H:%M:%S UTC") or "unknown time"
