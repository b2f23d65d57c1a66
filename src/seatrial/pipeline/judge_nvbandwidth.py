"""Results of nvbandwidth as measurements of the checks that measure the same."""

from __future__ import annotations

from pydantic import JsonValue

from seatrial.discover.nvbandwidth_output import Matrix, NvbandwidthOutput
from seatrial.model import Baseline, Metric, Outcome, Reason, Verdict, worst
from seatrial.model.benchmark import BenchmarkHardware, BenchmarkJudgement, BenchmarkResult
from seatrial.pipeline.benchmark_hardware import HardwareOptions, gpu_name
from seatrial.pipeline.benchmark_verdicts import NODE, BenchmarkRun, measured_by
from seatrial.util.text import and_more, plural

_TOOL = "nvbandwidth"
_WRONG_DATA = "Invalid value when checking the pattern"
_MAX_LISTED = 40  # testcases without a reference value that a note lists


def judge_output(
    output: NvbandwidthOutput, options: HardwareOptions, file: str, site: Baseline | None = None
) -> BenchmarkJudgement:
    """The verdicts on all testcases that a check of seatrial measures too; a note lists the others."""
    gpu, gpu_source, message = gpu_name(options, output.devices)
    problems = [message] if message and not gpu else []
    gpu_count = len(output.devices) or max((len(row) for matrix in output.matrices for row in matrix.rows), default=0)
    if options.gpus_per_node and gpu_count and gpu_count != options.gpus_per_node:
        problems.append(f"--gpus {options.gpus}: nvbandwidth measured {plural(gpu_count, 'GPU')}")
    if len(output.hosts) > 1:
        problems.append(
            "nvbandwidth of several nodes measures NVLink between them, for which no reference value is known"
        )
    elif (options.nodes or 1) > 1:
        problems.append("nvbandwidth measures one node: run it on each node, without --nodes")
    known = [matrix for matrix in output.matrices if matrix.name in measured_by(_TOOL)]
    results = [_result(matrix, gpu, problems, site) for matrix in known]
    results += [_failed_testcase(name, message) for name, message in output.failures.items()]
    others = [matrix.name for matrix in output.matrices if matrix not in known]
    notes = {
        "nvbandwidth": output.version,
        "message of nvbandwidth:": output.failure,
        "without a reference value, not judged:": and_more(others, _MAX_LISTED),
    }
    nodes_source = "output" if output.hosts else "nvbandwidth measures one"
    outcomes = [result.outcome for result in results]
    return BenchmarkJudgement(
        tool=_TOOL,
        file=file,
        outcome=worst([*outcomes, Outcome.UNJUDGED] if output.failure else outcomes),
        hardware=BenchmarkHardware(
            gpu=gpu,
            gpus_per_node=gpu_count or None,
            nodes=max(len(output.hosts), 1),
            sources={"gpu": gpu_source, "gpus_per_node": "output", "nodes": nodes_source} if gpu else {},
        ),
        contradictions=(message,) if gpu and message else (),
        notes=(*options.notes, *(f"{name} {value}" for name, value in notes.items() if value)),
        results=tuple(results),
    )


def _result(matrix: Matrix, gpu: str, problems: list[str], site: Baseline | None) -> BenchmarkResult:
    """The verdicts on one testcase: on each GPU, or each ordered pair of GPUs."""
    check, (declared, *_) = measured_by(_TOOL)[matrix.name]
    metrics = _metrics(matrix, declared.name)
    if not matrix.is_complete:
        problems = [*problems, f"the result is truncated; complete rows: {len(matrix.rows)}"]
    elif not metrics:
        problems = [*problems, "no pair of GPUs has a value: they have no peer access to each other"]
    result = BenchmarkResult(
        name=matrix.name,
        outcome=Outcome.UNJUDGED,
        variant=matrix.title,
        check=check.name,
        path="between the GPUs of one node" if declared.per == "ordered pair" else "between host and GPU",
        problems=tuple(problems),
    )
    if problems:
        return result
    gpus = max(map(len, matrix.rows))
    facts: dict[str, JsonValue] = {"gpu": gpu, "backend": "cuda", "world_size": 1, "nodes": 1, "node_gpus": gpus}
    run = BenchmarkRun(check=check, facts=facts, gpus_per_node=gpus, site=site)
    verdicts = tuple(map(run.with_next_step, run.verdicts([declared], metrics)))
    outcome, bound = worst(verdict.outcome for verdict in verdicts), run.bound(declared.reference, declared.bound)
    outcome = Outcome.UNJUDGED if outcome is Outcome.ERROR else outcome
    return result.model_copy(update={"outcome": outcome, "verdicts": verdicts, "bound": bound})


def _metrics(matrix: Matrix, name: str) -> list[Metric]:
    """The values as metrics. The arrow in the matrix's title shows whether rows or columns are the sources."""
    has_pairs = len(matrix.rows) > 1 or "GPU(row)" in matrix.title
    arrow = "{1}->gpu{0}" if "GPU(row) <- GPU(column)" in matrix.title else "{0}->gpu{1}"
    return [
        Metric(name=name, value=value, unit="GB/s", subject=f"{NODE}/gpu{(arrow if has_pairs else '{1}').format(i, j)}")
        for i, values in enumerate(matrix.rows)
        for j, value in enumerate(values)
        # versions before 0.4 print 0.00 on the diagonal
        if value is not None and not (has_pairs and i == j)
    ]


def _failed_testcase(name: str, message: str) -> BenchmarkResult:
    """The result of a testcase that ended with an error: FAIL if copied data is wrong, else UNJUDGED."""
    check = measured_by(_TOOL)[name][0].name if name in measured_by(_TOOL) else ""
    failed = BenchmarkResult(name=name, outcome=Outcome.UNJUDGED, check=check)
    if not message.startswith(_WRONG_DATA):
        return failed.model_copy(update={"problems": (f"the testcase ended with an error: {message}",)})
    verdict = Verdict(
        check,
        NODE,
        Outcome.FAIL,
        reasons=(Reason.MEASUREMENT_FAILED,),
        detail=f"copied data differs from its source: {message}",
        fix="Do not use this node. dcgmi diag -r 3; dmesg | grep -E 'Xid|SXid'",
    )
    return failed.model_copy(update={"outcome": Outcome.FAIL, "verdicts": (verdict,)})
