"""Judges results of nvbandwidth by the rules and reference values of the checks transfer.host and transfer.peers."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.discover.nvbandwidth_output import Matrix, NvbandwidthOutput
from seatrial.hardware.bounds import hardware_bound
from seatrial.hardware.links import Links
from seatrial.hardware.references import References, select_references
from seatrial.judge.plausibility import metric_lookup
from seatrial.judge.rules import judge_check
from seatrial.model import Baseline, Measurement, Metric, Outcome, Reason, Verdict, worst
from seatrial.model.benchmark import BenchmarkBound, BenchmarkHardware, BenchmarkJudgement, BenchmarkResult
from seatrial.pipeline.benchmark_hardware import HardwareOptions, gpu_name
from seatrial.pipeline.next_step import with_next_step
from seatrial.util.text import and_more, plural

# Testcase → check and metric of seatrial that measure the same: copies by the GPU's copy engines
_METRICS = {
    "host_to_device_memcpy_ce": ("transfer.host", "h2d_single"),
    "device_to_host_memcpy_ce": ("transfer.host", "d2h_single"),
    "device_to_device_memcpy_read_ce": ("transfer.peers", "unidirectional"),
    "device_to_device_memcpy_write_ce": ("transfer.peers", "unidirectional"),
    "device_to_device_bidirectional_memcpy_read_ce_total": ("transfer.peers", "bidirectional"),
    "device_to_device_bidirectional_memcpy_write_ce_total": ("transfer.peers", "bidirectional"),
}
_NODE = "node"  # subject of verdicts, since only some versions of nvbandwidth name their host
_WRONG_DATA = "Invalid value when checking the pattern"
_MAX_LISTED = 40  # testcases without a reference value that a note lists


def judge_output(
    output: NvbandwidthOutput, options: HardwareOptions, file: str, baseline: Baseline | None = None
) -> BenchmarkJudgement:
    """Return the verdicts on all testcases that a check of seatrial measures too; a note lists the others."""
    gpu = gpu_name(options, output.devices)
    problems = [gpu.problem] if gpu.problem else []
    contradictions = [gpu.contradiction] if gpu.contradiction else []
    row_lengths = [len(row) for matrix in output.matrices for row in matrix.rows]
    gpu_count = len(output.devices) or max(row_lengths, default=0)
    if options.gpus_per_node and gpu_count and gpu_count != options.gpus_per_node:
        problems.append(f"--gpus {options.gpus_text}: nvbandwidth measured {plural(gpu_count, 'GPU')}")
    host_count = len(output.hosts)
    if host_count > 1:
        problems.append(
            "nvbandwidth of several nodes measures NVLink between them, for which no reference value is known"
        )
    elif (options.nodes or 1) > 1:
        problems.append("nvbandwidth measures one node: run it on each node, without --nodes")
    links = Links(mig_models=frozenset(name for name in output.devices if " MIG " in name))
    references = select_references(links, baseline)
    results = [
        _judge_matrix(matrix, gpu.name, references, problems) for matrix in output.matrices if matrix.name in _METRICS
    ]
    results += [_failed_testcase(name, message) for name, message in output.failures.items()]
    without_check = [matrix.name for matrix in output.matrices if matrix.name not in _METRICS]
    notes = [*options.notes]
    if output.version:
        notes.append(f"nvbandwidth {output.version}")
    if output.failure:
        notes.append(f"message of nvbandwidth: {output.failure}")
    if without_check:
        notes.append(f"without a reference value, not judged: {and_more(without_check, _MAX_LISTED)}")
    nodes_source = "output" if host_count else "nvbandwidth measures one"
    sources = {"gpu": gpu.source, "gpus_per_node": "output", "nodes": nodes_source} if gpu.name else {}
    outcomes = [result.outcome for result in results]
    if output.failure:
        outcomes.append(Outcome.UNJUDGED)
    return BenchmarkJudgement(
        tool="nvbandwidth",
        file=file,
        outcome=worst(outcomes),
        hardware=BenchmarkHardware(
            gpu=gpu.name,
            gpus_per_node=gpu_count or None,
            nodes=max(host_count, 1),
            sources=sources,
        ),
        contradictions=tuple(contradictions),
        notes=tuple(notes),
        results=tuple(results),
    )


def _judge_matrix(matrix: Matrix, gpu: str, references: References, problems: Sequence[str]) -> BenchmarkResult:
    """Return the verdicts on one testcase: on each GPU, or each ordered pair of GPUs."""
    check_name, metric = _METRICS[matrix.name]
    check = catalog()[check_name]
    rules = tuple(rule for rule in check.rules if rule.metric == metric)
    facts: dict[str, JsonValue] = {"gpu": gpu, "backend": "cuda", "world_size": 1, "nodes": 1}
    metrics = _metrics(matrix, metric)
    problems = list(problems)
    if not matrix.is_complete:
        problems.append(f"the result is truncated; complete rows: {len(matrix.rows)}")
    elif not metrics:
        problems.append("no pair of GPUs has a value: they have no peer access to each other")
    verdicts: tuple[Verdict, ...] = ()
    bound = None
    if metrics and not problems:
        gpu_count = max(map(len, matrix.rows))
        measurements = [
            Measurement(
                check=check_name,
                subject=f"{_NODE}/gpu{index}",
                rank=index,
                facts=facts,
                # the value of a pair of GPUs belongs to the source GPU
                metrics=tuple(value for value in metrics if value.subject.partition("->")[0] == f"{_NODE}/gpu{index}"),
            )
            for index in range(gpu_count)
        ]
        verdicts = tuple(
            with_next_step(verdict, gpu)
            for verdict in judge_check(check, measurements, {}, "", references, rules=rules)
        )
        link_bound = hardware_bound(metric_lookup(check, metric, rules[0].reference), facts, references)
        if link_bound:
            bound = BenchmarkBound(value=link_bound.value, unit=link_bound.unit, derivation=link_bound.derivation)
    outcome = worst(verdict.outcome for verdict in verdicts)
    return BenchmarkResult(
        name=matrix.name,
        outcome=Outcome.UNJUDGED if outcome is Outcome.ERROR else outcome,
        variant=matrix.title,
        check=check_name,
        path="between the GPUs of one node" if check_name == "transfer.peers" else "between host and GPU",
        bound=bound,
        verdicts=verdicts,
        problems=tuple(problems),
    )


def _metrics(matrix: Matrix, metric: str) -> list[Metric]:
    """Return the values as metrics. The arrow in the matrix's title shows whether rows or columns are the sources."""
    if len(matrix.rows) == 1 and "GPU(row)" not in matrix.title:
        return [
            Metric(name=metric, value=value, unit="GB/s", subject=f"{_NODE}/gpu{column}")
            for column, value in enumerate(matrix.rows[0])
            if value is not None
        ]
    is_reversed = "GPU(row) <- GPU(column)" in matrix.title
    metrics = []
    for row, values in enumerate(matrix.rows):
        for column, value in enumerate(values):
            if row != column and value is not None:  # versions before 0.4 print 0.00 on the diagonal
                source, target = (column, row) if is_reversed else (row, column)
                subject = f"{_NODE}/gpu{source}->gpu{target}"
                metrics.append(Metric(name=metric, value=value, unit="GB/s", subject=subject))
    return metrics


def _failed_testcase(name: str, message: str) -> BenchmarkResult:
    """Return the result of a testcase that ended with an error: FAIL if copied data is wrong, else UNJUDGED."""
    check, _ = _METRICS.get(name, ("", ""))
    if message.startswith(_WRONG_DATA):
        verdict = Verdict(
            check,
            _NODE,
            Outcome.FAIL,
            reasons=(Reason.MEASUREMENT_FAILED,),
            detail=f"copied data differs from its source: {message}",
            fix="Do not use this node. dcgmi diag -r 3; dmesg | grep -E 'Xid|SXid'",
        )
        return BenchmarkResult(name=name, outcome=Outcome.FAIL, check=check, verdicts=(verdict,))
    problem = f"the testcase ended with an error: {message}"
    return BenchmarkResult(name=name, outcome=Outcome.UNJUDGED, check=check, problems=(problem,))
