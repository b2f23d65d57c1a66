"""A short summary for a ticket or a pull request (GitHub-flavoured Markdown)."""

from __future__ import annotations

import re
import shlex

from seatrial.model import Finding, Trial
from seatrial.report.text import one_line, plural, prose, sanitized, utc
from seatrial.report.view import (
    CheckView,
    Group,
    chapters,
    headline,
    launchers,
    outcome_counts,
    problems,
    recorded_only,
    size,
)

MOST_TROUBLES = 10  # what a ticket can carry; the report has them all
MOST_SUBJECTS = 8
MOST_LINES = 12  # of evidence
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~$&]|^[#+-]")
_MENTION = re.compile(r"([@#])(?=\w)")


def render(trial: Trial) -> str:
    """The decision, a table of checks, and the worst troubles and findings with evidence."""
    trial = sanitized(trial)
    shown = problems(trial)
    parts = [_head(trial), _table(trial), *_how(trial), *map(_trouble, shown[:MOST_TROUBLES])]
    if len(shown) > MOST_TROUBLES:
        parts.append(f"… and {plural(len(shown) - MOST_TROUBLES, 'more trouble')}, all in the report.")
    if trial.findings:
        parts.append("\n".join(["### Findings", "", *map(_finding, trial.findings)]))
    return "\n\n".join(parts) + "\n"


def _head(trial: Trial) -> str:
    when = utc(trial.started, "%Y-%m-%d %H:%M UTC") or "at an unknown time"
    lines = [
        f"## {headline(trial)}: {_text(trial.name)}",
        "",
        _text(trial.decision.reason),
        "",
        f"{size(trial)} · {_text(launchers(trial))} · {when} · {trial.seconds:.1f} s · seatrial {trial.seatrial}",
    ]
    if trial.decision.tested_hardware:
        lines += ["", f"Scope: {_text(trial.decision.tested_hardware)}"]
    if recorded := recorded_only(trial.decision):
        lines += ["", "Recorded, judged by nothing:", *(f"- {_text(one)}" for one in recorded)]
    return "\n".join([*lines, "", f"Command: {_code(shlex.join(trial.command))}"])


def _table(trial: Trial) -> str:
    rows = ["| check | subjects | outcome | key figure |", "|---|---|---|---|"]
    rows += [_row(check) for chapter in chapters(trial) for check in chapter.checks]
    rows += [f"| {_cell(check)} | | left out | {_cell(reason)} |" for check, reason in trial.excluded_checks.items()]
    return "\n".join(rows)


def _row(check: CheckView) -> str:
    told = (
        ", ".join(f"{count} {outcome}" for outcome, count in outcome_counts(check.verdicts)) or "UNJUDGED: no verdict"
    )
    return f"| {_cell(check.name)} | {_cell(check.extent)} | {told} | {_cell(check.key_figure)} |"


def _how(trial: Trial) -> list[str]:
    """How each check measured, where it says so."""
    checks = [check for chapter in chapters(trial) for check in chapter.checks]
    told = [f"- **{_text(check.name)}**: {_text(how)}" for check in checks for how in check.methods]
    return ["\n".join(["How it was measured:", "", *told])] if told else []


def _trouble(group: Group) -> str:
    first = group.first
    lines = [f"### {first.outcome}: {_text(f'{group.title} {first.metric}')} on {_text(group.subjects_text)}", ""]
    if len(group.verdicts) == 1:
        lines.append(_text(first.message))
    else:
        lines += [_text(group.meaning), ""] if group.meaning else []
        lines += [
            f"- {_text(verdict.subject)}: {_text(group.verdict_text(verdict))}"
            for verdict in group.verdicts[:MOST_SUBJECTS]
        ]
        more = len(group.verdicts) - MOST_SUBJECTS
        lines += [f"- … and {plural(more, 'more subject')}, all in the report"] if more > 0 else []
    lines += ["", f"Checks: {_text(group.stopped)}"] if group.stopped else []
    if first.evidence.strip():
        lines += ["", _fenced("\n".join(first.evidence.strip().splitlines()[:MOST_LINES]))]
    if first.fix:
        lines += ["", f"Fix: {_text(first.fix)}"]
    return "\n".join(lines)


def _finding(finding: Finding) -> str:
    told = f"- **{_text(finding.title)}** · {_text(finding.subject)} · {finding.confidence} confidence. {_text(finding.evidence)}"
    if finding.first_command:
        told += f" First: {_code(finding.first_command)}"
    return told + (f" Fix: {_text(finding.fix)}" if finding.fix else "")


def _text(text: str) -> str:
    """Text on one line that means nothing to Markdown and calls nobody, but for commands between backticks."""
    pieces = prose(one_line(text))
    return "".join(_code(piece) if is_code else _plain(piece) for piece, is_code in pieces).strip()


def _plain(text: str) -> str:
    # A zero-width space keeps "@name" from notifying a stranger and "#1" from linking an issue.
    return _SPECIAL.sub(r"\\\g<0>", _MENTION.sub("\\1\u200b", text))


def _cell(text: str) -> str:
    """Text in a table, where a bar ends the cell even within a code span."""
    return re.sub(r"(?<!\\)\|", r"\\|", _text(text))


def _code(text: str) -> str:
    """A code span; its fence is longer than any run of backticks within, as CommonMark asks."""
    text = one_line(text)
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}text\n{text}\n{fence}"
