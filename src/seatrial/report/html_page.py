"""The report as one HTML file: no script, no resource from outside, charts as inline SVG.

The template holds the page and escapes all text; this module hands it what to show.
"""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from seatrial.model import WORST_FIRST, DecisionValue, JobState, Outcome, Trial
from seatrial.report import charts, dashboards, sections
from seatrial.report.text import plural, prose, sanitized, utc
from seatrial.report.view import chapters, headline, launchers, outcome_counts, problems, recorded_only, size

# The sign beside each word, so that nothing hangs on colour alone.
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
}
MEANINGS: dict[str, str] = {
    Outcome.PASS: "measured and within what its rule asks for",
    Outcome.WARN: "works, and is worse or less wise than it should be; it does not stand in the way of acceptance",
    Outcome.FAIL: "measured and not good enough: the trial is rejected",
    Outcome.ERROR: "could not be measured: the trial cannot be accepted",
    Outcome.UNJUDGED: "measured, and nothing is known to judge it by: the trial cannot be accepted",
    Outcome.SKIP: "does not apply here, for the reason given",
}


def render(trial: Trial) -> str:
    """The whole report. It may be mailed or archived as it is; only links to artifacts need the run directory."""
    trial = sanitized(trial)
    template = _environment().get_template("template.html.j2")
    return template.render(
        trial=trial,
        headline=headline(trial),
        metrics_without_threshold=recorded_only(trial.decision),
        launcher=launchers(trial),
        size=size(trial),
        counts=dict(outcome_counts(trial.verdicts)),
        time=sections.time_bar(trial),
        problems=problems(trial),
        fleet=sections.node_grid(trial),
        chapters=chapters(trial),
        settings=list(sections.settings(trial.config, trial.origins)),
    )


@cache
def _environment() -> Environment:
    """Kept, and the compiled template with it: to compile it takes longer than to fill it in."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        prose=prose, plural=plural, utc=_utc, href=href, pretty=sections.pretty, command=shlex.join
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
    """A relative link into the run directory, or nothing for a path that leads out of it."""
    if path.startswith("/") or ".." in Path(path).parts:
        return ""
    return "./" + quote(path)  # a leading "./" keeps "javascript:" and "//host" from being anything but a file name


def _utc(seconds: float) -> str:
    return utc(seconds, "%Y-%m-%d %H:%M:%S UTC") or "at an unknown time"
