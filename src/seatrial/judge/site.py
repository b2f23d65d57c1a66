"""A site's baseline: learned from its good runs, kept as a file that a person can read and correct."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import yaml
from pydantic import ValidationError

from seatrial.checks.base import Check
from seatrial.judge import links
from seatrial.model import Baseline, Expected, Measurement, Trial, UsageError, Verb, first_fault

Key = tuple[str, str, int, int, str, str]  # baseline key, GPU, GPUs, nodes, unit, class of the network between nodes


def load(path: Path, checks: Mapping[str, Check]) -> Baseline:
    """Raises UsageError that names the file and what is wrong with it: also what no rule would ever look at."""
    try:
        baseline = Baseline.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the baseline {path}: {error}") from error
    except ValidationError as error:
        raise UsageError(f"{path} is no baseline of `seatrial baseline learn`: {first_fault(error)}") from error
    asked = {rule.baseline for check in checks.values() for rule in check.rules if rule.baseline}
    for key, values in baseline.expected.items():
        if key not in asked:
            close = difflib.get_close_matches(key, asked, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{path}: no check compares anything with {key}{hint}")
        if len({(one.gpu, one.gpus, one.nodes, one.unit, one.fabric) for one in values}) < len(values):
            raise UsageError(f"{path}: {key} has two values for the same GPUs, nodes and fabric")
    return baseline


def learn(name: str, trials: Mapping[str, Trial], checks: Mapping[str, Check]) -> Baseline:
    """The median, over runs and subjects, of every metric that a rule compares with a baseline.

    Raises UsageError for a run that was rejected, and where no run holds anything to learn.
    """
    found: dict[Key, list[float]] = defaultdict(list)
    for path, trial in trials.items():
        if trial.decision.value is Verb.REJECTED:
            raise UsageError(f"{path} was REJECTED ({trial.decision.reason}): a baseline is learned from good runs")
        fabric = links.read(trial.measurements).fabric
        for measurement in (one for one in trial.measurements if not one.error):  # who failed then was not in order
            for kind, value in _values(measurement, checks, fabric):
                found[kind].append(value)
    if not found:
        raise UsageError(f"nothing to learn in {', '.join(trials)}: no metric there is judged by a baseline")
    expected: dict[str, list[Expected]] = defaultdict(list)
    for (key, gpu, gpus, nodes, unit, fabric), values in sorted(found.items()):
        source = f"median of {len(values)} values in {len(trials)} runs, from {min(values):.4g} to {max(values):.4g}"
        own = Expected(gpus=gpus, nodes=nodes, value=median(values), unit=unit, source=source, gpu=gpu, fabric=fabric)
        expected[key].append(own)
    return Baseline(name=name, learned_from=tuple(trials), expected={k: tuple(v) for k, v in expected.items()})


def dump(baseline: Baseline) -> str:
    """As YAML, to be read by ``load`` and by people."""
    return yaml.safe_dump(baseline.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _values(measurement: Measurement, checks: Mapping[str, Check], fabric: str) -> Iterator[tuple[Key, float]]:
    check, facts = checks.get(measurement.check), measurement.facts
    gpu, gpus, nodes = facts.get("gpu"), facts.get("world_size"), facts.get("nodes")
    if check is None or not isinstance(gpu, str) or not isinstance(gpus, int) or not isinstance(nodes, int):
        return
    keys: Mapping[str, Sequence[str]] = {
        metric.name: [rule.baseline for rule in check.rules if rule.baseline and rule.metric == metric.name]
        for metric in measurement.metrics
    }
    for metric in measurement.metrics:
        for key in keys[metric.name]:
            if metric.value > 0:
                yield (key, gpu, gpus, nodes, metric.unit, fabric if nodes > 1 else ""), metric.value
