"""How long does it take to judge a large cluster, and how much memory?

    python benchmarks/judging.py [--record TRIAL.json] [--nodes 1024] [--gpus 8]

The measurements are those of a real run, told of as many nodes and GPUs as asked for: by default the shipped acceptance
of 4×H200, as 1,024 nodes of 8 GPUs, which share the samples of those four in memory. Printed are the seconds that
judging takes (verdicts, insights and the decision), and the peak memory of the process, measurements and all. To make
the measurements is not in that time, nor is to read them from a file. It exits with 1 where judging took 5 s of CPU or
the process 1 GiB: of CPU, since what else runs on the machine is not the judge's doing.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from seatrial.analysis import trial_insights
from seatrial.checks import catalog
from seatrial.checks.base import Check
from seatrial.config.schema import Cluster, Config
from seatrial.judge import judge
from seatrial.judge.decision import decide, metrics_without_threshold
from seatrial.model import CLUSTER, Job, Measurement, Metric, Scope, Trial
from seatrial.pipeline.run_directory import load_trial

RECORD = Path(__file__).parent.parent / "docs/results/2026-11-22-4xh200/acceptance.trial.json"
SECONDS, GIB = 5.0, 1.0  # the gates, meant for 1,024 nodes of 8 GPUs


def enlarged(trial: Trial, nodes: int, gpus: int) -> tuple[Config, tuple[Job, ...], list[Measurement]]:
    """The trial's config, jobs and measurements, as if they were of ``nodes`` nodes with ``gpus`` GPUs each."""
    config = Config.model_validate(trial.config)
    config = config.model_copy(update={"cluster": Cluster(nodes=nodes, gpus_per_node=gpus)})
    jobs = [_larger(job, nodes, gpus) for job in trial.jobs]
    places = {name: job for job in jobs for name in job.checks}
    checks = catalog()
    own: dict[str, list[Measurement]] = {}
    for one in trial.measurements:
        own.setdefault(one.check, []).append(one)
    found = [new for name, some in own.items() for new in _spread(checks[name], some, places.get(name))]
    return config, tuple(jobs), found


def _larger(job: Job, nodes: int, gpus: int) -> Job:
    promised = job.model_copy(update={"promised_nodes": nodes, "promised_gpus": gpus})
    if job.placement == "control":
        return promised
    ranks = gpus if job.placement == "ranks" else job.ranks_per_node
    return promised.model_copy(update={"nodes": nodes, "ranks_per_node": ranks})


def _spread(check: Check, measured: list[Measurement], job: Job | None) -> Iterator[Measurement]:
    """A measurement for each place of ``job``, after those of the record in turn.

    The first of each node speaks for it, as rank 0 does in the record; rank 0 itself speaks for the cluster, and alone
    of all nodes in a check that they make together, unless each is judged by itself.
    """
    if job is None or check.scope is Scope.CONTROL:
        yield from measured
        return
    leader, *others = sorted(measured, key=lambda one: one.rank or 0)
    nodes = [f"node{number:04}" for number in range(job.nodes)]
    for rank in range(job.process_count):
        node, local = nodes[rank // job.ranks_per_node], rank % job.ranks_per_node
        template = leader if local == 0 or not others else others[rank % len(others)]
        subject = f"{node}/gpu{local}" if job.placement == "ranks" else node
        own = [metric for metric in template.metrics if check.per_node or rank == 0 or metric.subject != CLUSTER]
        times = Counter(metric.name for metric in own if metric.subject != CLUSTER)
        of_all = {name for name, count in times.items() if count > 1 and job.placement == "ranks"}
        metrics = tuple(_moved(one, check, node, subject, template.subject) for one in own if one.name not in of_all)
        for_node = check.per_node or check.scope is not Scope.CLUSTER
        told_of = [node] if for_node else nodes if rank == 0 else []
        for name in sorted(of_all):
            some = [one for one in own if one.name == name]
            metrics += tuple(new for one in told_of for new in _everywhere(some, one, job.ranks_per_node, check))
        of_nodes = [one for one in metrics if check.required_per.get(one.name) == "node" and len(nodes) > 1]
        metrics = tuple(one for one in metrics if one not in of_nodes)
        metrics += tuple(replace(one, subject=each) for one in of_nodes for each in nodes)
        facts = template.facts
        if facts.get("world_size") == len(measured) > 1:
            facts = {**facts, "world_size": job.process_count, "nodes": job.nodes}
        series = () if rank else template.series
        changed = {"rank": rank, "subject": subject, "metrics": metrics, "facts": facts, "series": series}
        yield template.model_copy(update=changed)


def _moved(metric: Metric, check: Check, node: str, subject: str, old: str) -> Metric:
    """A metric of the place itself or of a GPU of its node, at the new place; one of the cluster stays.

    But for a check that judges each node by itself, which told of the cluster in older records.
    """
    if metric.subject == CLUSTER and not check.per_node:
        return metric
    moved = subject if metric.subject == old else f"{node}/{metric.subject.partition('/')[2]}".rstrip("/")
    return Metric(name=metric.name, value=metric.value, unit=metric.unit, subject=moved, samples=metric.samples)


def _everywhere(own: list[Metric], node: str, gpus: int, check: Check) -> Iterator[Metric]:
    """What one process told of each GPU of a node, or of its pairs, told of as many as there are now."""
    ordered = any(
        kind == "ordered pair" and fnmatchcase(own[0].name, name) for name, kind in check.required_per.items()
    )
    twos = itertools.permutations if ordered else itertools.combinations
    pairs = [f"gpu{a}->gpu{b}" for a, b in twos(range(gpus), 2)]
    places = pairs if "->" in own[0].subject else [f"gpu{index}" for index in range(gpus)]
    for place, like in zip(places, itertools.cycle(own), strict=False):
        subject = f"{node}/{place}"
        yield Metric(name=like.name, value=like.value, unit=like.unit, subject=subject, samples=like.samples)


def within(what: str, measured: float, gate: float, unit: str) -> bool:
    """Whether ``measured`` is under its gate, and a line that says so."""
    good = measured < gate
    print(f"{'PASS' if good else 'FAIL'}: {what} {measured:.2f} {unit}, to be under {gate:g} {unit}")
    return good


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--record", type=Path, default=RECORD)
    asked.add_argument("--nodes", type=int, default=1024)
    asked.add_argument("--gpus", type=int, default=8)
    options = asked.parse_args()
    trial = load_trial(options.record)
    config, jobs, measurements = enlarged(trial, options.nodes, options.gpus)
    metrics = sum(len(one.metrics) for one in measurements)
    began, worked = time.perf_counter(), time.process_time()
    verdicts = judge(config, jobs, measurements, catalog(), trial.excluded_checks)
    insights = trial_insights(config, measurements, catalog())
    required = {name: check.required for name, check in config.checks.items()}
    recorded = metrics_without_threshold(catalog(), measurements, verdicts)
    decision = decide(required, verdicts, trial.excluded_checks, "a benchmark", metrics_without_threshold=recorded)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    print(f"{options.nodes} nodes × {options.gpus} GPUs: {len(measurements):,} measurements, {metrics:,} metrics")
    print(f"{len(verdicts):,} verdicts, {len(insights)} insights, {decision.value}")
    print(f"judged in {seconds:.2f} s ({cpu:.2f} s of CPU); peak memory {peak:.2f} GiB")
    held = [within("CPU time", cpu, SECONDS, "s"), within("peak memory", peak, GIB, "GiB")]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
