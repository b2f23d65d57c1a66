"""The report as one HTML file without scripts and external resources; charts are inline SVG.

The template escapes all text; this module provides its data.
"""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from seatrial.model import WORST_FIRST, DecisionValue, JobState, Outcome, Trial
from seatrial.report import charts, dashboards, sections, topology
from seatrial.report.causes import cause_text, causes
from seatrial.report.scaling import scaling_table
from seatrial.report.text import sanitized, split_code, utc
from seatrial.report.variables import variable_lines
from seatrial.report.view import (
    chapters,
    decision_style,
    headline,
    launchers,
    machine_size,
    metrics_without_threshold,
    outcome_counts,
    problems,
)
from seatrial.util.text import plural

# The symbol next to each outcome, decision and job state, so that colour is not the only difference
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
    JobState.COMPLETED: "✓",
    JobState.FAILED: "✗",
    JobState.HUNG: "⊘",
    JobState.TIMEOUT: "⊘",
    JobState.CANCELLED: "–",
    JobState.REFUSED: "⊘",
    JobState.REJECTED: "⊘",
}
MEANINGS: dict[str, str] = {
    Outcome.PASS: "measured; meets the threshold",
    Outcome.WARN: "measured; usable, but needs attention. The trial can be accepted",
    Outcome.FAIL: "measured; violates the threshold: the trial is rejected",
    Outcome.ERROR: "could not be measured: the trial cannot be accepted, if the check is required",
    Outcome.UNJUDGED: "no reference value, or inconclusive: the trial cannot be accepted, if the check is required",
    Outcome.SKIP: "not applicable; the reason is shown",
}


def render(trial: Trial) -> str:
    """The trial as one HTML page. Only its links to artifacts and telemetry need the run directory."""
    trial = sanitized(trial)
    template = _environment().get_template("template.html.j2")
    return template.render(
        trial=trial,
        headline=headline(trial),
        decision_style=decision_style(trial.decision),
        metrics_without_threshold=metrics_without_threshold(trial.decision),
        launcher=launchers(trial),
        machine_size=machine_size(trial),
        counts=dict(outcome_counts(trial.verdicts)),
        time=sections.time_bar(trial),
        causes=causes(trial),
        cause_text=cause_text(trial),
        findings=[finding for finding in trial.findings if not finding.explains],
        problems=problems(trial),
        node_map=sections.node_map(trial),
        node_groups=topology.node_groups(trial),
        slow_paths=topology.slow_paths(trial),
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
    )
    environment.filters.update(
        split_code=split_code, plural=plural, utc=_utc, href=href, pretty=sections.pretty, command=shlex.join
    )
    environment.globals.update(
        SYMBOLS=SYMBOLS,
        MEANINGS=MEANINGS,
        WORST_FIRST=WORST_FIRST,
        sections=sections,
        charts=charts,
        dashboards=dashboards,
    )
    return environment


def href(path: str) -> str:
    """A relative link into the run directory; empty for a path outside it."""
    if path.startswith("/") or ".." in Path(path).parts:
        return ""
    return "./" + quote(path)  # with "./" first, "javascript:" and "//host" are file names


def _utc(seconds: float) -> str:
    return utc(seconds, "%Y-%m-%d %H:%M:%S UTC") or "unknown time"
