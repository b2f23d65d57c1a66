"""Words a person types → one call; exit codes. Imports what a word needs when it is typed, so that help is instant."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seatrial import __version__
from seatrial.model import Outcome, SeatrialError, UsageError, Verb
from seatrial.util import signals

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

Names = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,…", help="Checks, or patterns such as 'train.*'; may be given again."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
RunPath = Annotated[Path, typer.Argument(help="A run directory, or a trial.json.")]
TrialName = Annotated[str, typer.Argument(help="quick, acceptance, burn-in, training, or a YAML file.")]
NodesOption = Annotated[int | None, typer.Option(help="Nodes that were promised.")]
GpusOption = Annotated[int | None, typer.Option(help="GPUs a node was promised; 0: use none.")]
LauncherOption = Annotated[str | None, typer.Option(help="auto, local or slurm.")]
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
    from seatrial.pipeline import run as pipeline
    from seatrial.pipeline.run_directory import Request, RunDir
    from seatrial.report.progress import Live

    overrides = _overrides(launcher, nodes, gpus_per_node, set_)
    if resume:
        _refuse_with_resume(trial != "quick", overrides, only, skip, out, dry_run)
        run_dir = RunDir.reopen(resume)
    else:
        resolved = pipeline.resolve(trial, overrides)
        request = Request(
            config=resolved.config,
            origins=resolved.origins,
            only=_names(only),
            skip=_names(skip),
            command=("seatrial", *sys.argv[1:]),
            started=time.time(),
        )
        if dry_run:
            _print_plan(pipeline.preview(request), as_json)
            return
        run_dir = RunDir.create(out or _fresh_folder(resolved.config.name), request)
    report = run_dir.path / "report.html"
    before = _version(report)
    try:
        with Live(_stderr()) as live:
            result = pipeline.run(run_dir, live)
    except SeatrialError:
        run_dir.discard()
        raise
    _finish(result, as_json, report if _version(report) != before else None)
    if result.stopped or any(verdict.outcome is Outcome.ERROR for verdict in result.verdicts):
        with contextlib.suppress(OSError):
            again = f"To measure what is missing: seatrial run --resume {run_dir.path}"
            print(f"{again} (with the same settings; to change one, start a new run)", file=sys.stderr)
    raise typer.Exit(EXIT_INTERRUPTED if result.stopped == pipeline.INTERRUPTED else EXIT_CODES[result.decision.value])


@app.command()
def discover(as_json: AsJson = False) -> None:
    """What this machine is. Reads only; puts no load on it."""
    from seatrial.pipeline.survey import discover as look
    from seatrial.report.inventory import print_inventory

    facts = look().facts
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
    launcher: Annotated[
        str, typer.Argument(help="local, slurm, or torchrun: commands to start by hand. oumi: its config.")
    ],
    trial: Annotated[str, typer.Argument(help="A trial, as for run; for oumi, a training config.")] = "quick",
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="torchrun: make this run directory, on a shared filesystem.")] = None,
) -> None:
    """The exact commands that a run would start."""
    if launcher == "oumi":
        from seatrial.train import oumi, train_config

        print(oumi.rendered(train_config.load(trial, set_ or ()), out or Path("RUN")), end="")
        return
    from seatrial.pipeline import run as pipeline
    from seatrial.pipeline.run_directory import Request

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
def train(
    config: Annotated[Path, typer.Argument(help="A training config that ships, such as throughput, or a .yaml file.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for what it writes; by default a new one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model: alone, or as one of many ranks under torchrun."""
    from seatrial.train import command

    command.train(config, set_ or [], out, as_json)
    from seatrial.bench.group import end_process  # not before: where torch is missing, the word says it better

    end_process()


@app.command()
def evaluate(
    config: Annotated[
        Path, typer.Argument(help="A training config that ships, such as toolcalls-qwen2-7b, or a file.")
    ],
    out: Annotated[Path, typer.Option(help="The training's --out.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score function calling before and after a training. Exit code 1: it did not get better."""
    from seatrial.train import hf, train_config
    from seatrial.train.function_calling import score

    record = hf.evaluate(train_config.load(config, set_ or ()), out)
    if as_json:
        _print_json(record)
    else:
        print(*score.table(record), f"Results: {out}/evaluation.json", sep="\n")
    raise typer.Exit(EXIT_CODES[Verb.ACCEPTED if record["gate"]["passed"] else Verb.REJECTED])


@app.command()
def judge(
    run: RunPath,
    baseline: Annotated[Path | None, typer.Option(help="Judge by this file of `baseline learn`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge an old run again, with the rules of this version. Needs no GPU, changes no file."""

    from seatrial.pipeline import run as pipeline
    from seatrial.pipeline.run_directory import load_trial

    result = pipeline.rejudge(load_trial(run), baseline)
    _finish(result, as_json)
    raise typer.Exit(EXIT_CODES[result.decision.value])


baseline_words = typer.Typer(no_args_is_help=True, help="What this site's good runs look like.")
app.add_typer(baseline_words, name="baseline")


@baseline_words.callback()
def _baseline_words() -> None:
    """Keeps ``learn`` a word of its own: with one command alone, typer would take it for the whole."""


@baseline_words.command()
def learn(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or trial.json files, of good runs.")],
    out: Annotated[Path, typer.Option(help="The file to write; must not be there yet.")],
    name: Annotated[str | None, typer.Option(help="Of the site; by default the file's.")] = None,
) -> None:
    """Learn a baseline from good runs, for `seatrial run --set baseline=FILE` and `judge RUN --baseline FILE`."""
    from seatrial.pipeline import run as pipeline

    text = pipeline.learn(name or out.stem, runs)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
    print(f"{out}: {text.count('gpus:')} values, runs: {len(runs)}")


@app.command()
def report(
    run: RunPath,
    format: Annotated[str, typer.Option(help="html, junit, prometheus, json or markdown.")] = "markdown",
) -> None:
    """A run's report in another format, on standard output."""
    from seatrial import report as reports
    from seatrial.pipeline.run_directory import load_trial

    print(reports.render(load_trial(run), format), end="")


@app.command()
def explain(
    paths: Annotated[list[Path], typer.Argument(help="Log files, run directories, or - for standard input.")],
    as_json: AsJson = False,
) -> None:
    """Logs → cause, first command to run, fix."""
    from seatrial.diagnose.signatures import signatures
    from seatrial.pipeline.run_directory import logs
    from seatrial.report.inventory import print_findings

    findings = [finding for path in paths for log in logs(path) for finding in _explained(log)]
    if as_json:
        _print_json([finding.model_dump(mode="json") for finding in findings])
    else:
        print_findings(findings, len(signatures()), _stdout())


_STDIN = Path("-")


def _explained(log: Path) -> tuple[Finding, ...]:
    """Findings for a log, or for standard input. Raises UsageError when it cannot be read."""
    from seatrial.diagnose import explain as explain_log

    try:
        if log == _STDIN:
            if sys.stdin is None:  # as Python finds it when a shell has closed it
                raise UsageError("standard input is closed")
            return explain_log(sys.stdin.buffer, "standard input")
        with log.open("rb") as file:
            return explain_log(file, str(log))
    except OSError as error:
        raise UsageError(f"cannot read {log}: {error.strerror or error}") from error


@app.command()
def schema() -> None:
    """The JSON Schema of trial.json."""
    from seatrial.model import Trial

    _print_json(Trial.model_json_schema())


def _overrides(
    launcher: str | None, nodes: int | None, gpus_per_node: int | None, assignments: list[str] | None
) -> list[tuple[str, str, Any]]:
    from seatrial.config.layers import parse_assignment

    flags = [
        ("--launcher", "launcher", launcher),
        ("--nodes", "cluster.nodes", nodes),
        ("--gpus-per-node", "cluster.gpus_per_node", gpus_per_node),
    ]
    given = [(flag, key, value) for flag, key, value in flags if value is not None]
    return [("--set", *parse_assignment(text)) for text in assignments or ()] + given


def _names(given: list[str] | None) -> tuple[str, ...]:
    return tuple(name.strip() for names in given or () for name in names.split(","))


def _refuse_with_resume(trial: bool, overrides: list[Any], *others: object) -> None:
    if trial or overrides or any(others):
        raise UsageError("--resume goes on with what the run directory holds: no trial, no other option goes with it")


def _fresh_folder(name: str) -> Path:
    """Made here, so that it is ours alone: two runs may begin in the same second."""
    stem = Path("seatrial-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in itertools.count(1):
        path = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"cannot write to {path}: {error.strerror}; name another folder with --out") from error
    return path


def _version(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


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
    from seatrial.report.console import Stream

    return Stream()


def _stderr() -> Console:
    from seatrial.report.console import Stream

    return Stream(stderr=True)


def _say(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nowhere to say it: the exit code still tells
        print(f"seatrial: {text}", file=sys.stderr)
    return code


def _prepare() -> None:
    """Signals and streams, as we need them."""
    signals.interrupt_once()
    for stream in (sys.stdout, sys.stderr):  # a path may hold any bytes, and a terminal may know only ASCII
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    _prepare()
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
            code = _say(traceback.format_exc(), EXIT_CODES[Verb.INCOMPLETE])
    sys.exit(code)
