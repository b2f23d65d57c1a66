"""The baseline of a site: learned from good runs, and stored as a YAML file that a user can edit."""

from __future__ import annotations

import difflib
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

import yaml
from pydantic import ValidationError

from seatrial.checks.check import Checks
from seatrial.config.strict_yaml import parse_yaml
from seatrial.hardware import links
from seatrial.hardware.references import MODEL_SEPARATOR
from seatrial.model import (
    Baseline,
    BasisKind,
    DecisionValue,
    LearnedRun,
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
from seatrial.util.grouping import grouped
from seatrial.util.input_files import MAX_CONFIG_BYTES, read_text
from seatrial.util.text import and_more


class BaselineKey(NamedTuple):
    """What a value of the baseline is for. ``fabric``: class of the network, such as roce-8x400; empty on one node."""

    reference_key: str
    gpu: str
    gpus: int
    nodes: int
    unit: str
    fabric: str


def load(path: Path, checks: Checks) -> Baseline:
    """The baseline in a file. Raises UsageError for an unreadable or invalid file, unknown keys and duplicates."""
    try:
        baseline = Baseline.model_validate(parse_yaml(read_text(path, MAX_CONFIG_BYTES), str(path)))
    except OSError as error:
        raise UsageError(f"cannot read the baseline {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error
    except ValidationError as error:
        message = first_validation_error(error)
        raise UsageError(f"{path} is not a baseline written by `seatrial baseline learn`: {message}") from error
    reference_keys = {rule.reference for check in checks.values() for rule in check.rules if rule.reference}
    for key, values in baseline.expected.items():
        if key not in reference_keys:
            similar = difflib.get_close_matches(key, reference_keys, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise UsageError(f"{path}: unknown key {key}, no check uses it{hint}")
        if len({(value.gpu, value.gpus, value.nodes, value.unit, value.fabric) for value in values}) < len(values):
            raise UsageError(f"{path}: {key} has two values for the same GPUs, nodes and fabric")
    return baseline


def learn(name: str, trials: Mapping[str, Trial], checks: Checks) -> Baseline:
    """A baseline with the median, over runs and subjects, of each good metric that has a reference key.

    ``trials``: path of a run → its record, with verdicts by this version of seatrial. Raises UsageError for rejected or
    unfinished runs, for two records of one run, and if no run has a usable value.
    """
    values_by_key: dict[BaselineKey, dict[str, list[float]]] = defaultdict(dict)  # key → path of a run → values
    learned_from: list[LearnedRun] = []
    problems = []  # one for each value that cannot be learned
    for path, trial in trials.items():
        if trial.decision.value is DecisionValue.REJECTED:
            raise UsageError(f"{path} was REJECTED ({trial.decision.reason}): learn a baseline from good runs")
        if reason := trial.stop_reason or trial.gpu_error:
            raise UsageError(f"{path} did not finish ({reason}): learn a baseline from complete runs")
        run = learned_run(path, trial.host, trial.started, trial.measurements)
        if duplicate := next((other.path for other in learned_from if other.is_same_run(run)), ""):
            raise UsageError(f"{duplicate} and {path} are records of one run: give each run once")
        learned_from.append(run)
        fabric = links.read(trial.measurements, checks).fabric
        problem_by_subject = _problems(trial.verdicts)
        for measurement in trial.measurements:
            if measurement.error:
                continue
            for metric, key in _metrics_with_key(measurement, checks, fabric):
                subject = (measurement.check, metric.name, metric.subject)
                problem = problem_by_subject.get(subject, f"{metric.name} has no verdict")
                if not problem and key.nodes > 1 and not key.fabric:
                    where = f"across {key.nodes} nodes over a network of unknown class"
                    problem = f"{key.reference_key} was measured {where}"
                if problem:
                    problems.append(problem)
                else:
                    values_by_key[key].setdefault(path, []).append(metric.value)
    if not values_by_key:
        reason = "no metric has a reference key"
        if all(trial.decision.cpu_only for trial in trials.values()):
            reason = "CPU-only runs have no metrics to learn: give runs on GPUs"
        reason = and_more(problems, 1, "; ") or reason
        raise UsageError(f"no values to learn in {', '.join(trials)}: {reason}")
    expected: dict[str, list[ReferenceValue]] = defaultdict(list)
    for key, by_run in sorted(values_by_key.items()):
        runs, values = len(by_run), [*chain.from_iterable(by_run.values())]
        reference = ReferenceValue(
            gpus=key.gpus,
            nodes=key.nodes,
            value=median(values),
            unit=key.unit,
            source=f"median of {len(values)} values in {runs} runs, from {min(values):.4g} to {max(values):.4g}",
            gpu=key.gpu,
            fabric=key.fabric,
            runs=runs,
        )
        expected[key.reference_key].append(reference)
    return Baseline(name=name, learned_from=tuple(learned_from), expected={k: tuple(v) for k, v in expected.items()})


def learned_run(path: str, host: str, started: float, measurements: Iterable[Measurement]) -> LearnedRun:
    """The fields that identify a run. The digest has no names of metrics, since a later version may rename them."""
    values = sorted(metric.value for measurement in measurements for metric in measurement.metrics)
    digest = hashlib.sha256(repr(values).encode()).hexdigest()
    return LearnedRun(path=path, host=host, started=started, digest=digest)


def summary(baseline: Baseline) -> str:
    """The name of the baseline and the number of runs that it was learned from, as text of a decision."""
    runs = len(baseline.learned_from)
    override = ", with override: true" if baseline.override else ""
    return f"baseline {baseline.name}, learned from {runs} {'run' if runs == 1 else 'runs'}{override}"


def gpu_model_error(baseline: Baseline, gpus: Iterable[str]) -> str:
    """Why no value of the baseline applies to a node with GPUs of these models; empty if one may apply.

    A model may be a combination of several, joined by MODEL_SEPARATOR: the ranks of a job ran on different models.
    """
    covered = {value.gpu for values in baseline.expected.values() for value in values}
    present = {name for gpu in gpus for name in gpu.split(MODEL_SEPARATOR)}
    if not present or any(set(model.split(MODEL_SEPARATOR)) <= present for model in covered):
        return ""
    return (
        f"no value of baseline {baseline.name} applies: it is for {' and '.join(sorted(covered))}, "
        f"and the GPUs are {' and '.join(sorted(present))}. Learn a baseline from runs on these GPUs"
    )


def dump(baseline: Baseline) -> str:
    """The baseline as YAML, which ``load`` reads."""
    return yaml.safe_dump(baseline.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _problems(verdicts: Sequence[Verdict]) -> dict[tuple[str, str, str], str]:
    """(check, metric, subject) → why its value cannot be learned; empty if it can be.

    A value can be learned in four cases: it PASSes; it has no reference value (UNJUDGED, or SKIP with NO_THRESHOLD); it
    does not PASS only because its baseline was learned from too few runs or from this run; or it is a WARN for a low
    share of the network's bound, since good clusters reach different shares, and a baseline is a tighter limit.
    """
    problems: dict[tuple[str, str, str], str] = {}
    for verdict in verdicts:
        basis = verdict.basis.kind if verdict.basis else None
        # The median of the peers is no reference value
        without_reference = verdict.outcome is Outcome.UNJUDGED and basis in (None, BasisKind.PEERS)
        without_reference |= verdict.reasons == (Reason.NO_THRESHOLD,)
        weak_baseline = verdict.reasons == (Reason.WEAK_BASELINE,)
        low_share = basis is BasisKind.FABRIC_MODEL and verdict.reasons == (Reason.BELOW_WARNING_THRESHOLD,)
        is_learnable = verdict.outcome is Outcome.PASS or without_reference or weak_baseline or low_share
        key = (verdict.check, verdict.metric, verdict.subject)
        problem = "" if is_learnable else f"{verdict.subject}: {verdict.outcome}, {verdict.message}"
        problems[key] = problems.get(key) or problem
    return problems


def _metrics_with_key(measurement: Measurement, checks: Checks, fabric: str) -> Iterator[tuple[Metric, BaselineKey]]:
    """The positive metrics with a reference key, if the measurement has the facts gpu, world_size and nodes."""
    check, facts = checks.get(measurement.check), measurement.facts
    gpu, gpus, nodes = facts.get("gpu"), facts.get("world_size"), facts.get("nodes")
    if check is None or not isinstance(gpu, str) or not isinstance(gpus, int) or not isinstance(nodes, int):
        return
    reference_keys = grouped((rule.metric, rule.reference) for rule in check.rules if rule.reference)
    for metric in measurement.metrics:
        for reference_key in reference_keys.get(metric.name, ()) if metric.value > 0 else ():
            yield metric, BaselineKey(reference_key, gpu, gpus, nodes, metric.unit, fabric if nodes > 1 else "")
