"""A short summary of a trial for a ticket or a pull request (GitHub-flavoured Markdown)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from seatrial.model import Finding, Trial
from seatrial.report.figures import Figure, headline
from seatrial.report.parts import Part, Problem, cause_text, failing_text, parts, problems
from seatrial.report.scaling import scaling_table
from seatrial.report.text import clean, single_line, split_code, utc
from seatrial.report.view import (
    CheckView,
    chapters,
    decision_title,
    launchers,
    machine_size,
    metrics_without_threshold,
    outcome_counts,
)
from seatrial.report.why_not import next_step
from seatrial.util.text import plural

# Limits of the summary; the HTML report has everything
MAX_PROBLEMS = 10
MAX_SUBJECTS = 8  # per problem
MAX_LINES = 12  # lines of evidence shown per problem
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~$&]|^[#+-]")
_MENTION = re.compile(r"([@#])(?=\w)")


def render(trial: Trial) -> str:
    """The decision, bad parts, headline figures, a table of checks, methods, and the worst problems with evidence."""
    bad_parts = parts(trial)
    found = problems(bad_parts)
    texts = [_head(trial, bad_parts, found), *_parts(found), *_figures(headline(trial)), _table(trial)]
    texts += [*_scaling(trial), *_methods(trial), *map(_problem, found[:MAX_PROBLEMS])]
    if len(found) > MAX_PROBLEMS:
        texts.append(f"… and {plural(len(found) - MAX_PROBLEMS, 'more problem')} (see the report).")
    return "\n\n".join(texts) + "\n"


def _head(trial: Trial, bad_parts: Sequence[Part], found: Sequence[Problem]) -> str:
    started = utc(trial.started, "%Y-%m-%d %H:%M UTC") or "unknown time"
    run_text = f"{machine_size(trial)} · {_text(launchers(trial))} · {started} · {trial.seconds:.1f} s"
    failing = failing_text(bad_parts)
    title = f"{_text(decision_title(trial))}: {_text(trial.name)}" + (f" ({failing})" if failing else "")
    lines = [f"## {title}", "", _text(trial.decision.reason), ""]
    if cause := cause_text(bad_parts):
        lines += [f"Cause: {_text(cause)}", ""]
    if do := next_step(trial, found):
        lines += [f"Do first: {_text(do)}", ""]
    lines.append(f"{run_text} · seatrial {_text(trial.seatrial)}")
    if trial.decision.tested_hardware:
        lines += ["", f"Tested: {_text(trial.decision.tested_hardware)}"]
    if metric_lines := metrics_without_threshold(trial.decision):
        lines += ["", "Metrics without a threshold:", *(f"- {_text(line)}" for line in metric_lines)]
    return "\n".join([*lines, "", f"Command: {_code(shlex.join(trial.command))}"])


def _parts(found: Sequence[Problem]) -> list[str]:
    """A list with one text: the table of bad parts; empty if there is none."""
    rows = ["| outcome | part | serial, UUID, slot | worst figure | cause |", "|---|---|---|---|---|"]
    for problem in found[:MAX_PROBLEMS]:
        part = problem.first
        figure = problem.figures[0].text if problem.figures else ""
        identity = problem.identity(MAX_SUBJECTS)
        cells = (part.outcome or "finding", problem.title, identity, figure, part.cause)
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return ["\n".join(rows)] if found else []


def _figures(rows: Sequence[Figure]) -> list[str]:
    """A list with one text: the table of headline figures; empty if there is none."""
    lines = ["| outcome | figure | worst value | limit | expected | share | part | n | source |", "|" + "---|" * 9]
    for row in rows:
        cells = (row.outcome or "", row.name, row.measured_text, row.limit_text, row.expected_text, row.share_text)
        lines.append(f"| {' | '.join(map(_cell, (*cells, row.worst_part, f'{row.n}', row.source)))} |")
    return ["\n".join(lines)] if rows else []


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
    rows = [f"| scaling | 1 GPU | {table.node} | {table.cluster} | ratio |", "|---|---|---|---|---|"]
    rows += [f"| {row.name} | {row.gpu} | {row.node} | {row.cluster} | {row.ratio} |" for row in table.rows]
    return ["\n".join(rows)]


def _methods(trial: Trial) -> list[str]:
    """A list with one text: the methods of all checks; empty if no check has a method."""
    checks = [check for chapter in chapters(trial) for check in chapter.checks]
    lines = [f"- **{_text(check.name)}**: {_text(method)}" for check in checks for method in check.methods]
    return ["\n".join([f"Methods (seatrial {trial.seatrial}):", "", *lines])] if lines else []


def _problem(problem: Problem) -> str:
    """A problem with its causes, figures, evidence and fixes."""
    part = problem.first
    lines = [f"### {part.outcome or 'Finding'}: {_text(problem.title)}", ""]
    lines += map(_finding, part.findings)
    for figure in problem.figures:
        message = figure.verdict.message if figure.verdict else ""
        name = f"{', '.join(figure.checks)} {figure.metric}".strip()
        of_all = f" (worst of {figure.n}: {figure.worst_part})" if figure.n > 1 else ""
        lines.append(f"- {figure.outcome} {_text(name)}: {_text(message + of_all)}")
        if figure.verdict and figure.verdict.evidence.strip():
            evidence = "\n".join(clean(figure.verdict.evidence).strip().splitlines()[:MAX_LINES])
            lines += ["", _fenced(evidence), ""]
    if len(problem.parts) > 1:
        lines += ["", f"Parts: {_text(problem.identity(MAX_SUBJECTS))}"]
    own_fixes = [finding.fix for finding in part.findings]
    for fix in part.fixes:
        if fix not in own_fixes:
            lines += ["", f"Fix: {_text(fix)}"]
    return "\n".join(lines)


def _finding(finding: Finding) -> str:
    text = f"- **{_text(finding.title)}** · {_text(finding.subject)} · {finding.confidence} confidence. "
    text += _text(finding.evidence)
    if finding.first_command:
        text += f" Run first: {_code(finding.first_command)}"
    return text + (f" Fix: {_text(finding.fix)}" if finding.fix else "")


def _text(text: str) -> str:
    """Text on one line with Markdown and mentions escaped; commands between backticks become code spans."""
    pieces = split_code(single_line(clean(text)))
    return "".join(_code(piece) if is_code else _plain(piece) for piece, is_code in pieces).strip()


def _plain(text: str) -> str:
    # a zero-width space prevents "@name" from notifying a user and "#1" from linking an issue
    return _SPECIAL.sub(r"\\\g<0>", _MENTION.sub("\\1\u200b", text))


def _cell(text: str) -> str:
    """Text in a table cell, where a bar must be escaped also within a code span."""
    return re.sub(r"(?<!\\)\|", r"\\|", _text(text))


def _code(text: str) -> str:
    """A code span; CommonMark requires a fence longer than any run of backticks in the text."""
    text = single_line(clean(text))
    fence = "`" * (_longest_backtick_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest_backtick_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _longest_backtick_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
