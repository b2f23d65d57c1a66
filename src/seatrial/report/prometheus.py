"""Prometheus text exposition of a trial, for node_exporter's textfile collector or a push gateway.

Measured values are in base units, one family per unit (``seatrial_measured_bytes_per_second``), so that one panel shows
all bandwidths. Labels are identifiers only; reasons and evidence are in the other reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from seatrial.model import DecisionValue, Trial, Verdict
from seatrial.report.figures import headline
from seatrial.report.parts import parts
from seatrial.report.text import clean
from seatrial.report.view import chapters, lax_thresholds, outcome_counts

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
    families = [*_run_families(trial), _verdicts(trial), _durations(trial), *_headline(trial), *_measured(trial)]
    return "\n".join(line for family in families for line in family.lines()) + "\n"


def _run_families(trial: Trial) -> Iterator[_Family]:
    ended = _Family("seatrial_last_run_timestamp_seconds", "Unix time at which the trial ended.")
    last = trial.sessions[-1] if trial.sessions else trial  # a resumed trial ended with its last session
    ended.add(last.started + last.seconds, trial=trial.name)
    duration = _Family("seatrial_last_run_duration_seconds", "Wall time of the whole trial.")
    duration.add(trial.seconds, trial=trial.name)
    decision = _Family("seatrial_decision", "1 for the decision of the trial, 0 for the others.")
    for value in DecisionValue:
        decision.add(value is trial.decision.value, trial=trial.name, decision=value)
    cpu_only = _Family("seatrial_cpu_only", "1 if no GPU was tested.")
    cpu_only.add(trial.decision.cpu_only, trial=trial.name)
    time = _Family("seatrial_time_seconds", "Time spent in checks, and in seatrial itself (overhead).")
    for kind in ("check", "overhead"):
        time.add(sum(timing.seconds for timing in trial.timings if timing.kind == kind), trial=trial.name, kind=kind)
    findings = _Family("seatrial_findings", "Findings by confidence.")
    for confidence in ("high", "medium", "low"):
        count = sum(finding.confidence == confidence for finding in trial.findings)
        findings.add(count, trial=trial.name, confidence=confidence)
    lax = _Family("seatrial_lax_thresholds", "Number of thresholds that a much slower cluster would still meet.")
    lax.add(len(lax_thresholds(trial.verdicts)), trial=trial.name)
    yield from (ended, duration, decision, cpu_only, time, findings, lax)


def _verdicts(trial: Trial) -> _Family:
    family = _Family(
        "seatrial_verdict",
        "Number of verdicts of a check on a subject; an outcome without verdicts has no sample.",
    )
    by_subject: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in trial.verdicts:
        by_subject.setdefault((verdict.check, verdict.subject), []).append(verdict)
    for (check, subject), verdicts in by_subject.items():
        for outcome, count in outcome_counts(verdicts):
            family.add(count, trial=trial.name, check=check, subject=subject, outcome=outcome)
    return family


def _headline(trial: Trial) -> tuple[_Family, ...]:
    """The headline figures and the bad parts."""
    margins = _Family("seatrial_headline_margin_ratio", "Worst value relative to its limit; below 1: violated.")
    shares = _Family("seatrial_headline_expected_ratio", "Worst value relative to the expected value.")
    for row in headline(trial):
        labels = {"check": row.checks[0], "metric": row.metric, "subject": row.worst_part}
        for family, value in ((margins, row.margin), (shares, row.share)):
            if value is not None:
                family.add(value, trial=trial.name, **labels)
    bad = _Family("seatrial_part_bad", "1 for each part that did not pass.")
    for part in parts(trial):
        if part.outcome:
            labels = {"kind": part.kind, "subject": part.name, "serial": part.gpu.serial, "outcome": part.outcome}
            bad.add(1, trial=trial.name, **labels)
    return margins, shares, bad


def _durations(trial: Trial) -> _Family:
    family = _Family("seatrial_check_duration_seconds", "Wall time of a check on its slowest process.")
    for check in (check for chapter in chapters(trial) for check in chapter.checks):
        if check.measurements:
            family.add(check.seconds, trial=trial.name, check=check.name)
    return family


def _measured(trial: Trial) -> list[_Family]:
    families: dict[str, _Family] = {}
    for measurement in (*trial.measurements, *trial.retries):
        for metric in measurement.metrics:
            base_unit, factor = _base_unit(metric.unit)
            prefix = "seatrial_retry_measured" if measurement.retry else "seatrial_measured"
            name = f"{prefix}_{base_unit}" if base_unit else prefix
            unit = (base_unit.replace("_", " ") or "no unit") + (" (retry)" if measurement.retry else "")
            family = families.setdefault(name, _Family(name, f"Measured values in {unit}."))
            labels = {"check": measurement.check, "subject": metric.subject, "metric": metric.name}
            labels |= {"retry": str(measurement.retry)} if measurement.retry else {}
            family.add(metric.value * factor, trial=trial.name, **labels)
    return [families[name] for name in sorted(families)]


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
