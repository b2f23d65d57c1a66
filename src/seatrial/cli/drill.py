"""The command that injects faults and proves that trials report them: drill."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli.options import EXIT_ACCEPTED, EXIT_INCOMPLETE, EXIT_REJECTED, AsJson, create_out_folder
from seatrial.cli.output import print_json, stdout
from seatrial.model import UsageError
from seatrial.util.grouping import grouped

if TYPE_CHECKING:
    from seatrial.drill.base import Drill


def drill(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Drills, patterns such as 'rank-*', or cpu, cluster, gpu."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Run all drills.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the drills and why some cannot run here; run nothing.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the records in this new or empty directory; with Slurm all nodes must share it."),
    ] = None,
    clean: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Inject nothing: run the checks of the drills N times, count the alarms."
        ),
    ] = None,
    ignored: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="CHECK:METRIC",
            help="With --clean: do not count alarms that match this pattern, such as for a real fault of this machine.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start one trial per fault, inject the fault, and check that the report names place, cause and first command.

    Changes only its own processes, files and mounts; a drill on several nodes also changes the test cluster. Undoes
    all changes.

    Exit codes: 0 all reports name the injected faults as expected, 1 a report does not, 3 all reports do, but a drill
    could not run here. With --clean: 0 no alarm, 1 at least one.
    """
    from seatrial.drill.runner import unmet_need
    from seatrial.drill.text import print_list

    selected = _selected(names or [], all_ or (list_ and not names))
    if list_:
        rows = [(item, unmet_need(item.needs)) for item in selected]
        if as_json:
            print_json(
                [
                    {"name": item.name, "title": item.title, "machine": item.machine, "could_not_run": reason}
                    for item, reason in rows
                ]
            )
        else:
            print_list(rows, stdout())
        return
    if ignored and not clean:
        raise UsageError("--ignore needs --clean: only --clean counts alarms")
    if out:
        create_out_folder(out)
    folder = out or Path(tempfile.mkdtemp(prefix="seatrial-drill-"))
    try:
        code = _run_clean(selected, clean, ignored or [], folder, as_json) if clean else _run(selected, folder, as_json)
    finally:
        if not out:
            shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(code)


def _run(selected: list[Drill], folder: Path, as_json: bool) -> int:
    from seatrial.drill.runner import run_drills
    from seatrial.drill.text import print_results

    results = list(run_drills(selected, folder, _show))
    if as_json:
        print_json(results)
    else:
        print_results(results, stdout())
    could_run = [result for result in results if not result.could_not_run]
    if not all(result.holds for result in could_run):
        return EXIT_REJECTED
    return EXIT_ACCEPTED if len(could_run) == len(results) else EXIT_INCOMPLETE


def _run_clean(selected: list[Drill], runs: int, ignored: list[str], folder: Path, as_json: bool) -> int:
    from seatrial.drill.clean import run_clean
    from seatrial.drill.text import print_clean

    result = run_clean(selected, runs, ignored, folder, _show)
    if as_json:
        print_json(result)
    else:
        print_clean(result, stdout())
    return EXIT_REJECTED if result.alarms else EXIT_ACCEPTED


def _show(text: str) -> None:
    print(f"drill {text}", file=sys.stderr)


def _selected(names: list[str], all_drills: bool) -> list[Drill]:
    """Return the drills with these names, or ``all_drills``, in the order of the catalog.

    Raises UsageError if a name matches no drill, for names together with --all, or for neither.
    """
    from seatrial.config.expect import matching
    from seatrial.drill import catalog

    if all_drills and not names:
        return list(catalog().values())
    if all_drills or not names:
        problem = "give names of drills or --all, not both" if all_drills else "give the name of a drill, or --all"
        raise UsageError(f"{problem}; list all drills: seatrial drill --list")

    drills_of_machine = grouped((str(item.machine), item.name) for item in catalog().values())
    patterns = [pattern for name in names for pattern in drills_of_machine.get(name, [name])]
    selected = matching(patterns, catalog(), "drill", "; list all drills: seatrial drill --list")
    return [catalog()[name] for name in selected]
