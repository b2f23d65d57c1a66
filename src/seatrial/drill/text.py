"""Results of drills and of clean runs, and the list of drills, as text on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape

from seatrial.drill.base import Drill, DrillResult
from seatrial.drill.clean import CleanRuns
from seatrial.report.tables import Table, print_tables
from seatrial.report.text import clean
from seatrial.util.quantiles import CONFIDENCE
from seatrial.util.text import plural

# Field of DrillResult → its name on the terminal and in docs/drills.md
PARTS = {
    "seen": "seen",
    "located": "located",
    "explained": "explained",
    "command_right": "first command",
    "action_right": "action",
}


def print_results(results: Sequence[DrillResult], console: Console) -> None:
    """Print one row per drill, then the parts that do not hold, and the totals."""
    rows = [
        (
            result.name,
            *("-" if result.could_not_run else part_text(result, part) for part in PARTS),
            "-" if result.could_not_run else f"{result.seconds:.1f}",
        )
        for result in results
    ]
    print_tables([Table("", rows, ("drill", *PARTS.values(), "seconds"))], console)
    for result in results:
        if result.could_not_run:
            console.print(f"{result.name}: could not run here: {escape(result.could_not_run)}", highlight=False)
        for problem in result.problems:
            console.print(f"{result.name}: {escape(clean(problem))}", highlight=False)
    console.print(totals(results), highlight=False)


def part_text(result: DrillResult, part: str) -> str:
    """yes, NO, or - for a part that the drill does not have."""
    return {True: "yes", False: "NO", None: "-"}[getattr(result, part)]


def totals(results: Sequence[DrillResult]) -> str:
    """The number of drills that ran, and for each part the number of drills in which it holds."""
    ran = [result for result in results if not result.could_not_run]
    parts = {text: [getattr(result, part) for result in ran] for part, text in PARTS.items()}
    counts = ", ".join(
        f"{values.count(True)} of {len(values) - values.count(None)} {text}" for text, values in parts.items()
    )
    could_not = len(results) - len(ran)
    more = f"; {plural(could_not, 'drill')} could not run here" if could_not else ""
    return f"{plural(len(ran), 'drill')} ran: {counts}{more}"


def print_clean(result: CleanRuns, console: Console) -> None:
    """Print the alarms of clean runs, and the upper bound of the share of runs with a false alarm."""
    for alarm in result.alarms:
        name = f"{alarm.outcome} {alarm.name} on {alarm.subject}" if alarm.outcome else f"finding on {alarm.subject}"
        console.print(f"run {alarm.run}: {escape(clean(f'{name}: {alarm.message}'))}", highlight=False)
    ignored = f" (not counted: {', '.join(result.ignored)})" if result.ignored else ""
    text = f"{plural(result.runs, 'clean run')}, {result.runs_with_alarm} with a false alarm{ignored}"
    bound = f"; with {CONFIDENCE:.0%} confidence at most {result.upper_bound:.1%} of all runs have one"
    console.print(text + bound, highlight=False)


def print_list(drills: Iterable[tuple[Drill, str]], console: Console) -> None:
    """Print each drill with its title, and why it cannot run on this machine."""
    rows = [
        (drill.name, drill.machine, f"{drill.title} (not here: {reason})" if reason else drill.title)
        for drill, reason in drills
    ]
    print_tables([Table("", rows)], console)
