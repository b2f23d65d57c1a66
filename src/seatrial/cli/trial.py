"""Commands that write or read the record of a trial: run, render, judge, baseline learn, ticket, schema."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli.options import (
    EXIT_CODES,
    EXIT_CODES_OF_OUTCOMES,
    EXIT_INTERRUPTED,
    AsJson,
    BaselineOption,
    BudgetOption,
    ExcludeOption,
    GpusOption,
    GroupOption,
    LauncherOption,
    MinNodesOption,
    NodelistOption,
    NodesOption,
    NoLocalizeOption,
    OnlyOption,
    SetOption,
    SkipOption,
    TimeLimitOption,
    TopologyOption,
    TrialName,
    VerboseOption,
    check_names,
    collect_overrides,
    create_out_folder,
)
from seatrial.cli.output import print_json, print_lines, print_result, stderr
from seatrial.model import TIME_LIMIT, JobState, Outcome, SeatrialError, UsageError
from seatrial.util.gc_pause import gc_ignores_imports

if TYPE_CHECKING:
    from seatrial.config.layers import ResolvedTrial
    from seatrial.config.schema import Override
    from seatrial.model import Job, Trial
    from seatrial.pipeline.benchmark_file import BenchmarkFile
    from seatrial.pipeline.benchmark_hardware import HardwareOptions
    from seatrial.pipeline.preview import Preview
    from seatrial.pipeline.run_directory import Request, RunDir

RENDERED = ("slurm", "local", "torchrun", "kubernetes", "jobset", "trainjob", "oumi")  # values of LAUNCHER for render


def run(
    trial: TrialName = "quick",
    launcher: LauncherOption = None,
    nodes: NodesOption = None,
    min_nodes: MinNodesOption = None,
    gpus_per_node: GpusOption = None,
    nodelist: NodelistOption = None,
    exclude: ExcludeOption = None,
    topology: TopologyOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Run directory: new or empty.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    group: GroupOption = None,
    time_limit: TimeLimitOption = None,
    budget: BudgetOption = None,
    no_localize: NoLocalizeOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its commands; start nothing.")] = False,
    verbose: VerboseOption = False,
    as_json: AsJson = False,
) -> None:
    """Run a trial, judge its measurements and print the decision."""
    from seatrial.pipeline import run as pipeline
    from seatrial.pipeline.planned_jobs import resolve
    from seatrial.pipeline.preview import preview
    from seatrial.pipeline.run_directory import RunDir
    from seatrial.report.progress import Live

    overrides = collect_overrides(
        set_,
        launcher=launcher,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        min_nodes=min_nodes,
        nodelist=nodelist,
        exclude=exclude,
        topology=topology,
        no_localize=False if no_localize else None,
        group=group,
        budget=budget,
    )
    if resume:
        others = [key for _, key, _ in overrides if not key.startswith("slurm.")]
        if any((trial != "quick", others, only, skip, out, time_limit, dry_run)):
            raise UsageError(
                "--resume continues with the settings of the run directory: give no trial and no other option than "
                "--set slurm.KEY=VALUE, after a rejected job"
            )
        run_dir = RunDir.reopen(resume)
        if overrides:
            run_dir.change_slurm(overrides)
    else:
        request = _request(resolve(trial, overrides), only, skip, time_limit)
        if dry_run:
            _print_plan(preview(request), request.config.launcher, as_json)
            return
        run_dir = RunDir.create(out or new_run_folder(request.config.name), request)
    report = run_dir.path / "report.html"
    earlier_report = _file_identity(report)
    try:
        with Live(stderr()) as live:
            result = pipeline.run(run_dir, live)
    except SeatrialError:
        run_dir.remove_if_unused()
        raise
    new_report = report if _file_identity(report) != earlier_report else None
    _print_end(result, run_dir, new_report, as_json=as_json, verbose=verbose)
    interrupted = result.stop_reason == pipeline.INTERRUPTED
    raise typer.Exit(EXIT_INTERRUPTED if interrupted else EXIT_CODES[result.decision.value])


def _print_end(result: Trial, run_dir: RunDir, new_report: Path | None, *, as_json: bool, verbose: bool) -> None:
    """Print the result of a run; for a --resume that had nothing to measure, only the decision."""
    if run_dir.is_unchanged and not as_json:
        print(f"nothing to resume: all checks of the run are measured; decision {result.decision.value}")
        print(f"Report: {run_dir.path / 'report.html'}")
        return
    print_result(result, as_json, run_dir.path, verbose=verbose)
    if new_report and not as_json:
        print(f"Report: {new_report}")
    if result.stop_reason or any(verdict.outcome is Outcome.ERROR for verdict in result.verdicts):
        with contextlib.suppress(OSError):
            is_rejected = bool(result.results) and result.results[-1].state is JobState.REJECTED
            correction = " --set slurm.KEY=VALUE (only if a setting was wrong)" if is_rejected else ""
            command = result.new_run_command or f"seatrial run --resume {run_dir.path}{correction}"
            print(f"To measure the missing checks: {command}", file=sys.stderr)


def _request(
    resolved: ResolvedTrial, only: list[str] | None, skip: list[str] | None, time_limit: float | None = None
) -> Request:
    """Return the request of this command, which starts now. ``time_limit`` in minutes."""
    from seatrial.pipeline.run_directory import Request

    return Request(
        config=resolved.config,
        origins=resolved.origins,
        only=check_names(only),
        skip=check_names(skip),
        command=("seatrial", *sys.argv[1:]),
        started=time.time(),
        time_limit_s=None if time_limit is None else 60 * time_limit,
    )


def new_run_folder(name: str) -> Path:
    """Create a new run directory; a number is added if another run started in the same second."""
    base = Path("seatrial-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"cannot write to {path}: {error.strerror}; name another directory with --out") from error
    return path


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time, which change when the file is replaced; None if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _print_plan(preview: Preview, launcher: str, as_json: bool) -> None:
    """Print the plan as comments, and the jobs as `seatrial render` does."""
    from seatrial.checks import catalog
    from seatrial.report.plan_text import plan_lines
    from seatrial.report.progress import duration_text
    from seatrial.util.grouping import grouped

    if as_json:
        print_json([job for job, _ in preview.rendered])
        return
    plan = preview.plan
    lines = [*plan_lines(plan.jobs, plan.excluded_checks, catalog(), plan.checks_not_run, as_root=preview.as_root)]
    not_run = grouped((each.skipped or each.error, each.check) for each in plan.not_run)
    lines += [f"not run: {reason}: {', '.join(names)}" for reason, names in not_run.items()]
    # plan_lines names those that the time limit excludes
    lines += [f"excluded by {flag}: {name}" for name, flag in plan.excluded_checks.items() if flag != TIME_LIMIT]
    lines += preview.notes
    if job := preview.localization:
        lines.append(
            f"not counted: job {job.name}, about {duration_text(job.expected_s)}, "
            f"at most {duration_text(job.limit_s)}: {job.checks[0]}, "
            "only if a multi-node metric violates a threshold; --no-localize turns it off"
        )
    lines += [
        f"job {job.name}, at most {duration_text(job.limit_s)}: {', '.join(job.checks)}" for job, _ in preview.rendered
    ]
    print(*(f"# {line}" for line in lines), sep="\n")
    _print_jobs(preview.rendered, launcher)


def _print_jobs(rendered: Iterable[tuple[Job, str]], launcher: str) -> None:
    for job, text in rendered:
        if job.placement == "control" and launcher == "kubernetes":  # a script between objects is no YAML
            print(f"# job {job.name} runs on the host of `seatrial run`: {', '.join(job.checks)}")
        else:
            print(text)


@gc_ignores_imports()  # no collection when the process exits
def render(
    launcher: Annotated[
        str,
        typer.Argument(
            help="local, slurm, torchrun: print the commands. kubernetes, jobset, trainjob: print the objects for "
            "kubectl. oumi: print the Oumi config."
        ),
    ],
    trial: Annotated[str, typer.Argument(help="A trial as for run; for oumi, a training config.")] = "quick",
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    nodelist: NodelistOption = None,
    exclude: ExcludeOption = None,
    topology: TopologyOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory to create, on a shared filesystem (only torchrun).")
    ] = None,
    group: GroupOption = None,
) -> None:
    """Print the exact commands, sbatch scripts or Kubernetes objects of a run."""
    if launcher == "oumi":
        from seatrial.train import oumi, train_config

        if trial == "quick":  # the default, which is a trial
            raise UsageError(
                "render oumi needs a CONFIG: a shipped training config, such as throughput, or a .yaml file"
            )
        print(oumi.render(train_config.load(trial, set_ or ()), out or Path("RUN")), end="")
        return
    if launcher not in RENDERED:
        from seatrial.config.expect import nearest

        raise UsageError(f"unknown LAUNCHER {launcher!r}{nearest(launcher, RENDERED)}; expected {', '.join(RENDERED)}")
    from seatrial.pipeline.planned_jobs import plan_request, planning_host, rendered_jobs, resolve

    if launcher in ("jobset", "trainjob"):
        launcher, set_ = "kubernetes", [*(set_ or ()), f"kubernetes.workload={launcher}"]
    overrides = collect_overrides(
        set_,
        launcher=launcher,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        nodelist=nodelist,
        exclude=exclude,
        topology=topology,
        group=group,
    )
    resolved = resolve(trial, overrides)
    request = _request(resolved, only, skip)
    if out and resolved.config.launcher != "torchrun":
        raise UsageError("--out requires torchrun: the other launchers create their run directory in `seatrial run`")
    if out:
        from seatrial.pipeline.preview import prepare

        rendered = prepare(request, out)
    else:
        plan = plan_request(request, planning_host(request.config))
        rendered = rendered_jobs(request.config, plan.jobs)
    _print_jobs(rendered, launcher)


def judge(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A run directory, a trial.json, output of nccl-tests or nvbandwidth (also .gz), or - for stdin.",
        ),
    ],
    baseline: BaselineOption = None,
    trial: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Judge by thresholds and required checks of this trial, such as those of a contract."
        ),
    ] = None,
    set_: SetOption = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="Print html, junit, prometheus, json, markdown, csv, summary (JSON) or contract."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the report as an HTML page.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the record with the new verdicts, and all reports.")
    ] = None,
    why_not: Annotated[
        bool, typer.Option("--why-not", help="Print only the reasons that prevent ACCEPTED, at most five.")
    ] = False,
    verbose: VerboseOption = False,
    gpus: Annotated[
        str | None, typer.Option(metavar="NxMODEL", help="GPUs per node and model, such as 8xH200.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes that the benchmark ran on.")] = None,
    nics: Annotated[str | None, typer.Option(metavar="NxGBPS", help="Network ports of a node, such as 8x400.")] = None,
    fabric: Annotated[str | None, typer.Option(help="ib, roce, efa, tcp, tcpx, tcpxo or mnnvl.")] = None,
    operation: Annotated[
        str | None, typer.Option(help="all_reduce, all_gather, …, if the output does not name it.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Value of NCCL_ALGO in the benchmark's run, such as Ring.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a finished run, or the output of nccl-tests or nvbandwidth, with the rules of this version.

    Needs no GPU, changes no file of the run. The options from --gpus to --algorithm describe the hardware of a
    benchmark whose output does not. Exit codes for a benchmark: 0 PASS or WARN, 1 FAIL, 2 unknown format, 3 UNJUDGED.
    """
    from seatrial.pipeline.benchmark_file import open_benchmark
    from seatrial.pipeline.benchmark_hardware import HardwareOptions

    hardware = HardwareOptions(gpus, nodes, nics, fabric, algorithm)
    if benchmark := open_benchmark(run):
        of_run = {"why-not": why_not, "trial": trial, "set": set_, "format": format, "html": html, "out": out}
        _refuse(of_run, "is for a run of seatrial: a benchmark has no decision")
        raise typer.Exit(_judge_benchmark(benchmark, hardware, operation or "", baseline, as_json))
    if run.exists():
        of_benchmark = {"gpus": gpus, "nodes": nodes, "nics": nics, "fabric": fabric}
        of_benchmark |= {"operation": operation, "algorithm": algorithm}
        _refuse(of_benchmark, "is for the output of nccl-tests or nvbandwidth: a record has its hardware")
    if format and (why_not or as_json):
        raise UsageError("--format prints a whole report: use neither --why-not nor --json with it")
    result, run_dir = _judged(run, baseline, trial, collect_overrides(set_))
    if out:
        from seatrial.report import write_all

        create_out_folder(out)
        write_all(result, out)
    if html:
        _write_page(html, _rendered(result, run, run_dir, "html"))
    if why_not:
        _print_reasons(result, run_dir, as_json)
    elif format:
        print(_rendered(result, run, run_dir, format), end="")
    else:
        print_result(result, as_json, run_dir, verbose=verbose)
    raise typer.Exit(EXIT_CODES[result.decision.value])


def _refuse(options: Mapping[str, object], reason: str) -> None:
    """Raise UsageError for the first option that is given."""
    for name, value in options.items():
        if value:
            raise UsageError(f"--{name} {reason}")


def _judge_benchmark(
    benchmark: BenchmarkFile, hardware: HardwareOptions, operation: str, baseline: Path | None, as_json: bool
) -> int:
    """Print the judgement of a benchmark's output, and return the exit code."""
    from seatrial.report.benchmark import lines

    judgement = benchmark.judge(hardware, operation, baseline)
    if as_json:
        print_json(judgement)
    else:
        print("\n".join(lines(judgement)))
    return EXIT_CODES_OF_OUTCOMES[judgement.outcome]


def _rendered(result: Trial, run: Path, run_dir: Path | None, format: str) -> str:
    """The report in one of FORMATS; a page shows the SHA-256 of the record that was judged."""
    from seatrial.report import render

    file = run / "trial.json" if run.is_dir() else run
    return render(result, format, run_dir, file.read_bytes() if file.is_file() else b"")


def _print_reasons(result: Trial, run_dir: Path | None, as_json: bool) -> None:
    from seatrial.report.why_not import lines, paragraphs

    if as_json:
        print_json(lines(result, run_dir))
    else:
        print_lines(paragraphs(result, run_dir))


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write --html {path}: {error.strerror or error}") from error


def _judged(
    run: Path,
    baseline: Path | None = None,
    trial: str | None = None,
    overrides: Sequence[Override] = (),
) -> tuple[Trial, Path | None]:
    """Return the record with the verdicts of this version, and its run directory, if it is in one."""
    from seatrial.pipeline.rejudge import rejudge
    from seatrial.pipeline.run_directory import load_trial

    judged = rejudge(load_trial(run), baseline, trial or "", overrides)  # raises UsageError if ``run`` cannot be read
    return judged, run if run.is_dir() else run.parent if run.name == "trial.json" else None


def learn(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories or trial.json files of accepted runs.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write; must not exist.")],
    name: Annotated[str | None, typer.Option(help="Name of the site; by default that of the file.")] = None,
) -> None:
    """Learn reference values from accepted runs, for `run --set baseline=FILE` and `judge RUN --baseline FILE`."""
    from seatrial.judge.limits import MIN_BASELINE_RUNS
    from seatrial.pipeline.rejudge import learn as learn_baseline
    from seatrial.util.grouping import grouped
    from seatrial.util.text import plural

    distinct = []
    for run, *again in grouped((run.resolve(), run) for run in runs).values():
        distinct.append(run)
        if again:
            print(f"seatrial: {run} is given {len(again) + 1} times and counts as one run", file=sys.stderr)
    text = learn_baseline(name or out.stem, distinct)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
    value_count = text.count("gpus:")  # a key that each reference value has once
    print(f"{out}: {plural(value_count, 'reference value')} from {plural(len(distinct), 'run')}")
    if len(distinct) < MIN_BASELINE_RUNS:
        print(
            f"seatrial: a baseline of fewer than {MIN_BASELINE_RUNS} runs gives WARN instead of PASS to a metric "
            "without a published reference value",
            file=sys.stderr,
        )


def ticket(
    run: Annotated[Path, typer.Argument(help="A run directory or a trial.json.")],
    part: Annotated[
        str | None, typer.Argument(help="The part, such as node3/gpu5; by default the worst part that fails.")
    ] = None,
) -> None:
    """Print a ticket for the vendor of a bad part: serial number and slot, figures, evidence, what was ruled out."""
    from seatrial.report.ticket import render

    result, run_dir = _judged(run)
    print(render(result, part or "", run_dir), end="")


def schema() -> None:
    """Print the JSON Schema of trial.json."""
    from seatrial.model import Trial

    print_json(Trial.model_json_schema())
