"""Measures CPU time and memory of judging a large cluster.

    python benchmarks/judging.py [--record TRIAL.json] [--nodes 1024] [--gpus 8] [--reports]

Copies the measurements of a real run to the given number of nodes and GPUs: by default the shipped acceptance of 4×H200
to 1,024 nodes of 8 GPUs, which share the samples in memory. Prints the duration of judging (verdicts, insights and
decision) and the peak memory of the process, including the measurements. Creating or reading the measurements is not
timed. Exits with 1 if judging takes 5 s of CPU time or more, or the process 1 GiB or more. CPU time does not depend on
the other load of the machine.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import time
import uuid
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from pydantic import JsonValue
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.checks.check import Check
from seatrial.checks.declare import SubjectKind, stored_number
from seatrial.config.schema import Cluster, Config
from seatrial.judge import judge
from seatrial.judge.decision import decide, metrics_without_threshold
from seatrial.judge.insights import trial_insights
from seatrial.model import CLUSTER, Job, Measurement, Metric, Scope, Trial
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import FORMATS, render
from seatrial.util.gc_pause import gc_paused

RECORD = record_path("2026-11-22-4xh200/acceptance")
MAX_CPU_S, MAX_GIB = 5.0, 1.0  # thresholds for 1,024 nodes of 8 GPUs


def scale_trial(trial: Trial, nodes: int, gpus: int) -> tuple[Config, tuple[Job, ...], list[Measurement]]:
    """Config, jobs and measurements of ``trial``, copied to ``nodes`` nodes with ``gpus`` GPUs each.

    Without the checks that the trial skipped: more nodes would measure them.
    """
    recorded: dict[str, list[Measurement]] = {}
    for measurement in trial.measurements:
        if not measurement.skipped:
            recorded.setdefault(measurement.check, []).append(measurement)
    config = Config.model_validate(trial.config)
    settings = {name: config.checks[name] for name in recorded}
    config = config.model_copy(update={"cluster": Cluster(nodes=nodes, gpus_per_node=gpus), "checks": settings})
    jobs = [_scale_job(job, nodes, gpus, recorded) for job in trial.jobs]
    job_by_check = {name: job for job in jobs for name in job.checks}
    checks = catalog()
    scaled = [
        copy
        for name, measurements in recorded.items()
        for copy in _scale_measurements(checks[name], measurements, job_by_check.get(name))
    ]
    return config, tuple(jobs), scaled


def _scale_job(job: Job, nodes: int, gpus: int, recorded: Container[str]) -> Job:
    checks = tuple(name for name in job.checks if name in recorded)
    scaled = job.model_copy(update={"checks": checks, "expected_nodes": nodes, "expected_gpus": gpus})
    if job.placement == "control":
        return scaled
    ranks = gpus if job.placement == "ranks" else job.ranks_per_node
    return scaled.model_copy(update={"nodes": nodes, "ranks_per_node": ranks})


def _scale_measurements(check: Check, recorded: list[Measurement], job: Job | None) -> Iterator[Measurement]:
    """A measurement for each process of ``job``, copied from the recorded ones in turn.

    The first process of each node has the node's metrics, like rank 0 in the record. Rank 0 alone has the metrics of
    the cluster and, in a cluster check without per-node verdicts, those of all nodes.
    """
    if job is None or check.scope is Scope.CONTROL:
        yield from recorded
        return
    leader, *others = sorted(recorded, key=lambda measurement: measurement.rank or 0)
    nodes = [f"node{number:04}" for number in range(job.nodes)]
    for rank in range(job.process_count):
        node, local = nodes[rank // job.ranks_per_node], rank % job.ranks_per_node
        template = leader if local == 0 or not others else others[rank % len(others)]
        subject = f"{node}/gpu{local}" if job.placement == "ranks" else node
        source = [metric for metric in template.metrics if check.per_node or rank == 0 or metric.subject != CLUSTER]
        counts = Counter(metric.name for metric in source if metric.subject != CLUSTER)
        # metrics that one process reports for several GPUs
        multi_gpu = {name for name, count in counts.items() if count > 1 and job.placement == "ranks"}
        metrics = tuple(
            _move_metric(metric, check, node, subject, template.subject)
            for metric in source
            if metric.name not in multi_gpu
        )
        per_node = check.per_node or check.scope is not Scope.CLUSTER
        reported_nodes = [node] if per_node else nodes if rank == 0 else []
        for name in sorted(multi_gpu):
            same_name = [metric for metric in source if metric.name == name]
            metrics += tuple(
                copy
                for reported in reported_nodes
                for copy in _copy_to_all_gpus(same_name, reported, job.ranks_per_node, check)
            )
        of_nodes = [metric for metric in metrics if _per(check, metric.name) == "node" and len(nodes) > 1]
        metrics = tuple(metric for metric in metrics if metric not in of_nodes)
        metrics += tuple(replace(metric, subject=each_node) for metric in of_nodes for each_node in nodes)
        if rank == 0:
            metrics += tuple(_metrics_of_many_nodes(check, metrics, job.nodes))
        facts = _with_distinct_gpus(template.facts, node, job.expected_gpus or job.ranks_per_node)
        if facts.get("world_size") == len(recorded) > 1:
            facts = {**facts, "world_size": job.process_count, "nodes": job.nodes}
        series = () if rank else template.series
        changed = {"rank": rank, "subject": subject, "metrics": metrics, "facts": facts, "series": series}
        yield template.model_copy(update=changed)


def _with_distinct_gpus(facts: dict[str, JsonValue], node: str, gpus: int) -> dict[str, JsonValue]:
    """``facts`` in which each GPU of ``node`` has a serial number, UUID and PCI address of its own."""
    listed = facts.get("gpus")
    recorded = [gpu for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []
    if not recorded:
        return facts
    copies: list[JsonValue] = [
        {
            **recorded[index % len(recorded)],
            "index": index,
            "serial": f"{165_000_000_000 + 8 * int(node.removeprefix('node')) + index}",
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{node}/gpu{index}")),
            "pci_bus_id": f"0000:{0x10 + index:02x}:00.0",
        }
        for index in range(gpus)
    ]
    return {**facts, "gpus": copies}


def _metrics_of_many_nodes(check: Check, metrics: Sequence[Metric], nodes: int) -> Iterator[Metric]:
    """Copies of the cluster's metrics for the rules that apply to this number of nodes only, such as another size."""
    names = {metric.name for metric in metrics}
    for rule in check.rules:
        if rule.when.min_nodes > 1 and rule.when.includes(nodes) and rule.metric not in names:
            family = "busbw." if rule.metric.startswith("busbw") else "wrong_elements"
            template = next(metric for metric in metrics if metric.name.startswith(family))
            yield replace(template, name=rule.metric)


def _per(check: Check, metric: str) -> SubjectKind | None:
    declared = check.declaration(metric)
    return declared.per if declared else None


def _move_metric(metric: Metric, check: Check, node: str, subject: str, old: str) -> Metric:
    """``metric`` with its subject ``old``, or a GPU of its node, replaced by ``subject`` or a GPU of ``node``.

    A cluster metric is unchanged, except in a per-node check, whose older records used the subject cluster.
    """
    if metric.subject == CLUSTER and not check.per_node:
        return metric
    moved = subject if metric.subject == old else f"{node}/{metric.subject.partition('/')[2]}".rstrip("/")
    return Metric(name=metric.name, value=metric.value, unit=metric.unit, subject=moved, samples=metric.samples)


def _copy_to_all_gpus(metrics: list[Metric], node: str, gpus: int, check: Check) -> Iterator[Metric]:
    """``metrics`` of one name, reported by one process per GPU or GPU pair, copied to all GPUs or pairs of ``node``."""
    name = metrics[0].name
    ordered = _per(check, name) == "ordered pair"
    pairs_of = itertools.permutations if ordered else itertools.combinations
    pairs = [f"gpu{a}->gpu{b}" for a, b in pairs_of(range(gpus), 2)]
    subjects = pairs if "->" in metrics[0].subject else [f"gpu{index}" for index in range(gpus)]
    for subject, metric in zip(subjects, itertools.cycle(metrics), strict=False):
        yield Metric(
            name=name, value=metric.value, unit=metric.unit, subject=f"{node}/{subject}", samples=metric.samples
        )


def below_threshold(name: str, value: float, threshold: float, unit: str) -> bool:
    """Whether ``value`` is below ``threshold``; prints the result."""
    passed = value < threshold
    print(f"{'PASS' if passed else 'FAIL'}: {name} {value:.2f} {unit}, expected < {threshold:g} {unit}")
    return passed


def print_report_times(trial: Trial) -> None:
    """Print CPU time and size of each report and of the record, and the time to read the record."""
    texts: dict[str, str] = {}
    for format in FORMATS:
        start = time.process_time()
        texts[format] = render(trial, format)
        print(f"{format}: {time.process_time() - start:.1f} s of CPU, {len(texts[format].encode()) / 1e6:.2f} MB")
    start = time.process_time()
    Trial.model_validate_json(texts["json"])
    print(f"json read: {time.process_time() - start:.1f} s of CPU")


def with_stored_digits(measurement: Measurement) -> Measurement:
    """``measurement`` as a run stores it today; records before 2026-11-29 have all digits."""

    def stored(metric: Metric) -> Metric:
        return replace(metric, value=stored_number(metric.value), samples=tuple(map(stored_number, metric.samples)))

    metrics = tuple(stored(metric) if metric.samples else metric for metric in measurement.metrics)
    return measurement.model_copy(update={"metrics": metrics})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--reports", action="store_true", help="also render all reports, and print their time and size")
    options = parser.parse_args()
    trial = load_trial(options.record)
    trial = trial.model_copy(update={"measurements": tuple(map(with_stored_digits, trial.measurements))})
    config, jobs, measurements = scale_trial(trial, options.nodes, options.gpus)
    metrics = sum(len(measurement.metrics) for measurement in measurements)
    start, cpu_start = time.perf_counter(), time.process_time()
    with gc_paused():  # as in pipeline/rejudge.py
        verdicts = judge(config, jobs, measurements, catalog(), trial.excluded_checks)
        insights = trial_insights(config, measurements, catalog())
        required = {name: check.required for name, check in config.checks.items()}
        unjudged = metrics_without_threshold(catalog(), measurements, verdicts)
        decision = decide(required, verdicts, trial.excluded_checks, "a benchmark", metrics_without_threshold=unjudged)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    if options.reports:
        changed: dict[str, Any] = {
            "config": config.model_dump(mode="json"),
            "jobs": jobs,
            "measurements": tuple(measurements),
        }
        changed |= {"verdicts": verdicts, "insights": tuple(insights), "decision": decision, "findings": ()}
        print_report_times(trial.model_copy(update=changed))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    print(f"{options.nodes} nodes × {options.gpus} GPUs: {len(measurements):,} measurements, {metrics:,} metrics")
    print(f"{len(verdicts):,} verdicts, {len(insights)} insights, {decision.value}")
    print(f"judged in {seconds:.2f} s ({cpu:.2f} s of CPU); peak memory {peak:.2f} GiB")
    passed = [below_threshold("CPU time", cpu, MAX_CPU_S, "s"), below_threshold("peak memory", peak, MAX_GIB, "GiB")]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
