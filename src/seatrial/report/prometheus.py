"""Prometheus text exposition of a trial, for node_exporter's textfile collector or a push gateway.

The decision, the outcome of each check, the bad parts and the headline figures. Measured values are in base units, one
family per unit (``seatrial_measured_bytes_per_second``), so that one panel shows all bandwidths. Labels are identifiers
only; reasons and evidence are in the other reports.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Mapping

from seatrial.model import DecisionValue, Trial
from seatrial.report.figures import badness, headline
from seatrial.report.parts import parts
from seatrial.report.text import clean
from seatrial.report.view import check_views, lax_thresholds, outcome_counts

# Unit of a metric → base unit in the name, and conversion factor.
# https://prometheus.io/docs/practices/naming/#base-units; 1 GB = 1e9 B, as everywhere in the records.
_BASE_UNITS: Mapping[str, tuple[str, float]] = {
    "": ("", 1.0),
    "count": ("", 1.0),
    "bool": ("", 1.0),
    "%": ("ratio", 0.01),
    "us": ("seconds", 1e-6),
    "ms": ("seconds", 1e-3),
    "s": ("seconds", 1.0),
    "B": ("bytes", 1.0),
    "GB": ("bytes", 1e9),
    "GiB": ("bytes", 2.0**30),
    "GB/s": ("bytes_per_second", 1e9),
    "Gb/s": ("bytes_per_second", 1e9 / 8),
    "TFLOP/s": ("flops_per_second", 1e12),
    "MHz": ("hertz", 1e6),
    "°C": ("celsius", 1.0),
    "W": ("watts", 1.0),
}
MAX_PARTS = 100  # parts with a sample: of bad parts, and of each headline figure; the worst ones

# Name of a family → its help text, in the order of the output; families of measured values follow
_HELP = {
    "last_run_timestamp_seconds": "Unix time at which the trial ended.",
    "last_run_duration_seconds": "Wall time of the whole trial.",
    "cpu_only": "1 if no GPU was tested.",
    "lax_thresholds": "Number of thresholds that a much slower cluster would still meet.",
    "decision": "1 for the decision of the trial, 0 for the others.",
    "verdicts": "Number of verdicts of a check; an outcome without verdicts has no sample.",
    "check_duration_seconds": "Wall time of a check on its slowest process.",
    "part_bad": f"1 for each part that did not pass, the {MAX_PARTS} worst at most.",
    "headline_margin_ratio": "Worst value relative to its limit; below 1: violated.",
    "headline_expected_ratio": "Worst value relative to the expected value.",
}
Sample = tuple[str, float, dict[str, str]]  # name of the family, value, labels


def render(trial: Trial) -> str:
    """The trial as gauges. The format requires a newline at the end."""
    # the families of measured values come last, by their names
    figures = sorted(_headline(trial), key=lambda sample: "" if sample[0] in _HELP else sample[0])
    families: dict[str, dict[str, float]] = {name: {} for name in _HELP}  # a later sample with equal labels replaces
    for name, value, labels in (*_run(trial), *_checks_and_parts(trial), *figures):
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in {"trial": trial.name, **labels}.items())
        families.setdefault(name, {})[text] = value
    lines = []
    for name, samples in families.items():
        unit = name.removeprefix("measured").strip("_").replace("_", " ") or "no unit"
        if samples:
            help_text = _HELP.get(name) or f"Headline figures in {unit}, of the {MAX_PARTS} worst parts."
            lines += [f"# HELP seatrial_{name} {help_text}", f"# TYPE seatrial_{name} gauge"]
        lines += [f"seatrial_{name}{{{labels}}} {_number(value)}" for labels, value in samples.items()]
    return "\n".join(lines) + "\n"


def _run(trial: Trial) -> Iterator[Sample]:
    last = trial.sessions[-1] if trial.sessions else trial  # a resumed trial ended with its last session
    yield "last_run_timestamp_seconds", last.started + last.seconds, {}
    yield "last_run_duration_seconds", trial.seconds, {}
    yield "cpu_only", trial.decision.cpu_only, {}
    yield "lax_thresholds", len(lax_thresholds(trial.verdicts)), {}
    for each in DecisionValue:
        yield "decision", each is trial.decision.value, {"decision": each}


def _checks_and_parts(trial: Trial) -> Iterator[Sample]:
    for check in check_views(trial):
        for outcome, count in outcome_counts(check.verdicts):
            yield "verdicts", count, {"check": check.name, "outcome": outcome}
        if check.measurements:
            yield "check_duration_seconds", check.seconds, {"check": check.name}
    for part in [part for part in parts(trial) if part.outcome][:MAX_PARTS]:
        labels = {"kind": part.kind, "subject": part.name, "serial": part.gpu.serial, "outcome": str(part.outcome)}
        yield "part_bad", 1, labels


def _headline(trial: Trial) -> Iterator[Sample]:
    """The headline figures: worst value against limit and expected value, and the values of the worst parts."""
    for row in headline(trial):
        labels = {"check": row.checks[0], "metric": row.metric}
        for name, value in (("headline_margin_ratio", row.margin), ("headline_expected_ratio", row.share)):
            if value is not None:
                yield name, value, {**labels, "subject": row.worst_part}
        base_unit, factor = _base_unit(row.unit)
        name = f"measured_{base_unit}".rstrip("_")
        of_figure = (v for v in trial.verdicts if (v.check, v.metric) == (row.checks[0], row.metric))
        for verdict in heapq.nsmallest(MAX_PARTS, of_figure, key=badness):
            if verdict.value is not None:
                yield name, verdict.value * factor, {**labels, "subject": verdict.subject}


def _base_unit(unit: str) -> tuple[str, float]:
    """Base unit and factor; a unit that is not in _BASE_UNITS has factor 1 and its own name: ``images_per_second``."""
    text = re.sub(r"/s\b", "/second", unit.lower()).replace("/", "_per_")
    return _BASE_UNITS.get(unit, (re.sub(r"[^a-z0-9]+", "_", text).strip("_"), 1.0))


def _escaped(text: str) -> str:
    return clean(text).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")
    return repr(round(value)) if value == round(value) and abs(value) < 1e15 else repr(float(f"{value:.12g}"))
