"""Draws whole records from measured noise and counts the decisions: false alarms, and faults that are rejected.

    python benchmarks/decision_power.py [--draws 300] [--large-draws 30] [--processes N] [--json FILE]
    python benchmarks/decision_power.py --curve [--json FILE] [--figure SVG]  # rejected by slowdown, noise, samples
    python benchmarks/decision_power.py --coverage [--json FILE]  # of the 95 % interval on correlated windows

Noise and differences between devices come from the healthy H200 runs in docs/results: each metric of a draw is the
value of the 4×H200 record, times the ratio of a random device to the median of its run, times the windows of a random
measurement relative to their median, in order of time. Bad checks are drawn again as the pipeline measures them again,
by the same functions. Decisions are those of a trial of the checks in CHECKS. Checks of the whole cluster are left out:
there is no reference value between nodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.judging import RECORD, scale_trial
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware.references import skus
from seatrial.judge import checks_to_retry, judge
from seatrial.judge.decision import decide
from seatrial.judge.insights.power import detectable_slowdown, rejected_share
from seatrial.model import DecisionValue, Job, Measurement, Metric, Outcome
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
)
COMPUTE = ("device.gemm", "device.memory", "device.burn")
CHECKS = (*COMPUTE, "transfer.host", "transfer.peers", "collectives.gpu_pairs")
GPUS = 8
REQUIRED_SHARE = 0.99
GEMM = replace(
    catalog()["device.gemm"],
    declared=tuple(each for each in catalog()["device.gemm"].declared if each.name == "tflops.bf16"),
)
LIMIT = GEMM.rules[0].share("reference") or 0.0
Change = Callable[[str, Metric, int, np.random.Generator], Metric]  # check, metric, number of the retry


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
    """Compute and memory samples of one GPU are 12 % lower."""
    is_affected = check in COMPUTE and metric.subject == "node0000/gpu3" and is_rate(metric)
    return scaled(metric, 0.88) if is_affected else metric


def slow_node(_check: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
    """All rates of one node are 15 % lower."""
    return scaled(metric, 0.85) if metric.subject.startswith("node0000/") and is_rate(metric) else metric


def missing_nvlinks(check: str, metric: Metric, _retry: int, _rng: np.random.Generator) -> Metric:
    """One pair of GPUs has 15 of its 18 NVLinks."""
    pair = metric.subject in ("node0000/gpu1->gpu2", "node0000/gpu2->gpu1")
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
    is_affected = check in COMPUTE and metric.subject == f"node0000/gpu{(2, 0, 5)[retry]}" and is_rate(metric)
    return scaled(metric, 0.5) if is_affected else metric


FAULTS: dict[str, Change] = {
    "one GPU 12 % slow": slow_gpu,
    "one node 15 % slow": slow_node,
    "one NVLink pair without 3 links": missing_nvlinks,
    "half of all windows at half speed": half_of_windows_at_half_speed,
    "4 of 10 windows at a twentieth": windows_at_a_twentieth,
    "slow GPU that wanders": wandering_gpu,
}


@dataclass
class Noise:
    """Per check and metric: ratios of devices to the median of their run, and windows relative to their median."""

    device_ratios: dict[tuple[str, str], list[float]]
    windows: dict[tuple[str, str], list[np.ndarray]]

    @classmethod
    def measured(cls) -> Noise:
        """The noise of all healthy runs."""
        device_ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
        windows: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
        for name in HEALTHY_RUNS:
            values = defaultdict(list)
            for measurement in load_trial(record_path(name)).measurements:
                for metric in measurement.metrics if measurement.check in CHECKS else ():
                    values[measurement.check, metric.name].append(metric.value)
                    if len(metric.samples) > 1 and metric.value > 0:
                        samples = np.array(metric.samples[:60])
                        windows[measurement.check, metric.name].append(samples / np.median(samples))
            for key, run_values in values.items():
                if (middle := median(run_values)) > 0:
                    device_ratios[key] += [value / middle for value in run_values]
        return cls(dict(device_ratios), dict(windows))

    def draw(self, check: str, metric: Metric, middle: float, rng: np.random.Generator) -> Metric:
        """``metric`` of another healthy device, measured at another time; unchanged if it has no noise."""
        key = check, metric.name
        if not is_rate(metric) or key not in self.windows:
            return metric
        ratios, windows = self.device_ratios[key], self.windows[key]
        samples = middle * ratios[rng.integers(len(ratios))] * windows[rng.integers(len(windows))]
        return scaled(
            Metric(name=metric.name, value=0, unit=metric.unit, subject=metric.subject, samples=tuple(samples)), 1.0
        )


@dataclass
class Generator:
    """Draws the measurements of trials on ``nodes`` × 8 GPUs, and decides on them."""

    config: Config
    jobs: tuple[Job, ...]
    template: list[Measurement]
    noise: Noise

    @classmethod
    def for_nodes(cls, nodes: int, noise: Noise) -> Generator:
        config, jobs, template = scale_trial(load_trial(RECORD), nodes, GPUS)
        config = config.model_copy(update={"checks": {name: config.checks[name] for name in CHECKS}})
        jobs = tuple(
            job.model_copy(update={"checks": names})
            for job in jobs
            if (names := tuple(name for name in job.checks if name in CHECKS))
        )
        return cls(config, jobs, [measurement for measurement in template if measurement.check in CHECKS], noise)

    def decide(self, change: Change, rng: np.random.Generator) -> DecisionValue:
        """The decision on one draw, with the retries that the pipeline would make."""
        first, retries = list(self._draw(change, CHECKS, 0, rng)), list[Measurement]()
        for number in (1, 2):
            names = checks_to_retry(self.config, first, retries, catalog(), number)
            retries += self._draw(change, tuple(names), number, rng)
        verdicts = judge(self.config, self.jobs, first, catalog(), {}, retries=retries)
        return decide(dict.fromkeys(CHECKS, True), verdicts, {}, "a benchmark").value

    def _draw(
        self, change: Change, checks: Sequence[str], retry: int, rng: np.random.Generator
    ) -> Iterator[Measurement]:
        middles = record_medians()
        for measurement in (measurement for measurement in self.template if measurement.check in checks):
            check = measurement.check
            metrics = tuple(
                change(check, self.noise.draw(check, metric, middles[check, metric.name], rng), retry, rng)
                for metric in measurement.metrics
            )
            yield measurement.model_copy(update={"metrics": metrics, "retry": retry})


@cache
def record_medians() -> dict[tuple[str, str], float]:
    values = defaultdict(list)
    for measurement in load_trial(RECORD).measurements:
        for metric in measurement.metrics if measurement.check in CHECKS else ():
            values[measurement.check, metric.name].append(metric.value)
    return {key: median(metric_values) for key, metric_values in values.items()}


def count_decisions(all_nodes: Sequence[int], draws: int, large_draws: int, processes: int) -> list[dict[str, object]]:
    """Decisions by number of nodes and fault, printed as they come."""
    noise, rows = Noise.measured(), list[dict[str, object]]()
    for nodes in all_nodes:
        generator = Generator.for_nodes(nodes, noise)
        faults = {"healthy": healthy, **(FAULTS if nodes != 2 else {})}
        for name, change in faults.items():
            count = draws if nodes <= 16 or name == "healthy" else large_draws
            decisions = Counter(decide_all(generator, change, [(nodes, draw) for draw in range(count)], processes))
            wanted = DecisionValue.ACCEPTED if name == "healthy" else DecisionValue.REJECTED
            bound = lower_bound(decisions[wanted], count)
            rows.append({"nodes": nodes, "case": name, "draws": count, **decisions, "at_least": bound})
            print(f"{nodes:>4} nodes  {name:<34} {dict(decisions)}  {wanted} in at least {bound:.1%}", flush=True)
    return rows


def decide_all(generator: Generator, change: Change, seeds: Sequence[tuple[int, int]], processes: int) -> list[str]:
    """The decisions of one draw per seed, drawn and judged in ``processes`` processes."""
    # forked, since a process of a pool would have to unpickle the generator
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def decide_share(first: int) -> None:
        results.put([generator.decide(change, np.random.default_rng(seed)).value for seed in seeds[first::processes]])

    workers = [context.Process(target=decide_share, args=(first,)) for first in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()  # the names of decisions fit into the queue's pipe, so that no process waits for a reader
        if worker.exitcode:
            raise SystemExit(f"a process of the benchmark ended with exit code {worker.exitcode}")
    return [decision for _ in workers for decision in results.get()]


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
        int(str(row.get("ACCEPTED" if row["case"] == "healthy" else "REJECTED", 0)))
        >= REQUIRED_SHARE * int(str(row["draws"]))
        for row in rows
    ]
    return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 16, 128])
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--large-draws", type=int, default=30, help="draws of each fault on 128 nodes")
    parser.add_argument("--processes", type=int, default=1, help="processes that draw and judge at the same time")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="SVG file of the power curve, with --curve")
    options = parser.parse_args()
    if options.curve or options.coverage:
        rows, passed = power_curve() if options.curve else coverage(), True
    else:
        rows = count_decisions(options.nodes, options.draws, options.large_draws, options.processes)
        passed = meets_requirements(rows)
    if options.figure and options.curve:
        options.figure.write_text(figure(rows), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
