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
from seatrial.hardware import links
from seatrial.model import (
    Baseline,
    BasisKind,
    DecisionValue,
    Measurement,
    Metric,
    Outcome,
    Reason,
    ReferenceValue,
    Trial,
    UsageError,
    Verdict,
    first_validation_error,
)

Key = tuple[str, str, int, int, str, str]  # baseline key, GPU, GPUs, nodes, unit, class of the network between nodes


def load(path: Path, checks: Mapping[str, Check]) -> Baseline:
    """Raises UsageError that names the file and what is wrong with it: also what no rule would ever look at."""
    try:
        baseline = Baseline.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the baseline {path}: {error}") from error
    except ValidationError as error:
        raise UsageError(
            f"{path} is no baseline of `seatrial baseline learn`: {first_validation_error(error)}"
        ) from error
    asked = {rule.reference for check in checks.values() for rule in check.rules if rule.reference}
    for key, values in baseline.expected.items():
        if key not in asked:
            close = difflib.get_close_matches(key, asked, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{path}: no check compares anything with {key}{hint}")
        if len({(one.gpu, one.gpus, one.nodes, one.unit, one.fabric) for one in values}) < len(values):
            raise UsageError(f"{path}: {key} has two values for the same GPUs, nodes and fabric")
    return baseline


def learn(name: str, trials: Mapping[str, Trial], checks: Mapping[str, Check]) -> Baseline:
    """The median, over runs and subjects, of every metric that a rule compares with a baseline and found no fault with.

    The ``trials`` are to be judged as of now: what an older version said of them teaches nothing. Raises UsageError for
    a run that was rejected or did not come to its end, and where no run holds anything to learn.
    """
    found: dict[Key, list[float]] = defaultdict(list)
    passed_over: list[str] = []
    for path, trial in trials.items():
        _refuse(path, trial)
        fabric, faults = links.read(trial.measurements, checks).fabric, _faults(trial.verdicts)
        for measurement in (one for one in trial.measurements if not one.error):  # who failed then was not in order
            for metric, kind in _values(measurement, checks, fabric):
                fault = faults.get((measurement.check, metric.name, metric.subject), f"{metric.name} was not judged")
                if fault := fault or _nowhere(kind):
                    passed_over.append(fault)
                else:
                    found[kind].append(metric.value)
    if not found:
        why = f"{passed_over[0]} (and {len(passed_over) - 1} more)" if passed_over else "no metric has a baseline"
        raise UsageError(f"nothing to learn in {', '.join(trials)}: {why}")
    expected: dict[str, list[ReferenceValue]] = defaultdict(list)
    for (key, gpu, gpus, nodes, unit, fabric), values in sorted(found.items()):
        source = f"median of {len(values)} values in {len(trials)} runs, from {min(values):.4g} to {max(values):.4g}"
        own = ReferenceValue(
            gpus=gpus, nodes=nodes, value=median(values), unit=unit, source=source, gpu=gpu, fabric=fabric
        )
        expected[key].append(own)
    return Baseline(name=name, learned_from=tuple(trials), expected={k: tuple(v) for k, v in expected.items()})


def dump(baseline: Baseline) -> str:
    """As YAML, to be read by ``load`` and by people."""
    return yaml.safe_dump(baseline.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _refuse(path: str, trial: Trial) -> None:
    if trial.decision.value is DecisionValue.REJECTED:
        raise UsageError(f"{path} was REJECTED ({trial.decision.reason}): a baseline is learned from good runs")
    if ended := trial.stop_reason or trial.gpu_error:
        raise UsageError(f"{path} did not come to its end ({ended}): a baseline is learned from whole runs")


def _faults(verdicts: Sequence[Verdict]) -> dict[tuple[str, str, str], str]:
    """By check, metric and subject why a value is not to be learned; empty where it is.

    To be learned is what passed, or was only not judged because nobody knows what is good. Where a rule may do without
    (``if_known``), that is a SKIP.
    """
    found: dict[tuple[str, str, str], str] = {}
    for one in verdicts:
        unknown = one.outcome is Outcome.UNJUDGED and (one.basis is None or one.basis.kind is BasisKind.PEERS)
        unknown |= Reason.NO_THRESHOLD in one.reasons
        key, good = (one.check, one.metric, one.subject), unknown or one.outcome is Outcome.PASS
        found[key] = found.get(key) or ("" if good else f"{one.subject}: {one.outcome}, {one.message}")
    return found


def _nowhere(kind: Key) -> str:
    """Why a figure across nodes would be of any network at all."""
    key, _, _, nodes, _, fabric = kind
    unknown = nodes > 1 and not fabric
    return f"{key} is across {nodes} nodes, and it is not known over which network" if unknown else ""


def _values(measurement: Measurement, checks: Mapping[str, Check], fabric: str) -> Iterator[tuple[Metric, Key]]:
    check, facts = checks.get(measurement.check), measurement.facts
    gpu, gpus, nodes = facts.get("gpu"), facts.get("world_size"), facts.get("nodes")
    if check is None or not isinstance(gpu, str) or not isinstance(gpus, int) or not isinstance(nodes, int):
        return
    keys: Mapping[str, Sequence[str]] = {
        metric.name: [rule.reference for rule in check.rules if rule.reference and rule.metric == metric.name]
        for metric in measurement.metrics
    }
    for metric in measurement.metrics:
        for key in keys[metric.name]:
            if metric.value > 0:
                yield metric, (key, gpu, gpus, nodes, metric.unit, fabric if nodes > 1 else "")
