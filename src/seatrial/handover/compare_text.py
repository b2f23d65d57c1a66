"""The text of a comparison: sentences for losses, and tables; the same for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seatrial.handover.compare import Change, Comparison, Loss
from seatrial.model import CLUSTER, DecisionValue, Trial
from seatrial.report.document import Document, Section
from seatrial.report.formatting import print_value
from seatrial.report.tables import Table
from seatrial.report.text import utc
from seatrial.report.view import decision_title, machine_size
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more, plural

MAX_PARTS = 4  # parts named in a sentence
MAX_CAUSES = 3  # possible causes of a loss
MAX_ROWS = 40  # rows of a table; --json has all
_EFFECTS = ("slower", "faster", "same", "not compared")  # in the order of the table


def document(comparison: Comparison, before: Sequence[Trial], after: Sequence[Trial]) -> Document:
    """The comparison as sections: sides, losses, speeds, parts, facts, what was not compared."""
    parts = [(part.kind, part.part, part.text) for part in comparison.parts]
    facts = [(fact.name, fact.before, fact.after, fact.where) for fact in comparison.facts]
    sections = [
        Section("Compared", [f"A: {_side_text(before)}", f"B: {_side_text(after)}", *comparison.notes]),
        Section("Losses", [line for loss in comparison.losses for line in loss_lines(loss)]),
        _table("Speeds", ("", "speed", "A", "B", "change", "found from", "part", "note"), _speeds(comparison)),
        _table("Parts", ("", "part", ""), parts),
        _table("Facts that differ", ("fact", "A", "B", "where"), facts),
        Section("Not compared", comparison.not_comparable),
    ]
    decision = DecisionValue.ACCEPTED if comparison.tested else DecisionValue.INCOMPLETE
    if comparison.has_regression:
        decision = DecisionValue.REJECTED
    shown = [section for section in sections if section.lines or section.table]
    return Document("Comparison", result_text(comparison), decision, shown)


def result_text(comparison: Comparison) -> str:
    """The result in one sentence."""
    if not comparison.tested and not comparison.has_regression:
        return "nothing could be compared: the records have no speed of the same part with a known spread"
    lost = sum(len(loss.changes) for loss in comparison.losses)
    faster = sum(change.effect == "faster" for change in comparison.changes)
    texts = [f"{plural(lost, 'speed')} lost"] if lost else []
    texts += [f"{plural(comparison.failing, 'part')} failing now"] if comparison.failing else []
    texts = texts or ["no regression"]
    texts += [f"{plural(faster, 'speed')} gained"] if faster else []
    return f"{', '.join(texts)}; {plural(comparison.tested, 'speed')} compared"


def loss_lines(loss: Loss) -> Iterator[str]:
    """Which parts lost how much, what the others did, and the possible causes."""
    worst = loss.changes[0]
    others = loss.compared - len(loss.changes)
    parts = and_more([change.part for change in loss.changes], MAX_PARTS)
    if len(loss.changes) > 1:
        parts += f", the worst {worst.part}"
    if worst.serial:
        parts += f" (serial {worst.serial})"
    values = f"{print_value(worst.before, worst.unit)} → {print_value(worst.after, worst.unit)}"
    did_not = f"; the other {others} did not" if others else ""
    yield f"{parts}: {worst.speed} {_percent(worst)}: {values}{did_not}"
    for cause in loss.causes[:MAX_CAUSES]:
        yield f"possible cause: {cause}"
    if not loss.causes:
        yield "no recorded fact changed there"
    elif len(loss.causes) > MAX_CAUSES:
        yield f"and {plural(len(loss.causes) - MAX_CAUSES, 'more fact')} that changed there"


def _side_text(trials: Sequence[Trial]) -> str:
    last = max(trials, key=lambda trial: trial.started)
    text = f"{last.name}, {machine_size(last)}, {utc(last.started, '%Y-%m-%d %H:%M UTC')}, {decision_title(last)}"
    return f"{text}; the last of {len(trials)} records, medians are compared" if len(trials) > 1 else text


def _speeds(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row for each speed: the part with the worst effect, and of these the largest loss."""
    rows = []
    for changes in grouped((change.speed, change) for change in comparison.changes).values():
        worst = min(changes, key=lambda change: (_EFFECTS.index(change.effect), -change.loss))
        slower = sum(change.effect == "slower" for change in changes)
        part = "" if worst.part == CLUSTER else worst.part
        if len(changes) > 1:
            part += f", worst of {len(changes)}" + (f", {slower} slower" if slower > 1 else "")
        values = print_value(worst.before, worst.unit), print_value(worst.after, worst.unit)
        detectable = "" if worst.detectable is None else f"{worst.detectable:.1%}"
        rows.append((worst.effect, worst.speed, *values, _percent(worst), detectable, part, worst.reason))
    return sorted(rows, key=lambda row: _EFFECTS.index(row[0]))


def _percent(change: Change) -> str:
    """The change with its 95 % interval."""
    interval = f" ({change.interval[0]:+.1%} to {change.interval[1]:+.1%})" if change.interval else ""
    return f"{change.change:+.1%}{interval}" if change.before else ""


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    """A section with at most MAX_ROWS rows, without columns that are empty in all of them."""
    filled = [n for n in range(len(header)) if any(row[n] for row in rows)]
    shown = [[row[n] for n in filled] for row in rows[:MAX_ROWS]]
    more = [f"{plural(len(rows) - MAX_ROWS, 'more row')} in --json"] if len(rows) > MAX_ROWS else []
    return Section(title, more, Table("", shown, [header[n] for n in filled]) if rows else None)
