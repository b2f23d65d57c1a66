"""Draws whole records from measured noise and counts the decisions: false alarms, and faults that are rejected.

    python benchmarks/decision_power.py [--shapes 1x1 1x8 …] [--draws 300] [--processes N] [--json FILE]
    python benchmarks/decision_power.py --uniform [--draws 100] [--json FILE]  # every GPU equally slow: what is found
    python benchmarks/decision_power.py --curve [--json FILE] [--figure SVG]  # rejected by slowdown, noise, samples
    python benchmarks/decision_power.py --coverage [--json FILE]  # of the 95 % interval on correlated windows

Noise and differences between runs and devices come from the healthy H200 and H100 runs in docs/results: each metric of
a draw is the value of a record, times the ratio of a random run to the median run, times that of a random device to the
median of its run, times the windows of a random measurement relative to their median, in order of time. Trainings of
different runs are compared by their share of the GEMM rate. Bad checks are drawn again as the pipeline measures them
again, by the same functions. Decisions are those of a trial of the checks in CHECKS. Checks of the network between
nodes are in network_decisions.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.judging import scale_trial
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware.references import skus
from seatrial.hardware.training_flops import training_work
from seatrial.judge import checks_to_retry, judge
from seatrial.judge.decision import decide
from seatrial.judge.insights.power import detectable_slowdown, rejected_share
from seatrial.model import CLUSTER, BasisKind, DecisionValue, Job, Measurement, Metric, Outcome, Trial, Verdict
from seatrial.pipeline.run_directory import load_trial
from seatrial.util.quantiles import median_interval

HEALTHY_RUNS = (
    "2026-11-21-4xh200/acceptance",
    "2026-11-21-4xh200/repeat-1",
    "2026-11-21-4xh200/repeat-2",
    "2026-11-22-2xh200-restructured/before-acceptance",
    "2026-11-22-2xh200-restructured/after-acceptance",
    "2026-11-22-2xh200-restructured/final-acceptance",
    "2026-11-22-4xh200/acceptance",
    "2026-11-22-4xh200/fabric-1",
    "2026-11-22-4xh200/fabric-2",
    "2026-11-23-1xh200-second/acceptance",
    "2026-11-23-1xh200-third/acceptance",
    "2026-11-23-2xh200/acceptance",
    "2026-11-24-1xh200/acceptance",
    "2026-11-28-1xh200/acceptance",
    "2026-11-28-2xh200/acceptance",
    "2026-11-28-2xh200-second/acceptance",
    "2026-11-28-4xh100/acceptance",
)
FIRST_TRAINING_OF_TODAY = "2026-11-23"  # train.ddp had another model before
# GPUs of a node → the record whose values are drawn; a node of 8 GPUs has those of 4
RECORDS = {
    1: "2026-11-28-1xh200/acceptance",
    2: "2026-11-28-2xh200-second/acceptance",
    4: "2026-11-28-4xh100/acceptance",
    8: "2026-11-28-4xh100/acceptance",
}
COMPUTE = ("device.gemm", "device.memory", "device.burn")
TRAININGS = ("train.throughput", "train.ddp", "train.fsdp")
INVENTORY = "host.inventory"  # its facts give the bounds
CHECKS = (INVENTORY, *COMPUTE, "transfer.host", "transfer.peers", "collectives.gpu_pairs", *TRAININGS)
REQUIRED_SHARE = 0.99
NOT_GOOD = (Outcome.FAIL, Outcome.UNJUDGED, Outcome.WARN)
GEMM = replace(
    catalog()["device.gemm"],
    declared=tuple(each for each in catalog()["device.gemm"].declared if each.name == "tflops.bf16"),
)
LIMIT = GEMM.rules[0].share("reference") or 0.0
Key = tuple[str, str]  # check, metric
Change = Callable[[str, Metric, int, np.random.Generator], Metric]  # check, metric, number of the retry
SLOW_GPU = "node0000/gpu0"


def scaled(metric: Metric, factors: float | np.ndarray) -> Metric:
    """The metric with its value and samples times ``factors``; an array has one factor per sample."""
    samples = tuple((np.asarray(metric.samples) * factors).tolist())
    value = median(samples) if samples else metric.value * float(np.median(factors))
    return Metric(name=metric.name, value=value, unit=metric.unit, subject=metric.subject, samples=samples)


def is_rate(metric: Metric) -> bool:
    return "/s" in metric.unit


def healthy(_check: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
    return metric


def slow_gpu(check: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
    """Compute and memory samples of one GPU are 12 % lower, and trainings on it or with it."""
    subjects = (SLOW_GPU, "node0000", CLUSTER) if check in TRAININGS else (SLOW_GPU,)
    is_affected = check in (*COMPUTE, *TRAININGS) and metric.subject in subjects and is_rate(metric)
    return scaled(metric, 0.88) if is_affected else metric


def slow_memory(check: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
    """Only the memory of one GPU is 12 % slower."""
    is_affected = check == "device.memory" and metric.subject == SLOW_GPU and is_rate(metric)
    return scaled(metric, 0.88) if is_affected else metric


def slow_host_link(check: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
    """One GPU copies to and from the host at 88 %."""
    is_affected = check == "transfer.host" and metric.subject == SLOW_GPU and is_rate(metric)
    return scaled(metric, 0.88) if is_affected else metric


def slow_node(_check: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
    """All rates of one node are 12 % lower, and the trainings of all nodes."""
    is_affected = metric.subject.startswith("node0000") or metric.subject == CLUSTER
    return scaled(metric, 0.88) if is_affected and is_rate(metric) else metric


def missing_nvlinks(check: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
    """One pair of GPUs has 15 of its 18 NVLinks."""
    pair = metric.subject in ("node0000/gpu0->gpu1", "node0000/gpu1->gpu0")
    is_affected = pair and check in ("transfer.peers", "collectives.gpu_pairs")
    return scaled(metric, 15 / 18) if is_affected and metric.unit in ("GB/s", "of the best") else metric


def half_of_windows_at_half_speed(_check: str, metric: Metric, _retry: int, rng: np.random.Generator) -> Metric:
    """Half of all windows of every rate run at half speed."""
    return slow_windows(metric, 0.5, 0.5, rng)


def windows_at_a_twentieth(_check: str, metric: Metric, _retry: int, rng: np.random.Generator) -> Metric:
    """4 of 10 windows of every rate run at a twentieth of the speed."""
    return slow_windows(metric, 0.4, 0.05, rng)


def slow_windows(metric: Metric, share: float, speed: float, rng: np.random.Generator) -> Metric:
    if not is_rate(metric) or len(metric.samples) < 2:
        return metric
    factors = np.ones(len(metric.samples))
    factors[rng.permutation(len(factors))[: round(share * len(factors))]] = speed
    return scaled(metric, factors)


def wandering_gpu(check: str, metric: Metric, retry: int, _rng: np.random.Generator) -> Metric:
    """Another GPU of the node computes at half speed in each measurement."""
    is_affected = check in COMPUTE and metric.subject == f"node0000/gpu{(2, 0, 3)[retry]}" and is_rate(metric)
    return scaled(metric, 0.5) if is_affected else metric


@dataclass(frozen=True)
class Case:
    """What is drawn. ``level``: every value that has a published reference is this share of it, else as measured.

    ``spread``, ``noise``: relative standard deviation of the devices and of the windows, instead of and beside the
    measured one. ``min_gpus``: of a node.
    """

    change: Change = healthy
    level: float | None = None
    spread: float = 0.0
    noise: float = 0.0
    min_gpus: int = 1
    wanted: DecisionValue = DecisionValue.REJECTED


HEALTHY = {
    "healthy": Case(wanted=DecisionValue.ACCEPTED),
    "healthy, 3 % more noise of windows": Case(noise=0.03, wanted=DecisionValue.ACCEPTED),
    "healthy at 93 % of the references, GPUs differ by 1 %": Case(
        level=0.93, spread=0.01, wanted=DecisionValue.ACCEPTED
    ),
}
FAULTS = {
    "one GPU 12 % slow": Case(slow_gpu),
    "one GPU 12 % slow, all at 103 % of the references": Case(slow_gpu, level=1.03),
    "memory of one GPU 12 % slow": Case(slow_memory),
    "host link of one GPU 12 % slow": Case(slow_host_link),
    "one node 12 % slow": Case(slow_node),
    "one node 12 % slow, all at 103 % of the references": Case(slow_node, level=1.03),
    "one NVLink pair without 3 links": Case(missing_nvlinks, min_gpus=2),
    "half of all windows at half speed": Case(half_of_windows_at_half_speed),
    "4 of 10 windows at a twentieth": Case(windows_at_a_twentieth),
    "slow GPU that wanders": Case(wandering_gpu, min_gpus=4),
}


@dataclass
class Noise:
    """Per check and metric: ratios of runs to the median run and of devices to the median of their run, both by GPUs
    of the node, and windows relative to their median.

    For a training, instead of ratios of runs: those of the share of the GEMM rate to the median of the GPU model.
    """

    run_ratios: dict[tuple[Key, int], list[float]]
    device_ratios: dict[tuple[Key, int], list[float]]
    windows: dict[Key, list[np.ndarray]]

    @classmethod
    @cache
    def measured(cls) -> Noise:
        """The noise of all healthy runs."""
        device_ratios: dict[tuple[Key, int], list[float]] = defaultdict(list)
        windows: dict[Key, list[np.ndarray]] = defaultdict(list)
        medians: dict[tuple[Key, tuple[object, int]], list[float]] = defaultdict(list)  # by GPU model and GPUs
        for name in HEALTHY_RUNS:
            trial = load_trial(record_path(name))
            tokens = tokens_at_gemm_rate(trial)
            has_old_trainings = name < FIRST_TRAINING_OF_TODAY
            facts = next(each.facts for each in trial.measurements if each.check == "device.gemm")
            values: dict[Key, list[float]] = defaultdict(list)
            for measurement in trial.measurements:
                if has_old_trainings and measurement.check in TRAININGS:
                    continue
                for metric in filter(is_rate, measurement.metrics):
                    key = measurement.check, metric.name
                    if len(metric.samples) > 1 and metric.value > 0:
                        samples = np.array(metric.samples[:60])
                        windows[key].append(samples / np.median(samples))
                    values[key].append(metric.value / tokens.get(key, 1.0))
            gpus = sum(each.check == "device.gemm" for each in trial.measurements)
            for key, run_values in values.items():
                if (middle := median(run_values)) > 0:
                    device_ratios[key, gpus] += [value / middle for value in run_values]
                    medians[key, (facts.get("gpu"), gpus)].append(middle)
        run_ratios: dict[tuple[Key, int], list[float]] = defaultdict(list)
        for (key, (_model, gpus)), of_runs in medians.items():
            run_ratios[key, gpus] += [value / median(of_runs) for value in of_runs if len(of_runs) > 2]
        return cls(run_ratios, device_ratios, windows)


def tokens_at_gemm_rate(trial: Trial) -> dict[Key, float]:
    """Check and metric of each training → the tokens/s/GPU that the median GEMM rate of the run allows."""
    rates = defaultdict(list)
    for measurement in trial.measurements:
        for metric in measurement.metrics if measurement.check == "device.gemm" else ():
            rates[metric.name.removeprefix("tflops.")].append(metric.value)
    tokens = {}
    for measurement in trial.measurements:
        for metric in measurement.metrics if measurement.check in TRAININGS else ():
            work = training_work(metric.name, measurement.facts)
            if work and work.flops_per_token and work.spec_key in rates:
                possible = 1e12 * median(rates[work.spec_key]) / work.flops_per_token
                tokens[measurement.check, metric.name] = possible
    return tokens


@dataclass
class Generator:
    """Draws the measurements of trials on ``nodes`` nodes with ``gpus`` GPUs, and decides on them.

    ``measured_gpus``: of the record. ``checks``: those that are judged. ``middles``: the value of the record of a
    metric. ``references``: the published one.
    """

    measured_gpus: int
    checks: tuple[str, ...]
    config: Config
    jobs: tuple[Job, ...]
    template: list[Measurement]
    noise: Noise
    middles: Mapping[Key, float]
    references: Mapping[Key, float]

    @classmethod
    def for_shape(cls, nodes: int, gpus: int, checks: Sequence[str] = CHECKS) -> Generator:
        trial = load_trial(record_path(RECORDS[gpus]))
        config, jobs, template = scale_trial(trial, nodes, gpus)
        config = config.model_copy(
            update={"checks": {name: each for name, each in config.checks.items() if name in checks}}
        )
        jobs = tuple(
            job.model_copy(update={"checks": names})
            for job in jobs
            if (names := tuple(name for name in job.checks if name in checks))
        )
        used = [each for each in template if each.check in (*checks, INVENTORY, "device.gemm")]
        values = defaultdict(list)
        for measurement in used:
            for metric in measurement.metrics:
                values[measurement.check, metric.name].append(metric.value)
        references = {
            (verdict.check, verdict.metric): basis.expected
            for verdict in judge(config, jobs, used, catalog(), {})
            for basis in (verdict.basis, *verdict.other_limits)
            if basis and basis.kind is BasisKind.SKU and basis.expected
        }
        middles = {key: median(each) for key, each in values.items()}
        names = tuple(config.checks)
        measured_gpus = sum(each.check == "device.gemm" for each in trial.measurements)
        return cls(measured_gpus, names, config, jobs, used, Noise.measured(), middles, references)

    def decide(self, case: Case, rng: np.random.Generator) -> DecisionValue:
        """The decision on one draw."""
        return decide(dict.fromkeys(self.checks, True), self.verdicts(case, rng), {}, "a benchmark").value

    def verdicts(self, case: Case, rng: np.random.Generator) -> Sequence[Verdict]:
        """The verdicts on one draw, with the retries that the pipeline would make."""
        runs: dict[Key, float] = {}
        drawn = {each.check for each in self.template}
        first, retries = list(self._draw(case, drawn, 0, runs, rng)), list[Measurement]()
        for number in (1, 2):
            names = checks_to_retry(self.config, first, retries, catalog(), number)
            retries += self._draw(case, names, number, runs, rng)
        return judge(self.config, self.jobs, first, catalog(), {}, retries=retries)

    def _draw(
        self, case: Case, checks: Iterable[str], retry: int, runs: dict[Key, float], rng: np.random.Generator
    ) -> Iterator[Measurement]:
        names = set(checks)
        for measurement in (measurement for measurement in self.template if measurement.check in names):
            check = measurement.check
            metrics = tuple(
                case.change(check, self._metric(case, check, metric, runs, rng), retry, rng)
                for metric in measurement.metrics
            )
            yield measurement.model_copy(update={"metrics": metrics, "retry": retry})

    def _metric(
        self, case: Case, check: str, metric: Metric, runs: dict[Key, float], rng: np.random.Generator
    ) -> Metric:
        """``metric`` of another healthy device and run, measured at another time; unchanged if it has no noise.

        ``runs``: the ratio of this draw's run; added where it is not drawn yet.
        """
        key = check, metric.name
        noise = self.noise
        if not is_rate(metric) or key not in noise.windows:
            return metric
        windows = noise.windows[key][rng.integers(len(noise.windows[key]))]
        windows = windows * (1 + case.noise * rng.standard_normal(len(windows)))
        if case.level and key in self.references:
            value = case.level * self.references[key] * (1 + case.spread * rng.standard_normal())
        else:
            of_shape = key, self.measured_gpus
            if key not in runs:
                runs[key] = rng.choice(noise.run_ratios.get(of_shape) or [1.0])
            value = self.middles[key] * runs[key] * rng.choice(noise.device_ratios.get(of_shape) or [1.0])
        samples = tuple((value * windows).tolist())
        return scaled(Metric(name=metric.name, value=0, unit=metric.unit, subject=metric.subject, samples=samples), 1.0)


def count_decisions(
    shapes: Sequence[tuple[int, int]],
    draws: int,
    large_draws: int,
    processes: int,
    cases: Mapping[str, Case] | None = None,
) -> list[dict[str, object]]:
    """Decisions by nodes × GPUs and case, printed as they come."""
    rows = list[dict[str, object]]()
    for nodes, gpus in shapes:
        generator = Generator.for_shape(nodes, gpus)
        for name, case in (cases or {**HEALTHY, **FAULTS}).items():
            if gpus < case.min_gpus:
                continue
            count = draws if nodes <= 2 else large_draws
            decisions = Counter(decide_all(generator, case, [(nodes, gpus, draw) for draw in range(count)], processes))
            bound = lower_bound(decisions[case.wanted], count)
            row = {"nodes": nodes, "gpus": gpus, "case": name, "draws": count, "wanted": case.wanted.value}
            rows.append({**row, **decisions, "at_least": bound})
            print(
                f"{nodes:>4} × {gpus}  {name:<54} {dict(decisions)}  {case.wanted} in at least {bound:.1%}", flush=True
            )
    return rows


def decide_all(generator: Generator, case: Case, seeds: Sequence[tuple[int, ...]], processes: int) -> list[str]:
    """The decisions of one draw per seed, drawn and judged in ``processes`` processes."""
    # forked, since a process of a pool would have to unpickle the generator
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def decide_share(first: int) -> None:
        results.put([generator.decide(case, np.random.default_rng(seed)).value for seed in seeds[first::processes]])

    workers = [context.Process(target=decide_share, args=(first,)) for first in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()  # the names of decisions fit into the queue's pipe, so that no process waits for a reader
        if worker.exitcode:
            raise SystemExit(f"a process of the benchmark ended with exit code {worker.exitcode}")
    return [decision for _ in workers for decision in results.get()]


def uniform_slowness(draws: int, gpus: Sequence[int] = (1, 2, 4), only: str = "") -> Iterator[dict[str, object]]:
    """For each speed metric of one node: the smallest slowdown of all its parts that is found, and by which base.

    ``rejected``, ``warned``: the smallest slowdown in percent with FAIL, or with WARN, UNJUDGED or FAIL, in 99 % of the
    draws; None: a metric at 5 % of its speed has no such outcome.
    """
    for count in gpus:
        trial = load_trial(record_path(RECORDS[count]))
        for check in (name for name in trial.config["checks"] if only in name):
            measured = [each for each in trial.measurements if each.check == check]
            names = sorted({each.name for one in measured for each in one.metrics if is_rate(each)})
            rules = {rule.metric for rule in catalog()[check].rules}
            for name in (name for name in names if name in rules):
                generator = Generator.for_shape(1, count, (check,))
                rejected = smallest_slowdown(generator, check, name, (Outcome.FAIL,), draws)
                warned = smallest_slowdown(generator, check, name, NOT_GOOD, draws)
                row: dict[str, object] = {"gpus": count, "check": check, "metric": name}
                row |= {"rejected": rejected[0], "base": rejected[1], "warned": warned[0], "warned_by": warned[1]}
                print(json.dumps(row), flush=True)
                yield row


def smallest_slowdown(
    generator: Generator, check: str, name: str, outcomes: Sequence[Outcome], draws: int
) -> tuple[int | None, str]:
    """The smallest slowdown in percent with one of ``outcomes`` in 99 % of the draws, and the base of the verdicts."""
    bases = Counter[str]()

    def is_found(percent: int) -> bool:
        def slow(of: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
            return scaled(metric, 1 - percent / 100) if (of, metric.name) == (check, name) else metric

        found = 0
        bases.clear()
        for draw in range(draws):
            verdicts = generator.verdicts(Case(slow), np.random.default_rng((percent, draw)))
            bad = [each for each in verdicts if (each.check, each.metric) == (check, name) and each.outcome in outcomes]
            found += bool(bad)
            bases[bad[0].basis.name or bad[0].basis.kind.value if bad and bad[0].basis else "none"] += 1
            if draw + 1 - found > draws * (1 - REQUIRED_SHARE):
                return False
        return True

    low, high = 0, 95
    if not is_found(high):
        return None, ""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_found(middle) else (middle, high)
    is_found(high)
    return high, bases.most_common(1)[0][0]


def lower_bound(successes: int, draws: int) -> float:
    """The one-sided 95 % lower bound of a share (Clopper and Pearson, 1934), by bisection."""
    low, high = 0.0, successes / draws
    for _ in range(50):
        middle = (low + high) / 2
        tail = sum(binomial(draws, count, middle) for count in range(successes, draws + 1))
        low, high = (middle, high) if tail < 0.05 else (low, middle)
    return low


def binomial(draws: int, count: int, share: float) -> float:
    return comb(draws, count) * share**count * (1 - share) ** (draws - count)


def power_curve(draws: int = 200) -> list[dict[str, object]]:
    """Share of rejected draws by slowdown, noise and samples: by the arithmetic, and by draws of one metric."""
    rows: list[dict[str, object]] = []
    for noise, samples in itertools.product((0.003, 0.01, 0.03, 0.05), (10, 20, 40)):
        for slowdown in (0.08, 0.10, 0.11, 0.12, 0.13, 0.15, 0.20):
            rng = np.random.default_rng(1)
            rejected = sum(is_gpu_rejected(1 - slowdown, noise, samples, rng) for _ in range(draws))
            row = {"noise": noise, "samples": samples, "slowdown": slowdown, "rejected": rejected / draws}
            row["arithmetic"] = round(rejected_share(slowdown, LIMIT, noise, samples), 4)
            row["detectable_slowdown"] = round(detectable_slowdown(LIMIT, noise, samples), 4)
            rows.append({**row})
            print(row, flush=True)
    return rows


def is_gpu_rejected(speed: float, noise: float, samples: int, rng: np.random.Generator) -> bool:
    """Whether one H200 of this relative speed fails in device.gemm, with the retries that the pipeline would make."""
    checks, config = {"device.gemm": GEMM}, Config(name="curve", checks={"device.gemm": CheckSettings()})
    first, retries = [gemm(speed, noise, samples, 0, rng)], list[Measurement]()
    for number in (1, 2):
        if checks_to_retry(config, first, retries, checks, number):
            retries.append(gemm(speed, noise, samples, number, rng))
    verdicts = judge(config, (), first, checks, {}, retries=retries)
    return any(verdict.outcome is Outcome.FAIL and verdict.metric for verdict in verdicts)


def gemm(speed: float, noise: float, samples: int, retry: int, rng: np.random.Generator) -> Measurement:
    """A measurement of bf16 products with normal noise, relative to the reference value of the H200."""
    references = (sku.expected["gemm.bf16"] for sku in skus() if "NVIDIA H200" in sku.nvml_names)
    values = next(references)[0].value * speed * (1 + noise * rng.standard_normal(samples))
    metric = Metric(name="tflops.bf16", value=0, unit="TFLOP/s", subject="n0/gpu0", samples=tuple(values.tolist()))
    facts = {"gpu": "NVIDIA H200", "world_size": 1, "nodes": 1, "backend": "cuda", "has_bf16": "yes"}
    return Measurement(check="device.gemm", subject="n0/gpu0", metrics=(scaled(metric, 1.0),), facts=facts, retry=retry)


def figure(rows: Sequence[dict[str, object]], samples: int = 20) -> str:
    """The power curve as SVG: share of rejected trials by slowdown, one line per noise; dots are draws."""
    width, height, left, top = 900, 480, 70, 40
    colours = ("#1b9e77", "#7570b3", "#d95f02", "#e7298a")

    def x(slowdown: float) -> float:
        return left + (slowdown - 0.08) / 0.12 * (width - left - 150)

    def y(share: float) -> float:
        return top + (1 - share) * (height - top - 60)

    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    parts.append(
        f'<text x="{left}" y="22" font-weight="bold">Share of trials that reject a slow GPU '
        f"(limit 90 % of the reference, {samples} samples per measurement)</text>"
    )
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line x1="{left}" x2="{x(0.2)}" y1="{y(share)}" y2="{y(share)}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(share) + 5}" text-anchor="end">{share:.0%}</text>')
    parts += [
        f'<text x="{x(slowdown)}" y="{height - 36}" text-anchor="middle">{slowdown:.0%}</text>'
        for slowdown in (0.08, 0.1, 0.12, 0.15, 0.2)
    ]
    parts.append(f'<text x="{x(0.14)}" y="{height - 12}" text-anchor="middle">slowdown of the GPU</text>')
    for colour, noise in zip(colours, (0.003, 0.01, 0.03, 0.05), strict=True):
        slowdowns = [0.08 + 0.12 * step / 120 for step in range(121)]
        points = " ".join(f"{x(d):.1f},{y(rejected_share(d, LIMIT, noise, samples)):.1f}" for d in slowdowns)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for row in rows:
            if (row["noise"], row["samples"]) == (noise, samples):
                centre = f'cx="{x(float(str(row["slowdown"]))):.1f}" cy="{y(float(str(row["rejected"]))):.1f}"'
                parts.append(f'<circle {centre} r="5" fill="{colour}"/>')
        label = y(0.95 - 0.09 * colours.index(colour))
        parts.append(f'<text x="{x(0.2) + 12}" y="{label}" fill="{colour}">noise {noise:.1%}</text>')
    parts.append(f'<text x="{x(0.2) + 12}" y="{y(0.5)}">lines: arithmetic</text>')
    parts.append(f'<text x="{x(0.2) + 12}" y="{y(0.43)}">dots: 200 draws</text>')
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">{"".join(parts)}</svg>'
    )


def coverage(draws: int = 2000) -> list[dict[str, object]]:
    """Share of intervals that contain the median, by number of windows and lag-1 correlation."""
    rows: list[dict[str, object]] = []
    for windows in (10, 30, 100, 300, 1000):
        for correlation in (0.0, 0.3, 0.6, 0.9):
            rng, covered, inconclusive = np.random.default_rng(windows), 0, 0
            for _ in range(draws):
                interval = median_interval(autoregressive(windows, correlation, rng))
                inconclusive += interval is None
                covered += interval is not None and interval[0] <= 0 <= interval[1]
            rows.append(
                {
                    "windows": windows,
                    "correlation": correlation,
                    "no_interval": inconclusive / draws,
                    "covered_or_no_interval": (covered + inconclusive) / draws,
                    "covered": covered / (draws - inconclusive) if inconclusive < draws else None,
                }
            )
            print(rows[-1], flush=True)
    return rows


def autoregressive(count: int, correlation: float, rng: np.random.Generator) -> list[float]:
    """A stationary first-order autoregressive Gaussian process with median 0 and standard deviation 1."""
    noise = rng.standard_normal(count)
    values = [float(noise[0])]
    for innovation in noise[1:]:
        values.append(correlation * values[-1] + float(innovation) * (1 - correlation**2) ** 0.5)
    return values


def meets_requirements(rows: Iterable[dict[str, object]]) -> bool:
    """Whether each case of ``count_decisions`` has the wanted decision in 99 % of its draws."""
    results: Sequence[bool] = [
        int(str(row.get(str(row["wanted"]), 0))) >= REQUIRED_SHARE * int(str(row["draws"])) for row in rows
    ]
    return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1x1", "1x2", "1x8", "2x8", "8x8", "64x8"], help="NODESxGPUS")
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    parser.add_argument("--draws", type=int, default=300, help="of each case on one and two nodes")
    parser.add_argument("--large-draws", type=int, default=100, help="of each case on more nodes")
    parser.add_argument("--processes", type=int, default=1, help="processes that draw and judge at the same time")
    parser.add_argument("--uniform", action="store_true")
    parser.add_argument("--only", default="", help="with --uniform: checks whose name contains this text")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="SVG file of the power curve, with --curve")
    options = parser.parse_args()
    if options.curve or options.coverage:
        rows, passed = power_curve() if options.curve else coverage(), True
    elif options.uniform:
        rows, passed = [*uniform_slowness(options.draws, only=options.only)], True
    else:
        shapes = [(int(nodes), int(gpus)) for nodes, _, gpus in (each.partition("x") for each in options.shapes)]
        cases = {name: case for name, case in {**HEALTHY, **FAULTS}.items() if options.cases in name}
        rows = count_decisions(shapes, options.draws, options.large_draws, options.processes, cases)
        passed = meets_requirements(rows)
    if options.figure and options.curve:
        options.figure.write_text(figure(rows), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
