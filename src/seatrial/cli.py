"""Words a person types → one call; exit codes. Imports what a word needs when it is typed, so that help is instant."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seatrial import __version__
from seatrial.model import SeatrialError, UsageError, Verb

if TYPE_CHECKING:
    from rich.console import Console

    from seatrial.model import Finding, Trial

EXIT_CODES = {Verb.ACCEPTED: 0, Verb.REJECTED: 1, Verb.INCOMPLETE: 3}
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE  # as a shell shows a program that died of it

app = typer.Typer(
    help="Acceptance test for GPU clusters: from powered on to accepted, or what stands in the way.\n\n"
    "Exit codes: 0 accepted, 1 rejected, 2 usage or config error, 3 incomplete, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Names = Annotated[list[str] | None, typer.Option(help="Check, or pattern such as 'train.*'; may be given again.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
RunPath = Annotated[Path, typer.Argument(help="A run directory, or a trial.json.")]
TrialName = Annotated[str, typer.Argument(help="quick, acceptance, burn-in, or a YAML file.")]
NodesOption = Annotated[int | None, typer.Option(help="Nodes that were promised.")]
GpusOption = Annotated[int | None, typer.Option(help="GPUs a node was promised; 0: use none.")]
LauncherOption = Annotated[str | None, typer.Option(help="auto or local.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the trial.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"seatrial {__version__}")
        raise typer.Exit


@app.callback()
def _all_words(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    del version


@app.command()
def run(
    trial: TrialName = "quick",
    launcher: LauncherOption = None,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    only: Names = None,
    skip: Names = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; new or empty.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run directory.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its commands; start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a trial and decide."""
    from seatrial import trial as pipeline
    from seatrial.report.live import Live
    from seatrial.rundir import Request, RunDir

    overrides = _overrides(launcher, nodes, gpus_per_node, set_)
    if resume:
        _refuse_with_resume(trial != "quick", overrides, only, skip, out, dry_run)
        run_dir = RunDir.reopen(resume)
    else:
        resolved = pipeline.resolve(trial, overrides)
        request = Request(
            config=resolved.config,
            origins=resolved.origins,
            only=tuple(only or ()),
            skip=tuple(skip or ()),
            command=("seatrial", *sys.argv[1:]),
            started=time.time(),
        )
        if dry_run:
            _print_plan(pipeline.preview(request), as_json)
            return
        run_dir = RunDir.create(out or _fresh_folder(resolved.config.name), request)
    try:
        with Live(_stderr()) as live:
            result = pipeline.run(run_dir, live)
    except SeatrialError:
        run_dir.discard()
        raise
    _finish(result, as_json, run_dir.path / "report.html")
    if result.decision.value is Verb.INCOMPLETE:
        print(f"To measure what is missing: seatrial run --resume {run_dir.path}", file=sys.stderr)
    raise typer.Exit(EXIT_INTERRUPTED if result.stopped == pipeline.INTERRUPTED else EXIT_CODES[result.decision.value])


@app.command()
def discover(as_json: AsJson = False) -> None:
    """What this machine is. Reads only; puts no load on it."""
    from seatrial import trial as pipeline
    from seatrial.report.inventory import print_inventory

    facts = pipeline.discover().facts
    if as_json:
        _print_json(facts)
    else:
        print_inventory(facts, _stdout())


@app.command()
def checks(as_json: AsJson = False) -> None:
    """Every check: phase, scope, needs, rules."""
    from seatrial.checks import catalog
    from seatrial.report.inventory import checks_as_json, print_checks

    if as_json:
        _print_json(checks_as_json(catalog()))
    else:
        print_checks(catalog(), _stdout())


@app.command()
def render(
    launcher: Annotated[str, typer.Argument(help="local, slurm, or torchrun: commands to start by hand.")],
    trial: TrialName = "quick",
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="torchrun: make this run directory, on a shared filesystem.")] = None,
) -> None:
    """The exact commands that a run would start."""
    from seatrial import trial as pipeline
    from seatrial.rundir import Request

    resolved = pipeline.resolve(trial, _overrides(launcher, nodes, gpus_per_node, set_))
    request = Request(
        config=resolved.config,
        origins=resolved.origins,
        only=(),
        skip=(),
        command=("seatrial", *sys.argv[1:]),
        started=time.time(),
    )
    if out and resolved.config.launcher != "torchrun":
        raise UsageError("--out goes with torchrun only: the other launchers make their run directory themselves")
    preview = pipeline.prepare(request, out) if out else pipeline.preview(request)
    for _, text in preview.rendered:
        print(text)


@app.command()
def judge(run: RunPath, as_json: AsJson = False) -> None:
    """Judge an old run again, with the rules of this version. Needs no GPU, changes no file."""
    from seatrial import trial as pipeline
    from seatrial.rundir import load_trial

    result = pipeline.rejudge(load_trial(run))
    _finish(result, as_json)
    raise typer.Exit(EXIT_CODES[result.decision.value])


@app.command()
def report(
    run: RunPath,
    format: Annotated[str, typer.Option(help="html, junit, prometheus, json or markdown.")] = "markdown",
) -> None:
    """A run's report in another format, on standard output."""
    from seatrial import report as reports
    from seatrial.rundir import load_trial

    print(reports.render(load_trial(run), format), end="")


@app.command()
def explain(
    paths: Annotated[list[Path], typer.Argument(help="Log files, run directories, or - for standard input.")],
    as_json: AsJson = False,
) -> None:
    """Logs → cause, first command to run, fix."""
    from seatrial.diagnose import explain as explain_log
    from seatrial.diagnose.signatures import signatures
    from seatrial.report.inventory import print_findings

    try:
        findings = [
            finding
            for path in paths
            for log in _logs(path)
            for finding in (_explain_stdin() if log == _STDIN else explain_log(log))
        ]
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    if as_json:
        _print_json([finding.model_dump(mode="json") for finding in findings])
    else:
        print_findings(findings, len(signatures()), _stdout())


_STDIN = Path("-")
_LOG_ENDINGS = (".log", ".err", ".out")


def _logs(path: Path) -> list[Path]:
    """The logs of a run directory's jobs; a file is itself. Raises UsageError for a directory without logs."""
    if not path.is_dir():
        return [path]
    logs = sorted(log for log in (path / "jobs").rglob("*") if log.suffix in _LOG_ENDINGS and log.is_file())
    if not logs:
        raise UsageError(f"no logs (*.log, *.err, *.out) in {path / 'jobs'}")
    return logs


def _explain_stdin() -> list[Finding]:
    """Findings for standard input, by way of a temporary file: a pipe cannot be read from its end."""
    from seatrial.diagnose import explain as explain_log

    with tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        findings = explain_log(Path(copy.name))
    return [
        finding.model_copy(update={"source": finding.source.replace(copy.name, "standard input")})
        for finding in findings
    ]


@app.command()
def schema() -> None:
    """The JSON Schema of trial.json."""
    from seatrial.model import Trial

    _print_json(Trial.model_json_schema())


def _overrides(
    launcher: str | None, nodes: int | None, gpus_per_node: int | None, assignments: list[str] | None
) -> list[tuple[str, str, Any]]:
    from seatrial.config import parse_assignment

    flags = [
        ("--launcher", "launcher", launcher),
        ("--nodes", "cluster.nodes", nodes),
        ("--gpus-per-node", "cluster.gpus_per_node", gpus_per_node),
    ]
    given = [(flag, key, value) for flag, key, value in flags if value is not None]
    return [("--set", *parse_assignment(text)) for text in assignments or ()] + given


def _refuse_with_resume(trial: bool, overrides: list[Any], *others: object) -> None:
    if trial or overrides or any(others):
        raise UsageError("--resume goes on with what the run directory holds: no trial, no other option goes with it")


def _fresh_folder(name: str) -> Path:
    return Path("seatrial-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def _print_plan(preview: Any, as_json: bool) -> None:
    if as_json:
        _print_json([job.model_dump(mode="json") for job in preview.plan.jobs])
        return
    for measurement in preview.plan.settled:
        print(f"# not run: {measurement.check}: {measurement.skipped or measurement.error}")
    for name, flag in preview.plan.left_out.items():
        print(f"# left out by {flag}: {name}")
    for job, text in preview.rendered:
        print(f"# job {job.name}, at most {job.limit_s:.0f} s: {', '.join(job.checks)}\n{text}")


def _finish(result: Trial, as_json: bool, where: Path | None = None) -> None:
    from seatrial.report.terminal import summary

    if as_json:
        print(result.model_dump_json(indent=2))
        return
    summary(result, _stdout())
    if where:
        print(f"Report: {where}")


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _stdout() -> Console:
    from rich.console import Console

    return Console()


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _stop_once(_number: int, _frame: object) -> None:
    """The first Ctrl-C (or SIGTERM, or a lost terminal) ends the trial in order; a second does not cut that short."""
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt


def _say(text: str, code: int) -> int:
    print(f"seatrial: {text}", file=sys.stderr)
    return code


def main() -> None:
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, _stop_once)
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        code = _say(str(error), EXIT_USAGE)
    except SeatrialError as error:
        code = _say(str(error), EXIT_CODES[Verb.INCOMPLETE])
    except BrokenPipeError:  # who reads our output has gone, as `| head` does; that says nothing of the cluster
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        code = _say("interrupted", EXIT_INTERRUPTED)
    except Exception as error:  # typer's usage errors, a class that its versions keep in different places
        if hasattr(error, "show"):
            error.show()
            code = EXIT_USAGE
        else:  # a defect of ours, or a full disk behind stdout: Python's own exit code 1 would read as REJECTED
            traceback.print_exc()
            code = EXIT_CODES[Verb.INCOMPLETE]
    sys.exit(code)
