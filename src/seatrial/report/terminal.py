"""The summary on the terminal: bad parts, headline figures and the decision; in full also all problems and checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from seatrial.judge.insights import RARE_FAULTS
from seatrial.model import BasisKind, DecisionValue, Outcome, Trial
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.report.figures import Figure, headline
from seatrial.report.identity import variable_lines
from seatrial.report.not_seen import not_seen
from seatrial.report.parts import (
    Problem,
    cause_text,
    failing_text,
    filled,
    parts,
    problems,
    run_values,
    with_real_values,
)
from seatrial.report.tables import STYLES, Table, print_tables
from seatrial.report.text import clean, single_line
from seatrial.report.view import check_views, coverage, launchers, lax_thresholds, machine_size, outcome_counts
from seatrial.report.why_not import next_step
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more, plural

CPU_ONLY_STYLE = "bold blue"  # not the green of a decision on GPUs
# Limits of the short summary, which has at most 25 lines for one bad GPU
MAX_PARTS = 4
MAX_FIGURES = 6
MAX_NAMED = 4
MAX_VARIABLES = 2
NARROW = 110  # columns; a narrower terminal has no expected values
MAX_LINES = 8  # lines of evidence of a figure in the full summary


def summary(trial: Trial, console: Console, run_dir: Path | None = None, *, verbose: bool = False) -> None:
    """Print the summary of a finished trial. Text of logs and tools is not interpreted as markup."""
    trial = with_real_values(trial, run_dir)
    bad_parts = parts(trial)
    found = problems(bad_parts)
    run_text = f"{machine_size(trial)} · {launchers(trial) or 'no launcher'} · {trial.seconds:.1f} s"
    console.print(Text.assemble((single_line(f"seatrial {trial.name}"), "bold"), f" · {single_line(run_text)}"))
    if verbose:
        _all_checks(trial, console)
        for problem in found:
            _full_problem(problem, console)
    else:
        _short_problems(found, console)
    _figures(headline(trial), console, verbose=verbose)
    measured = not all(each.skipped for each in trial.measurements)
    for title, checks in coverage(trial).items():
        # if nothing was measured, the decision says so
        if title.startswith("Excluded") or (title.startswith("Not measured") and measured):
            names = ", ".join(checks) if verbose else and_more(checks, MAX_NAMED)
            console.print(Text(single_line(f"{title}: {plural(len(checks), 'check')} ({names})"), "yellow"))
    if unseen := not_seen(trial):
        console.print(Text(f"Not seen: {single_line(unseen)}", "dim"))
    lines = variable_lines(trial)
    for line in lines if verbose else lines[:MAX_VARIABLES]:
        console.print(Text(f"Environment variable {single_line(line)}", "dim"))
    if not verbose and len(lines) > MAX_VARIABLES:
        console.print(Text(f"and {plural(len(lines) - MAX_VARIABLES, 'more environment variable')}", "dim"))
    for check, text in lax_thresholds(trial.verdicts):
        console.print(Text.assemble((LAX_THRESHOLD, "yellow"), "  ", single_line(f"{check} {text}")))
    console.print()
    console.print(_decision(trial, failing_text(bad_parts), cause_text(bad_parts)))
    if do := filled(next_step(trial, found), run_values(run_dir)):
        # not wrapped, so that it can be copied
        console.print(Text.assemble(("Do first: ", "bold"), single_line(do)), soft_wrap=True)


def _short_problems(found: Sequence[Problem], console: Console) -> None:
    """Print the parts that fail, two lines each; without any, the warnings."""
    bad = [problem for problem in found if problem.first.outcome not in (None, Outcome.WARN)] or found
    if bad:
        console.print()
    for problem in bad[:MAX_PARTS]:
        console.print(_title(problem))
        console.print(Text(f"      {single_line(problem.text)}"), overflow="ellipsis", no_wrap=True)
    if len(found) > len(bad[:MAX_PARTS]):
        rest = plural(len(found) - len(bad[:MAX_PARTS]), "more problem")
        console.print(Text(f"and {rest} (-v prints all)", "dim"))


def _title(problem: Problem) -> Text:
    outcome, identity = problem.first.outcome, single_line(problem.identity(MAX_NAMED))
    style = STYLES[outcome] if outcome else "bold"
    return Text.assemble((outcome or "FINDING", style), "  ", (single_line(problem.title), "bold"), f"  {identity}")


def _full_problem(problem: Problem, console: Console) -> None:
    """Print a problem with its causes, all its parts and figures, evidence and fixes."""
    console.print()
    console.print(_title(problem))
    grid = Grid.grid()
    grid.add_column(width=13, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in problem.details(len(problem.parts), MAX_LINES):
        if text.strip():
            grid.add_row(Text(f"   {label}", "dim"), Text(clean(text.strip())))
    console.print(grid)


def _figures(rows: Sequence[Figure], console: Console, *, verbose: bool) -> None:
    """Print the headline figures as a table: outcome, name, worst value, share of the expected value, limit, part."""
    if not rows:
        return
    shown = rows if verbose else rows[:MAX_FIGURES]
    has_expected = console.width >= NARROW
    cells = [
        [
            *(str(row.outcome), row.name, row.measured_text, row.share_text, row.limit_text),
            *([row.expected_text] if has_expected else []),
            row.worst_part,
        ]
        for row in shown
    ]
    header = ["", "figure", "worst value", "share", "limit", *(["expected"] if has_expected else []), "part"]
    console.print()
    print_tables([Table("", cells, header)], console)
    if len(rows) > len(shown):
        console.print(Text(f"and {plural(len(rows) - len(shown), 'more figure')} of other checks", "dim"))


def _all_checks(trial: Trial, console: Console) -> None:
    """Print each check with its outcome and key figure, and the number of verdicts."""
    views = check_views(trial)
    console.print()
    by_phase = grouped((view.phase, (view.name, str(view.outcome), view.overview_text)) for view in views)
    print_tables([Table(phase, rows) for phase, rows in by_phase.items()], console)
    counts = [f"{count:,} {outcome}" for outcome, count in outcome_counts(trial.verdicts)]
    line = f"verdicts: {' · '.join(counts)}" if counts else "no verdict"
    if trial.baseline:
        bases = (verdict.basis for verdict in trial.verdicts)
        count = sum(basis is not None and basis.kind is BasisKind.SITE for basis in bases)
        line += f"; {count:,} judged by the site's baseline {trial.baseline.name}"
    console.print(Text(f"\n{single_line(line)}"))


def _decision(trial: Trial, failing: str, causes: str) -> Grid:
    """The decision, its reason, the causes and the tested hardware."""
    decision = trial.decision
    text = Text(single_line(f"{failing}: {decision.reason}" if failing else decision.reason))
    if causes:
        text.append(f"\nCause: {single_line(causes)}")
    if decision.tested_hardware:
        text.append(f"\nTested: {single_line(decision.tested_hardware)}", "dim")
    for insight in trial.insights:
        if insight.title == RARE_FAULTS:
            text.append(f"\n{RARE_FAULTS}: {single_line(insight.text)}", "dim")
    value = Text(decision.value, STYLES[decision.value])
    if decision.cpu_only:
        if decision.value is DecisionValue.ACCEPTED:
            value.stylize(CPU_ONLY_STYLE)
        value.append(" (CPU ONLY)", CPU_ONLY_STYLE)
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(value, text)
    return grid
