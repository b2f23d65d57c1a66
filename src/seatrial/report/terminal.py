"""The summary on the terminal: bad parts, headline figures and the decision; in full also all problems and checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from seatrial.model import BasisKind, DecisionValue, Outcome, Trial
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.report.figures import Figure, headline
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
from seatrial.report.scaling import scaling_table
from seatrial.report.text import clean, single_line
from seatrial.report.variables import variable_lines
from seatrial.report.view import chapters, coverage, launchers, lax_thresholds, machine_size, outcome_counts
from seatrial.report.why_not import next_step
from seatrial.util.text import and_more, plural

STYLES = {
    Outcome.PASS: "green",
    Outcome.WARN: "yellow",
    Outcome.FAIL: "bold red",
    Outcome.SKIP: "dim",
    Outcome.UNJUDGED: "bold cyan",
    Outcome.ERROR: "bold magenta",
    DecisionValue.ACCEPTED: "bold green",
    DecisionValue.REJECTED: "bold red",
    DecisionValue.INCOMPLETE: "bold yellow",
}
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
    console.print(Text.assemble((_line(f"seatrial {trial.name}"), "bold"), f" · {_line(run_text)}"))
    if verbose:
        _all_checks(trial, console)
        for problem in found:
            _full_problem(problem, console)
    else:
        _short_problems(found, console)
    _figures(headline(trial), console, verbose=verbose)
    measured = not all(measurement.skipped for measurement in trial.measurements)
    for group in coverage(trial):
        # if nothing was measured, the decision says so
        if group.title.startswith("Excluded") or (group.title.startswith("Not measured") and measured):
            names = ", ".join(group.checks) if verbose else and_more(group.checks, MAX_NAMED)
            console.print(Text(_line(f"{group.title}: {plural(len(group.checks), 'check')} ({names})"), "yellow"))
    lines = variable_lines(trial)
    for line in lines if verbose else lines[:MAX_VARIABLES]:
        console.print(Text(f"Environment variable {_line(line)}", "dim"))
    if not verbose and len(lines) > MAX_VARIABLES:
        console.print(Text(f"and {plural(len(lines) - MAX_VARIABLES, 'more environment variable')}", "dim"))
    for check, text in lax_thresholds(trial.verdicts):
        console.print(Text.assemble((LAX_THRESHOLD, "yellow"), "  ", _line(f"{check} {text}")))
    console.print()
    console.print(_decision(trial, failing_text(bad_parts), cause_text(bad_parts)))
    if do := filled(next_step(trial, found), run_values(run_dir)):
        # not wrapped, so that it can be copied
        console.print(Text.assemble(("Do first: ", "bold"), _line(do)), soft_wrap=True)


def _line(text: str) -> str:
    return single_line(clean(text))


def _short_problems(found: Sequence[Problem], console: Console) -> None:
    """Print the parts that fail, two lines each; without any, the warnings."""
    bad = [problem for problem in found if problem.first.outcome not in (None, Outcome.WARN)] or found
    if bad:
        console.print()
    for problem in bad[:MAX_PARTS]:
        part = problem.first
        console.print(_title(problem))
        more = f" (and {plural(len(problem.figures) - 1, 'more figure')})" if len(problem.figures) > 1 else ""
        text = "; ".join(filter(None, (part.cause, problem.figures[0].text if problem.figures else ""))) + more
        console.print(Text(f"      {_line(text)}"), overflow="ellipsis", no_wrap=True)
    if len(found) > len(bad[:MAX_PARTS]):
        rest = plural(len(found) - len(bad[:MAX_PARTS]), "more problem")
        console.print(Text(f"and {rest} (-v prints all)", "dim"))


def _title(problem: Problem) -> Text:
    outcome, identity = problem.first.outcome, problem.identity(MAX_NAMED)
    style = STYLES[outcome] if outcome else "bold"
    return Text.assemble((outcome or "FINDING", style), "  ", (_line(problem.title), "bold"), f"  {_line(identity)}")


def _full_problem(problem: Problem, console: Console) -> None:
    """Print a problem with its causes, all its parts and figures, evidence and fixes."""
    part = problem.first
    console.print()
    console.print(_title(problem))
    if len(problem.parts) > MAX_NAMED:
        _field("parts", problem.identity(len(problem.parts)), console)
    for finding in part.findings:
        _field("cause", f"{finding.title} on {finding.subject} ({finding.confidence} confidence)", console)
        _field("evidence", finding.evidence, console)
        _field("run first", finding.first_command, console)
    for figure in problem.figures:
        text = figure.verdict.message if figure.verdict else ""
        of_all = f" (worst of {figure.n}: {figure.worst_part})" if figure.n > 1 else ""
        checks = ", ".join(figure.checks)
        _field(str(figure.outcome), f"{checks} {figure.metric}".rstrip() + f": {text}{of_all}", console)
        if figure.verdict and figure.verdict.evidence.strip():
            lines = figure.verdict.evidence.strip().splitlines()
            hidden = (
                f"\n… {plural(len(lines) - MAX_LINES, 'more line')} in the report" if len(lines) > MAX_LINES else ""
            )
            _field("", "\n".join(lines[:MAX_LINES]) + hidden, console)
    for fix in part.fixes:
        _field("fix", fix, console)


def _field(label: str, text: str, console: Console) -> None:
    """Print a labelled, indented paragraph; print nothing for empty text."""
    if text.strip():
        grid = Table.grid()
        grid.add_column(width=13, no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(f"   {label}", "dim"), Text(clean(text.strip())))
        console.print(grid)


def _figures(rows: Sequence[Figure], console: Console, *, verbose: bool) -> None:
    """Print the headline figures as a table: outcome, name, worst value, share of the expected value, limit, part."""
    if not rows:
        return
    shown = rows if verbose else rows[:MAX_FIGURES]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("figure", overflow="fold")
    for heading in ("worst value", "share", "limit"):
        table.add_column(heading, no_wrap=True, justify="right")
    if console.width >= NARROW:
        table.add_column("expected", no_wrap=True, justify="right")
    table.add_column("part", overflow="fold")
    for row in shown:
        outcome = row.outcome or Outcome.PASS
        texts = [row.name, row.measured_text, row.share_text, row.limit_text]
        texts += [row.expected_text] if console.width >= NARROW else []
        table.add_row(Text(outcome, STYLES[outcome]), *(Text(_line(text)) for text in (*texts, row.worst_part)))
    console.print()
    console.print(table)
    if len(rows) > len(shown):
        console.print(Text(f"and {plural(len(rows) - len(shown), 'more figure')} of other checks", "dim"))


def _all_checks(trial: Trial, console: Console) -> None:
    """Print each check with its outcome and key figure, the scaling, and the number of verdicts."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)  # not wrapped, so that it can be copied
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for chapter in chapters(trial):
        table.add_row(Text(chapter.title, "bold"))
        for check in chapter.checks:
            outcome, subjects = Text(check.outcome, STYLES[check.outcome]), Text(_line(check.subjects_text), "dim")
            table.add_row(Text(f"  {_line(check.name)}"), subjects, outcome, Text(_line(check.overview_text)))
    console.print()
    console.print(table)
    if scaling := scaling_table(trial):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for heading in ("Scaling", scaling.node, scaling.cluster, "ratio"):
            table.add_column(heading, no_wrap=True)
        for row in scaling.rows:
            table.add_row(Text(row.name), row.node or "–", row.cluster or "–", row.ratio or "–")
        console.print(table)
    counts = [Text(f"{count:,} {outcome}", STYLES[outcome]) for outcome, count in outcome_counts(trial.verdicts)]
    line = Text("verdicts: ") + Text(" · ").join(counts) if counts else Text("no verdict")
    if trial.baseline:
        bases = (verdict.basis for verdict in trial.verdicts)
        count = sum(basis is not None and basis.kind is BasisKind.SITE for basis in bases)
        line += Text(_line(f"; {count:,} judged by the site's baseline {trial.baseline.name}"))
    console.print(Text("\n") + line)


def _decision(trial: Trial, failing: str, causes: str) -> Table:
    """The decision, its reason, the causes and the tested hardware."""
    decision = trial.decision
    text = Text(_line(f"{failing}: {decision.reason}" if failing else decision.reason))
    if causes:
        text.append(f"\nCause: {_line(causes)}")
    if decision.tested_hardware:
        text.append(f"\nTested: {_line(decision.tested_hardware)}", "dim")
    value = Text(decision.value, STYLES[decision.value])
    if decision.cpu_only:
        if decision.value is DecisionValue.ACCEPTED:
            value.stylize(CPU_ONLY_STYLE)
        value.append(" (CPU ONLY)", CPU_ONLY_STYLE)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(value, text)
    return grid
