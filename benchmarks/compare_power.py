"""Counts false alarms of `seatrial compare`, and losses of 4 % on one GPU that it finds.

    python benchmarks/compare_power.py [--draws 100] [--json FILE]

False alarms: all pairs of the ten repeated quick runs of one H200, each with the spread that the other eight records
give; pairs of other machines, each with the spread of all machines but this one; and pairs drawn from the acceptance of
4 H200, in which each speed has the noise of data/noise.yaml. Losses: the same draws, in which the speeds of one GPU on
side B are 4 % lower. Exits with 1 if more than 5 % of healthy pairs have an alarm, or if the loss of a metric in
REQUIRED is found in fewer than 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.noise import GROUPS, REPEATS, noise
from tools.records import record_path

from seatrial.handover.compare import NoiseData, compare, noise_data
from seatrial.judge.plausibility import TIME_UNITS
from seatrial.model import Measurement, Metric, Trial
from seatrial.pipeline.run_directory import load_trial

RECORD = "2026-11-22-4xh200/acceptance"
GPU, LOSS = "vm/gpu3", 0.04
RECORDS_A_SIDE = (1, 5)
REQUIRED = (
    ("device.memory", "copy"),
    ("device.burn", "tflops.sustained"),
    ("device.gemm", "tflops.bf16"),
    ("device.gemm", "tflops.fp16"),
    ("transfer.host", "d2h_single"),
)
Change = Callable[[str, Metric], float]  # check and metric → factor of the value


def repeats() -> dict[str, object]:
    """False alarms in all pairs of the repeated runs."""
    trials = [load_trial(path) for path in GROUPS[0]]
    pairs = list(combinations(range(len(trials)), 2))
    alarms = 0
    for pair in pairs:
        others = [trial for index, trial in enumerate(trials) if index not in pair]
        held_out = NoiseData(source="the other records", speeds=noise([others]))
        alarms += compare([trials[pair[0]]], [trials[pair[1]]], held_out).has_regression
    return {"runs": REPEATS.name, "pairs": len(pairs), "pairs_with_alarm": alarms}


def machines() -> dict[str, object]:
    """False alarms in all pairs of runs of the other machines, each with the spread that the other machines give."""
    groups = [[load_trial(path) for path in group] for group in GROUPS]
    count, alarms = 0, []
    for index, group in enumerate(groups[1:], 1):
        held_out = NoiseData(source="the other machines", speeds=noise(groups[:index] + groups[index + 1 :]))
        for before, after in combinations(group, 2):
            count += 1
            result = compare([before], [after], held_out)
            if result.losses:
                alarms.append(f"{GROUPS[index][0].parent.name}: {result.losses[0].changes[0].speed}")
    return {"runs": "pairs of 15 other machines", "pairs": count, "pairs_with_alarm": len(alarms), "alarms": alarms}


def scaled(trial: Trial, factor: Change) -> Trial:
    """The trial with each value times a factor, without samples, retries and verdicts."""

    def changed(measurement: Measurement) -> Measurement:
        metrics = [
            replace(metric, value=metric.value * factor(measurement.check, metric), samples=())
            for metric in measurement.metrics
        ]
        return measurement.model_copy(update={"metrics": tuple(metrics)})

    measurements = tuple(map(changed, trial.measurements))
    return trial.model_copy(update={"measurements": measurements, "retries": (), "verdicts": (), "findings": ()})


def with_noise(rng: random.Random) -> Change:
    def factor(check: str, metric: Metric) -> float:
        known = noise_data().speeds.get(f"{check} {metric.name}")
        return math.exp(rng.gauss(0, known.spread)) if known else 1.0

    return factor


def slow_gpu(_check: str, metric: Metric) -> float:
    if metric.subject != GPU:
        return 1.0
    return 1 / (1 - LOSS) if metric.unit in TIME_UNITS else 1 - LOSS


def draws(base: Trial, count: int, records: int) -> dict[str, object]:
    """False alarms in ``count`` pairs of sets, and how often the loss of each metric of the GPU is found."""
    alarms, found, tested = 0, Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for draw in range(count):
        rng = random.Random(draw)
        before, after = ([scaled(base, with_noise(rng)) for _ in range(records)] for _ in range(2))
        alarms += compare(before, after).has_regression
        for change in compare(before, [scaled(trial, slow_gpu) for trial in after]).changes:
            if change.part == GPU and change.effect != "not compared":
                tested[change.check, change.metric] += 1
                found[change.check, change.metric] += change.effect == "slower"
    shares = {f"{check} {name}": found[check, name] / tested[check, name] for check, name in sorted(tested)}
    return {"records_a_side": records, "pairs": count, "pairs_with_alarm": alarms, "loss_found": shares}


def is_good(results: Sequence[dict[str, object]]) -> bool:
    """Whether at most 5 % of the real pairs, and of each kind of drawn pairs, have an alarm, and losses are found."""
    real, drawn = (Counter[str](), [result for result in results if "loss_found" in result])
    for result in results:
        if result not in drawn:
            real.update({name: value for name, value in result.items() if isinstance(value, int)})
    counts: list[dict[str, object]] = [dict(real), *drawn]
    for result in counts:
        alarms, pairs, found = result["pairs_with_alarm"], result["pairs"], result.get("loss_found")
        assert isinstance(alarms, int)
        assert isinstance(pairs, int)
        if alarms > 0.05 * pairs:
            return False
        if isinstance(found, dict) and min(found[" ".join(metric)] for metric in REQUIRED) < 0.95:
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = [repeats(), machines()]
    base = load_trial(record_path(RECORD))
    results += [
        {"runs": f"drawn from {RECORD}", "loss": LOSS, **draws(base, options.draws, records)}
        for records in RECORDS_A_SIDE
    ]
    text = json.dumps(results, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if is_good(results) else 1


if __name__ == "__main__":
    sys.exit(main())
