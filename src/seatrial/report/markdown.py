"""A short summary of a trial for a ticket or a pull request (GitHub-flavoured Markdown)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from seatrial.judge.insights import RARE_FAULTS
from seatrial.model import Trial
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.report.document import Document
from seatrial.report.figures import headline
from seatrial.report.not_seen import not_seen
from seatrial.report.parts import Part, Problem, cause_text, failing_text, parts, problems
from seatrial.report.text import clean, single_line, split_code, utc
from seatrial.report.view import (
    check_views,
    decision_title,
    launchers,
    lax_thresholds,
    machine_size,
)
from seatrial.report.why_not import next_step
from seatrial.util.text import plural

# Limits of the summary; the HTML report has everything
MAX_PROBLEMS = 10
MAX_SUBJECTS = 8  # per problem
MAX_LINES = 12  # lines of evidence shown per figure
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~$&]|^[#+-]")
_MENTION = re.compile(r"([@#])(?=\w)")


def render(trial: Trial) -> str:
    """The decision, bad parts, headline figures, a table of checks, and the worst problems with evidence."""
    bad_parts = parts(trial)
    found = problems(bad_parts)
    bad = [
        (
            problem.first.outcome or "finding",
            problem.title,
            problem.identity(MAX_SUBJECTS),
            problem.figures[0].text if problem.figures else "",
            problem.first.cause,
        )
        for problem in found[:MAX_PROBLEMS]
    ]
    figures = [
        (
            *(str(row.outcome), row.name, row.measured_text, row.limit_text, row.expected_text, row.share_text),
            *(row.worst_part, str(row.n), row.source),
        )
        for row in headline(trial)
    ]
    checks = [(check.name, check.outcome, check.overview_text) for check in check_views(trial)]
    excluded = [(name, "excluded", option) for name, option in trial.excluded_checks.items()]
    texts = [
        _head(trial, bad_parts, found),
        _table(("outcome", "part", "serial, UUID, slot", "worst figure", "cause"), bad),
        _table(("outcome", "figure", "worst value", "limit", "expected", "share", "part", "n", "source"), figures),
        _table(("check", "outcome", "key figure"), [*checks, *excluded]),
        *map(_problem, found[:MAX_PROBLEMS]),
    ]
    if len(found) > MAX_PROBLEMS:
        texts.append(f"… and {plural(len(found) - MAX_PROBLEMS, 'more problem')} (see the report).")
    return "\n\n".join(filter(None, texts)) + "\n"


def render_document(document: Document) -> str:
    """A comparison or another document: the result, then its sections."""
    texts = [f"## {_text(document.kind)}: {_text(document.result)}"]
    for section in document.sections:
        texts += [f"### {_text(section.title)}", "\n".join(f"- {_text(line)}" for line in section.lines)]
        texts.append(_table(section.table.header, section.table.rows) if section.table else "")
    return "\n\n".join(filter(None, texts)) + "\n"


def _head(trial: Trial, bad_parts: Sequence[Part], found: Sequence[Problem]) -> str:
    started = utc(trial.started, "%Y-%m-%d %H:%M UTC")
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
    for insight in trial.insights:
        if insight.title == RARE_FAULTS:
            lines += ["", f"{RARE_FAULTS}: {_text(insight.text)}"]
    if unseen := not_seen(trial):
        lines += ["", f"Not seen: {_text(unseen)}"]
    for check, text in lax_thresholds(trial.verdicts):
        lines += ["", f"{LAX_THRESHOLD}: {_text(f'{check} {text}')}"]
    return "\n".join([*lines, "", f"Command: {_code(shlex.join(trial.command))}"])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; empty without rows."""
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *lines]) if lines else ""


def _problem(problem: Problem) -> str:
    """A problem with its causes, figures, evidence and fixes."""
    lines = [f"### {problem.first.outcome or 'Finding'}: {_text(problem.title)}", ""]
    for label, text in problem.details(MAX_SUBJECTS, MAX_LINES):
        if label:
            shown = _code(text) if label == "run first" else _text(text)
            lines += [f"- **{label}** {shown}"] if text else []
        elif text:
            fence = _fence(clean(text), 3)
            lines += ["", f"{fence}text\n{clean(text)}\n{fence}", ""]
    return "\n".join(lines)


def _text(text: str) -> str:
    """Text on one line with Markdown and mentions escaped; commands between backticks become code spans."""
    shown = ""
    for piece, is_code in split_code(single_line(text)):
        # a zero-width space prevents "@name" from notifying a user and "#1" from linking an issue
        shown += _code(piece) if is_code else _SPECIAL.sub(r"\\\g<0>", _MENTION.sub("\\1\u200b", piece))
    return shown.strip()


def _cell(text: str) -> str:
    """Text in a table cell, where a bar must be escaped also within a code span."""
    return re.sub(r"(?<!\\)\|", r"\\|", _text(text))


def _code(text: str) -> str:
    """A code span."""
    text = single_line(text)
    fence = _fence(text, 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    """At least ``least`` backticks, and more than any run of backticks in the text, as CommonMark requires."""
    return "`" * max(least, *(len(run) + 1 for run in re.findall("`+", text)), 0)
