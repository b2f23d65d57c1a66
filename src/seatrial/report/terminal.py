"""The summary on the terminal: checks, causes, other problems with evidence, findings, lax thresholds, decision."""

from __future__ import annotations

from collections.abc import Set

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from seatrial.diagnose.job_failures import not_started
from seatrial.model import BasisKind, DecisionValue, Finding, Outcome, Trial
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.report.causes import CauseView, cause_text, causes
from seatrial.report.scaling import scaling_table
from seatrial.report.text import sanitized, single_line
from seatrial.report.variables import variable_lines
from seatrial.report.view import (
    CheckView,
    Group,
    chapters,
    launchers,
    lax_thresholds,
    machine_size,
    outcome_counts,
    problems,
)
from seatrial.util.text import plural

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
# Limits of the summary; the HTML report has everything
MAX_SUBJECTS = 4  # per problem
MAX_LINES = 8  # lines of evidence shown per problem
NARROW = 100  # columns


def summary(trial: Trial, console: Console) -> None:
    """Print the summary of a finished trial. Text of logs and tools is not interpreted as markup."""
    trial = sanitized(trial)
    run_text = f"{machine_size(trial)} · {launchers(trial) or 'no launcher'} · {trial.seconds:.1f} s"
    console.print(Text.assemble((f"seatrial {single_line(trial.name)}", "bold"), f" · {run_text}"))
    refused_checks = {verdict.check for verdict in not_started(trial.results, trial.verdicts)}
    nothing_started = refused_checks and all(measurement.skipped for measurement in trial.measurements)
    if not nothing_started:
        console.print()
        console.print(_table(trial, refused_checks, console.width))
        _excluded(trial, console)
        _scaling(trial, console)
        _variables(trial, console)
        console.print(_counts(trial))
    if refused_checks:
        text = f"{plural(len(refused_checks), 'check')} not started: {single_line(trial.stop_reason)}"
        console.print(Text(text), overflow="ellipsis", no_wrap=True)
    if (shown_causes := causes(trial)) and not nothing_started:
        console.print(Text("\nCauses", "bold"))
    for number, cause in enumerate(shown_causes, 1):
        _finding(number, cause.finding, trial, console)
        _explained(cause, refused_checks, console)
    unexplained = problems(trial)
    if unexplained and shown_causes:
        console.print(Text("\nNot explained by a cause", "bold"))
    for group in unexplained:
        _problem(group, console)
    if findings := [finding for finding in trial.findings if not finding.explains]:
        console.print(Text("\nFindings", "bold"))
    for number, finding in enumerate(findings, 1):
        _finding(number, finding, trial, console)
    for check, text in lax_thresholds(trial.verdicts):
        console.print(Text.assemble("\n", (LAX_THRESHOLD, "yellow"), f"  {check} {single_line(text)}"))
    _decision(trial, console, has_measured=not nothing_started)


def _table(trial: Trial, refused_checks: Set[str], width: int) -> Table:
    """Return one row for each check, without those that were not started since their job was refused."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)  # not wrapped, so that it can be copied
    # on a narrow terminal the subjects wrap, so that the names of metrics fit into a line
    table.add_column(min_width=10, max_width=None if width >= NARROW else 16)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for chapter in chapters(trial):
        if checks := [check for check in chapter.checks if check.name not in refused_checks]:
            table.add_row(Text(chapter.title, "bold"))
        for check in checks:
            table.add_row(*_row(check))
    return table


def _row(check: CheckView) -> tuple[Text, Text, Text, Text]:
    outcome = check.outcome
    return (
        Text(f"  {check.name}"),
        Text(check.subjects_text, "dim"),
        Text(outcome, STYLES[outcome]),
        Text(single_line(check.overview_text)),
    )


def _excluded(trial: Trial, console: Console) -> None:
    if trial.excluded_checks:
        console.print(Text("Excluded", "bold"))
    for check, reason in trial.excluded_checks.items():
        console.print(Padding(Text(f"{check}: {single_line(reason)}", "dim"), (0, 0, 0, 2)))


def _scaling(trial: Trial, console: Console) -> None:
    """Print each quantity on one node and on all nodes."""
    if not (scaling := scaling_table(trial)):
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("Scaling", scaling.node, scaling.cluster, "ratio"):
        table.add_column(heading, no_wrap=True)
    for row in scaling.rows:
        table.add_row(Text(f"  {row.name}"), row.node or "–", row.cluster or "–", row.ratio or "–")
    console.print(table)


def _variables(trial: Trial, console: Console) -> None:
    lines = variable_lines(trial)
    if lines:
        console.print(Text("Environment variables of the ranks", "bold"))
    for line in lines:
        console.print(Padding(Text(single_line(line), "dim"), (0, 0, 0, 2)))


def _counts(trial: Trial) -> Text:
    counts = [Text(f"{count:,} {outcome}", STYLES[outcome]) for outcome, count in outcome_counts(trial.verdicts)]
    line = Text("verdicts: ") + Text(" · ").join(counts) if counts else Text("no verdict")
    if trial.baseline:
        bases = (verdict.basis for verdict in trial.verdicts)
        count = sum(basis is not None and basis.kind is BasisKind.SITE for basis in bases)
        line += Text(f"; {count:,} judged by the site's baseline {trial.baseline.name}")
    return Text("\n") + line


def _problem(group: Group, console: Console) -> None:
    first = group.first
    console.print()
    title = " ".join(filter(None, (group.title, first.metric)))
    console.print(Text.assemble((first.outcome, STYLES[first.outcome]), f"  {title} on {group.subjects_text}"))
    if len(group.verdicts) == 1:
        _field("", first.message, console)
    else:
        _field("", group.meaning, console)
        _subjects(group, console)
    _field("checks", group.check_names, console)
    _field("evidence", _shortened(first.evidence), console)
    _field("fix", first.fix, console)


def _subjects(group: Group, console: Console) -> None:
    """Print the text of each subject; a text that all subjects share is printed once."""
    texts = {group.verdict_text(verdict) for verdict in group.verdicts}
    shown = group.verdicts[:MAX_SUBJECTS]
    hidden_count = len(group.verdicts) - len(shown)
    hidden_text = f"… and {plural(hidden_count, 'more subject')} (see the report)" if hidden_count else ""
    if len(texts) == 1:
        _field("", f"{texts.pop()}: {', '.join(verdict.subject for verdict in shown)} {hidden_text}", console)
        return
    for verdict in shown:
        _field("", f"{verdict.subject}: {group.verdict_text(verdict)}", console)
    _field("", hidden_text, console)


def _shortened(evidence: str) -> str:
    lines = evidence.strip().splitlines()
    shown, hidden_count = lines[:MAX_LINES], len(lines) - MAX_LINES
    if hidden_count > 0:
        shown.append(f"… {plural(hidden_count, 'more line')} in the report")
    return "\n".join(shown)


def _finding(number: int, finding: Finding, trial: Trial, console: Console) -> None:
    """Print a finding; evidence that the reason of the decision contains is not repeated."""
    title = f"{single_line(finding.title)} · {single_line(finding.subject)} · {finding.confidence} confidence"
    _print_labelled(f"{number}.", Text(title), 3, console)
    if finding.evidence not in trial.decision.reason:
        _field("evidence", finding.evidence, console)
    if finding.first_command:
        # not wrapped, so that it can be copied
        command = finding.first_command.strip().replace("\n", "\n" + " " * 13)
        console.print(Text.assemble("   ", ("run first", "dim"), f" {command}"), soft_wrap=True)
    _field("fix", finding.fix, console)


def _explained(cause: CauseView, refused_checks: Set[str], console: Console) -> None:
    """Print the verdicts that a cause explains, one line for each group, without those on ``refused_checks``."""
    label = "explains"
    groups = [group for group in cause.groups if group.first.check not in refused_checks]
    for group in groups[:MAX_LINES]:
        first = group.first
        title = " ".join(filter(None, (group.title, first.metric)))
        summary = first.summary if len(group.verdicts) == 1 else ""
        text = f"{first.outcome} {title} on {group.subjects_text}"
        _field(label, f"{text}: {single_line(summary)}" if summary else text, console)
        label = ""
    hidden_count = len(groups) - MAX_LINES
    if hidden_count > 0:
        _field("", f"… and {plural(hidden_count, 'more group')} (see the report)", console)
    if cause.explained_earlier:
        _field("", f"and {plural(cause.explained_earlier, 'verdict')} that an earlier cause explains too", console)


def _field(label: str, text: str, console: Console) -> None:
    """Print a labelled, indented paragraph; print nothing for empty text."""
    if text.strip():
        _print_labelled(f"   {label}", Text(text.strip()), 13, console)


def _print_labelled(label: str, text: Text, indent: int, console: Console) -> None:
    """Print ``label``, then ``text`` as a paragraph indented by ``indent`` columns."""
    grid = Table.grid()
    grid.add_column(width=indent, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, "dim"), text)
    console.print(grid)


def _decision(trial: Trial, console: Console, *, has_measured: bool) -> None:
    decision = trial.decision
    text = Text(single_line(decision.reason))
    if cause := cause_text(trial):
        text.append(f"\nCause: {single_line(cause)}")
    if decision.tested_hardware and has_measured:
        text.append(f"\nTested: {single_line(decision.tested_hardware)}", "dim")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    value = Text(decision.value, STYLES[decision.value])
    if decision.cpu_only and has_measured:
        if decision.value is DecisionValue.ACCEPTED:
            value.stylize(CPU_ONLY_STYLE)
        value.append(" (CPU ONLY)", CPU_ONLY_STYLE)
    grid.add_row(value, text)
    if has_measured:
        console.print()
    console.print(grid)
