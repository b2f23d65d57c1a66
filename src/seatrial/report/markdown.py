"""A short summary of a trial for a ticket or a pull request (GitHub-flavoured Markdown)."""

from __future__ import annotations

import re
import shlex

from seatrial.model import Finding, Trial
from seatrial.report.causes import CauseView, cause_text, causes
from seatrial.report.scaling import scaling_table
from seatrial.report.text import sanitized, single_line, split_code, utc
from seatrial.report.view import (
    CheckView,
    Group,
    chapters,
    headline,
    launchers,
    machine_size,
    metrics_without_threshold,
    outcome_counts,
    problems,
)
from seatrial.util.text import plural

# Limits of the summary; the HTML report has everything
MAX_PROBLEMS = 10
MAX_SUBJECTS = 8  # per problem
MAX_LINES = 12  # lines of evidence shown per problem
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~$&]|^[#+-]")
_MENTION = re.compile(r"([@#])(?=\w)")


def render(trial: Trial) -> str:
    """The decision, a table of checks, the causes, the worst other problems with evidence, and the findings."""
    trial = sanitized(trial)
    shown = problems(trial)
    parts = [_head(trial), _table(trial), *_scaling(trial), *_methods(trial)]
    if shown_causes := causes(trial):
        parts.append("\n".join(["### Causes", "", *map(_cause, shown_causes)]))
    if shown_causes and shown:
        parts.append("### Not explained by a cause")
    parts += map(_problem, shown[:MAX_PROBLEMS])
    if len(shown) > MAX_PROBLEMS:
        parts.append(f"… and {plural(len(shown) - MAX_PROBLEMS, 'more problem')} (see the report).")
    if findings := [finding for finding in trial.findings if not finding.explains]:
        parts.append("\n".join(["### Findings", "", *map(_finding, findings)]))
    return "\n\n".join(parts) + "\n"


def _head(trial: Trial) -> str:
    started = utc(trial.started, "%Y-%m-%d %H:%M UTC") or "unknown time"
    run_text = f"{machine_size(trial)} · {_text(launchers(trial))} · {started} · {trial.seconds:.1f} s"
    lines = [f"## {headline(trial)}: {_text(trial.name)}", "", _text(trial.decision.reason), ""]
    if cause := cause_text(trial):
        lines += [f"Cause: {_text(cause)}", ""]
    lines.append(f"{run_text} · seatrial {trial.seatrial}")
    if trial.decision.tested_hardware:
        lines += ["", f"Tested: {_text(trial.decision.tested_hardware)}"]
    if metric_lines := metrics_without_threshold(trial.decision):
        lines += ["", "Metrics without a threshold:", *(f"- {_text(line)}" for line in metric_lines)]
    return "\n".join([*lines, "", f"Command: {_code(shlex.join(trial.command))}"])


def _table(trial: Trial) -> str:
    rows = ["| check | subjects | outcome | key figure |", "|---|---|---|---|"]
    rows += [_row(check) for chapter in chapters(trial) for check in chapter.checks]
    rows += [f"| {_cell(check)} | | excluded | {_cell(reason)} |" for check, reason in trial.excluded_checks.items()]
    return "\n".join(rows)


def _row(check: CheckView) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcome_counts(check.verdicts))
    outcomes = counts or "UNJUDGED: no verdict"
    return f"| {_cell(check.name)} | {_cell(check.subjects_text)} | {outcomes} | {_cell(check.overview_text)} |"


def _scaling(trial: Trial) -> list[str]:
    """A list with one text: the table of scaling; empty if there is no such table."""
    if not (table := scaling_table(trial)):
        return []
    rows = [f"| scaling | 1 GPU | {table.node} | {table.cluster} | ratio | judged |", "|---|---|---|---|---|---|"]
    for row in table.rows:
        judged = ", ".join(f"{metric} {value} {outcome}" for metric, value, outcome in row.judged)
        rows.append(f"| {row.name} | {row.gpu} | {row.node} | {row.cluster} | {row.ratio} | {_cell(judged)} |")
    return ["\n".join(rows)]


def _methods(trial: Trial) -> list[str]:
    """A list with one text: the methods of all checks; empty if no check has a method."""
    checks = [check for chapter in chapters(trial) for check in chapter.checks]
    lines = [f"- **{_text(check.name)}**: {_text(method)}" for check in checks for method in check.methods]
    return ["\n".join([f"Methods (seatrial {trial.seatrial}):", "", *lines])] if lines else []


def _problem(group: Group) -> str:
    first = group.first
    lines = [f"### {first.outcome}: {_text(f'{group.title} {first.metric}')} on {_text(group.subjects_text)}", ""]
    if len(group.verdicts) == 1:
        lines.append(_text(first.message))
    else:
        if group.meaning:
            lines += [_text(group.meaning), ""]
        lines += [
            f"- {_text(verdict.subject)}: {_text(group.verdict_text(verdict))}"
            for verdict in group.verdicts[:MAX_SUBJECTS]
        ]
        hidden_count = len(group.verdicts) - MAX_SUBJECTS
        if hidden_count > 0:
            lines.append(f"- … and {plural(hidden_count, 'more subject')} (see the report)")
    if group.check_names:
        lines += ["", f"Checks: {_text(group.check_names)}"]
    if first.evidence.strip():
        lines += ["", _fenced("\n".join(first.evidence.strip().splitlines()[:MAX_LINES]))]
    if first.fix:
        lines += ["", f"Fix: {_text(first.fix)}"]
    return "\n".join(lines)


def _cause(cause: CauseView) -> str:
    lines = [_finding(cause.finding)]
    for group in cause.groups[:MAX_PROBLEMS]:
        title = f"{group.title} {group.first.metric}".strip()
        lines.append(f"  - explains {group.first.outcome}: {_text(title)} on {_text(group.subjects_text)}")
    hidden_count = len(cause.groups) - MAX_PROBLEMS
    if hidden_count > 0:
        lines.append(f"  - … and {plural(hidden_count, 'more group')} (see the report)")
    return "\n".join(lines)


def _finding(finding: Finding) -> str:
    text = f"- **{_text(finding.title)}** · {_text(finding.subject)} · {finding.confidence} confidence. "
    text += _text(finding.evidence)
    if finding.first_command:
        text += f" Run first: {_code(finding.first_command)}"
    return text + (f" Fix: {_text(finding.fix)}" if finding.fix else "")


def _text(text: str) -> str:
    """Text on one line with Markdown and mentions escaped; commands between backticks become code spans."""
    pieces = split_code(single_line(text))
    return "".join(_code(piece) if is_code else _plain(piece) for piece, is_code in pieces).strip()


def _plain(text: str) -> str:
    # a zero-width space prevents "@name" from notifying a user and "#1" from linking an issue
    return _SPECIAL.sub(r"\\\g<0>", _MENTION.sub("\\1\u200b", text))


def _cell(text: str) -> str:
    """Text in a table cell, where a bar must be escaped also within a code span."""
    return re.sub(r"(?<!\\)\|", r"\\|", _text(text))


def _code(text: str) -> str:
    """A code span; CommonMark requires a fence longer than any run of backticks in the text."""
    text = single_line(text)
    fence = "`" * (_longest_backtick_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest_backtick_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _longest_backtick_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
