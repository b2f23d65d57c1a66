"""The page drills-results.md of the site, from docs/results/drills.json. ``drills_page.py FILE…`` adds results.

FILE is the output of ``seatrial drill … --json``, with or without ``--clean``; a result replaces the earlier one of the
same drill.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from seatrial.drill import catalog
from seatrial.drill.base import DrillResult
from seatrial.drill.clean import CleanRuns
from seatrial.drill.evaluate import MAX_CHARS
from seatrial.drill.text import PARTS, part_text, totals
from seatrial.util.quantiles import CONFIDENCE
from seatrial.util.text import cut_at_sentence

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "drills.json"
HEAD = """# Results of the drills

See which injected faults seatrial found. [Drills](drills.md) explains the columns.
"""


class Document(BaseModel):
    """The content of drills.json: results, and the machines that they are from."""

    machine: str
    drills: list[DrillResult]
    clean_machine: str
    clean: list[CleanRuns]


def pages() -> dict[str, str]:
    """Return the page by its path in the site."""
    return {"drills-results.md": page(Document.model_validate_json(RESULTS.read_bytes()))}


def page(document: Document) -> str:
    """The whole page for the content of drills.json."""
    results = document.drills
    lines = [HEAD, f"{totals(results)}. Source: [drills.json](results/drills.json). Machine: {document.machine}", ""]
    columns = ["drill", "injected", *PARTS.values(), "seconds", "first finding"]
    lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [_row(result) for result in results if not result.could_not_run]
    missed = [(result.name, problem) for result in results for problem in result.problems]
    if missed:
        lines += ["", "What does not hold:", "", *(f"- `{name}`: {_cell(problem)}" for name, problem in missed)]
    not_run = [result for result in results if result.could_not_run]
    if not_run:
        lines += ["", "Not run on this machine:", "", "| drill | injected | reason |", "| --- | --- | --- |"]
        lines += [f"| `{row.name}` | {_cell(row.title)} | {_cell(row.could_not_run)} |" for row in not_run]
    lines += ["", "## Clean runs", "", f"Machine: {document.clean_machine}", "", *map(_clean, document.clean)]
    return "\n".join(lines).rstrip() + "\n"


def _row(result: DrillResult) -> str:
    parts = [part_text(result, part).replace("NO", "**NO**") for part in PARTS]
    finding = cut_at_sentence(result.finding, MAX_CHARS - 1)  # earlier versions cut a message inside a command
    cells = [f"`{result.name}`", _cell(result.title), *parts, f"{result.seconds:g}", _cell(finding)]
    return f"| {' | '.join(cells)} |"


def _clean(runs: CleanRuns) -> str:
    alarms: dict[str, int] = {}
    for alarm in runs.alarms:
        text = f"{alarm.outcome} {alarm.name}" if alarm.outcome else f"finding {alarm.message}"
        alarms[text] = alarms.get(text, 0) + 1
    listed = "; ".join(f"{_cell(text)} ({count})" for text, count in alarms.items()) or "none"
    ignored = ", ".join(f"`{name}`" for name in runs.ignored) or "none"
    return (
        f"- Checks: {', '.join(f'`{name}`' for name in runs.checks)}. {runs.runs} runs without a fault, "
        f"{runs.runs_with_alarm} with a false alarm. With {CONFIDENCE:.0%} confidence at most {runs.upper_bound:.1%} "
        f"of all runs have one. Alarms: {listed}. Not counted, since they are true on this machine: {ignored}."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def merged(document: Document, files: list[Path]) -> Document:
    """``document`` with the results in ``files``, in the order of the catalog."""
    results, clean = {row.name: row for row in document.drills}, list(document.clean)
    for file in files:
        content = TypeAdapter(CleanRuns | list[DrillResult]).validate_json(file.read_bytes())
        if isinstance(content, CleanRuns):
            clean = [row for row in clean if set(row.checks) != set(content.checks)] + [content]
            continue
        for row in content:
            if not row.could_not_run or row.name not in results:
                results[row.name] = row
    drills = [results[name] for name in catalog() if name in results]
    return document.model_copy(update={"drills": drills, "clean": clean})


if __name__ == "__main__":
    document = merged(Document.model_validate_json(RESULTS.read_bytes()), [Path(name) for name in sys.argv[1:]])
    content = document.model_dump(mode="json", exclude_unset=True)
    RESULTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
