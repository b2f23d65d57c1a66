"""Commands of several parties and several runs: bundle, verify, compare, history."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from seatrial.cli.options import EXIT_INCOMPLETE, EXIT_REJECTED, AsJson
from seatrial.cli.output import print_json, print_lines, stdout
from seatrial.model import UsageError, format_bytes
from seatrial.util.text import printable

if TYPE_CHECKING:
    from seatrial.handover.history import Run
    from seatrial.model import Trial


def bundle(
    run: Annotated[
        Path, typer.Argument(help="A run directory or a trial.json; with --sign also a bundle, to add a signature.")
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="The bundle to write; by default RUN.tar.gz.")
    ] = None,
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Sign with this SSH key; ssh-keygen asks for nothing.")
    ] = None,
    role: Annotated[Literal["provider", "customer"], typer.Option("--as", help="Sign as this party.")] = "provider",
) -> None:
    """Write a finished run into one archive that the other party can verify and judge again.

    The archive has the record, reports, scripts, logs, rules and reference values, their digests in SHA256SUMS, and the
    result as an in-toto statement. Secrets are removed. Both parties can sign it.
    """
    from seatrial.handover import bundle as handover

    if run.is_file() and not run.name.endswith((".json", ".json.gz")):
        if not sign or out:
            raise UsageError(f"{run} is a file: give a run directory, or sign a bundle: --sign KEY, without -o")
        handover.add_signature(run, sign, role)
        print(f"{run}: signed as {role}")
        return
    out = out or Path(f"{run.resolve().name.removesuffix('.gz').removesuffix('.json')}.tar.gz")
    if note := handover.make(run, out, sign, role):
        print(f"seatrial: {note}", file=sys.stderr)
    print(f"{out}: {format_bytes(out.stat().st_size)}, {f'signed as {role}' if sign else 'unsigned'}")


def verify(
    bundle: Annotated[Path, typer.Argument(help="A bundle from `seatrial bundle`.")],
    allowed_signers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keys of the principals provider and customer, see man ssh-keygen."),
    ] = None,
    contract: Annotated[
        bool, typer.Option("--contract", help="Also print each value with its limit and interval, judged again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a bundle: its files, its signatures, whether its record is original, and its decision by judging again.

    Exit codes: 0 all hold, whatever the decision is; 1 one does not; 2 this is no bundle, or one of another version;
    3 signatures could not be checked, since ssh-keygen is not on this machine.
    """
    from dataclasses import asdict

    from seatrial import report
    from seatrial.handover.verify import verify as verify_bundle

    verification = verify_bundle(bundle, allowed_signers)
    judged = verification.judged
    if as_json:
        steps = [asdict(step) for step in verification.steps]
        print_json({"result": verification.result, "decision": judged and judged.decision.value, "steps": steps})
    else:
        for step in verification.steps:
            lines = [f"{step.result:11}  {step.name:9}  {step.text}", *(f"    {each}" for each in step.details)]
            print_lines(map(printable, lines))  # texts of the record can contain terminal sequences
        if contract and judged:
            print(report.render(judged, "contract"), end="")
    codes = {"ok": 0, "failed": 1, "not checked": EXIT_INCOMPLETE}
    raise typer.Exit(codes[verification.result])


def compare(
    before: Annotated[
        str,
        typer.Argument(metavar="A", help="A run directory or record, several joined by commas, or a folder."),
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="The same for the later side.")],
    fail_on: Annotated[
        Literal["regression"] | None,
        typer.Option("--fail-on", help="Exit with 1 on a regression, and with 3 if nothing could be compared."),
    ] = None,
    format: Annotated[
        Literal["markdown", "html"] | None, typer.Option(help="Print Markdown or an HTML page instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two records, or two sets of records: speeds of each part, failing parts, and facts that differ.

    Of several records a side, the medians are compared. GPUs are matched by serial number or UUID, else by node and
    index. A loss counts if it is larger than the spread between runs of one machine, after a correction for the number
    of speeds; docs/compare.md explains the numbers.
    """
    from dataclasses import asdict

    from seatrial.handover.compare import compare as compare_trials
    from seatrial.handover.compare_text import document, result_text
    from seatrial.report import html_page, markdown
    from seatrial.report.document import print_document

    if format and as_json:
        raise UsageError("--format prints a whole document: do not use --json with it")
    sides = _records(before), _records(after)
    comparison = compare_trials(*sides)
    if as_json:
        print_json({"result": result_text(comparison), "regression": comparison.has_regression, **asdict(comparison)})
    elif format:
        render = {"markdown": markdown.render_document, "html": html_page.render_document}[format]
        print(render(document(comparison, *sides)), end="")
    else:
        print_document(document(comparison, *sides), stdout())
    if fail_on and comparison.has_regression:
        raise typer.Exit(EXIT_REJECTED)
    if fail_on and not comparison.tested:
        raise typer.Exit(EXIT_INCOMPLETE)


def _records(text: str) -> list[Trial]:
    """The records of one side, with the verdicts of this version."""
    from seatrial.handover.history import find_records
    from seatrial.pipeline.rejudge import rejudge
    from seatrial.pipeline.run_directory import load_trial

    given = [Path(text)] if Path(text).exists() else [Path(part) for part in text.split(",")]
    paths: list[Path] = []
    for path in given:
        paths += (list(find_records(path)) if path.is_dir() else []) or [path]
    trials = [load_trial(path) for path in {path.resolve(): path for path in paths}.values()]
    runs = {(trial.host, trial.started): trial for trial in trials}  # a copy, as from a bundle, is no repetition
    return [rejudge(trial) for trial in runs.values()]


def history(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories that contain run directories.")],
    part: Annotated[
        str, typer.Option(metavar="SERIAL", help="Only runs with this part: a serial number, UUID, GPU or node.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List runs, one line each: start, trial, size, decision and failing parts.

    With --part, say in how many runs a part failed, and whether the fault moved with it. The records are not judged
    again. Results of earlier calls are kept in ~/.cache/seatrial and can be removed at any time.
    """
    from seatrial.handover.history import part_history, read_runs, summary

    runs = read_runs(folders)
    sightings = part_history(runs, part) if part else []
    shown = [each.run for each in sightings] or runs
    text = summary(part, sightings) if part else ""
    if as_json:
        print_json({"summary": text, "runs": shown})
        return
    _print_runs(shown, [f"{each.place}: {each.failure or 'did not fail'}" for each in sightings])
    print(printable(text), end="\n" if text else "")


def _print_runs(runs: Sequence[Run], parts: Sequence[str]) -> None:
    """Print one line for each run; ``parts``: what happened to a part in each, instead of all failing parts."""
    from seatrial.report.tables import Table, print_tables
    from seatrial.report.text import utc
    from seatrial.util.text import and_more

    rows: list[tuple[str, ...]] = []
    for number, run in enumerate(runs):
        if run.state != "finished":
            rows.append((run.path, "", "", "", run.state, run.note))
            continue
        failing = parts[number] if parts else and_more(list(run.failing), 3)
        started = utc(run.started, "%Y-%m-%d %H:%M")
        rows.append((run.path, started, run.trial, run.size, run.decision, failing))
    header = ("run", "started (UTC)", "trial", "size", "decision", "part" if parts else "failing")
    print_tables([Table("", rows, header)], stdout())
