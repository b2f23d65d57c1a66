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
from dataclasses import dataclass, field

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
    "GiB": ("bytes", 2.0**30),
    "GB/s": ("bytes_per_second", 1e9),
    "Gb/s": ("bytes_per_second", 1e9 / 8),
    "TFLOP/s": ("flops_per_second", 1e12),
    "MHz": ("hertz", 1e6),
    "°C": ("celsius", 1.0),
    "W": ("watts", 1.0),
}


MAX_PARTS = 100  # parts with a sample: of bad parts, and of each headline figure; the worst ones


@dataclass
class _Family:
    """All samples of one metric name. A later sample with the same labels replaces the earlier one."""

    name: str
    help: str
    samples: dict[str, float] = field(default_factory=dict)

    def add(self, value: float, **labels: str) -> None:
        self.samples[",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())] = value

    def lines(self) -> Iterator[str]:
        if self.samples:
            yield f"# HELP {self.name} {self.help}"
            yield f"# TYPE {self.name} gauge"
        for labels, value in self.samples.items():
            yield f"{self.name}{{{labels}}} {_number(value)}"


def render(trial: Trial) -> str:
    """The trial as gauges. The format requires a newline at the end."""
    families = [*_run_families(trial), *_checks(trial), _bad_parts(trial), *_headline(trial)]
    return "\n".join(line for family in families for line in family.lines()) + "\n"


def _run_families(trial: Trial) -> Iterator[_Family]:
    last = trial.sessions[-1] if trial.sessions else trial  # a resumed trial ended with its last session
    values = {
        ("last_run_timestamp_seconds", "Unix time at which the trial ended."): last.started + last.seconds,
        ("last_run_duration_seconds", "Wall time of the whole trial."): trial.seconds,
        ("cpu_only", "1 if no GPU was tested."): trial.decision.cpu_only,
        ("lax_thresholds", "Number of thresholds that a much slower cluster would still meet."): len(
            lax_thresholds(trial.verdicts)
        ),
    }
    for (name, text), value in values.items():
        family = _Family(f"seatrial_{name}", text)
        family.add(value, trial=trial.name)
        yield family
    decision = _Family("seatrial_decision", "1 for the decision of the trial, 0 for the others.")
    for each in DecisionValue:
        decision.add(each is trial.decision.value, trial=trial.name, decision=each)
    yield decision


def _checks(trial: Trial) -> tuple[_Family, _Family]:
    verdicts = _Family("seatrial_verdicts", "Number of verdicts of a check; an outcome without verdicts has no sample.")
    durations = _Family("seatrial_check_duration_seconds", "Wall time of a check on its slowest process.")
    for check in check_views(trial):
        for outcome, count in outcome_counts(check.verdicts):
            verdicts.add(count, trial=trial.name, check=check.name, outcome=outcome)
        if check.measurements:
            durations.add(check.seconds, trial=trial.name, check=check.name)
    return verdicts, durations


def _bad_parts(trial: Trial) -> _Family:
    family = _Family("seatrial_part_bad", f"1 for each part that did not pass, the {MAX_PARTS} worst at most.")
    for part in [part for part in parts(trial) if part.outcome][:MAX_PARTS]:
        labels = {"kind": part.kind, "subject": part.name, "serial": part.gpu.serial, "outcome": str(part.outcome)}
        family.add(1, trial=trial.name, **labels)
    return family


def _headline(trial: Trial) -> Iterator[_Family]:
    """The headline figures: worst value against limit and expected value, and the values of the worst parts."""
    margins = _Family("seatrial_headline_margin_ratio", "Worst value relative to its limit; below 1: violated.")
    shares = _Family("seatrial_headline_expected_ratio", "Worst value relative to the expected value.")
    measured: dict[str, _Family] = {}
    for row in headline(trial):
        labels = {"trial": trial.name, "check": row.checks[0], "metric": row.metric}
        for family, value in ((margins, row.margin), (shares, row.share)):
            if value is not None:
                family.add(value, **labels, subject=row.worst_part)
        base_unit, factor = _base_unit(row.unit)
        name = f"seatrial_measured_{base_unit}".rstrip("_")
        help_text = f"Headline figures in {base_unit.replace('_', ' ') or 'no unit'}, of the {MAX_PARTS} worst parts."
        family = measured.setdefault(name, _Family(name, help_text))
        of_figure = (v for v in trial.verdicts if (v.check, v.metric) == (row.checks[0], row.metric))
        for verdict in heapq.nsmallest(MAX_PARTS, of_figure, key=badness):
            if verdict.value is not None:
                family.add(verdict.value * factor, **labels, subject=verdict.subject)
    yield from (margins, shares, *(measured[name] for name in sorted(measured)))


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
