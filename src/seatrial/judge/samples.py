"""Evaluation of the samples of a metric: conclusive violations, and slow windows although the median is good. Pure.

A window is a short part of a measurement; each gives one sample. No vendor publishes limits for slow windows. All
metrics of the healthy H200 nodes in docs/results meet the limits of this file: of 10 windows at most one was below 80 %
of the median, of 186 to 300 windows none. The significance levels are choices. The limits do not apply to a trial
without GPUs: the cores of a laptop or a virtual machine are shared, and healthy runs have slow windows.
docs/results/2026-11-23-judge has the resulting rates of false alarms and detected faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isclose
from statistics import fmean, harmonic_mean, median

from seatrial.judge.plausibility import TIME_UNITS
from seatrial.model import Basis, BasisKind, Metric, Outcome, Reason, Verdict, format_value
from seatrial.util.quantiles import binomial_tail, median_interval

SIGNIFICANCE = 0.01  # highest probability at which a healthy device would give such samples
# A window is slow below this share of the run's own median rate
SLOW_WINDOW = 0.8
VERY_SLOW_WINDOW = 0.5  # a single window below this share is a WARN
MAX_SLOW_SHARE = 0.05  # highest share of slow windows in a healthy run
# A violation whose interval contains the threshold is still conclusive if significantly more than MAX_BEYOND_SHARE of
# the samples violate the threshold by more than CLEAR_MARGIN, relative to the threshold
MAX_BEYOND_SHARE = 0.10
CLEAR_MARGIN = 0.05
_HEALTHY_RUN = f"a healthy run has at most {MAX_SLOW_SHARE:.0%} of its windows below {SLOW_WINDOW:.0%} of its median"


def violation(
    metric: Metric, threshold: float, is_met_by: Callable[[float], bool], outcome_if_violated: Outcome = Outcome.FAIL
) -> tuple[Outcome, tuple[float, float] | None]:
    """The outcome of a metric whose value violates ``threshold``; if UNJUDGED, the interval that reaches it.

    The outcome is ``outcome_if_violated`` if the whole interval violates the threshold, if significantly many samples
    violate it clearly (see MAX_BEYOND_SHARE), or if ``outcome_if_violated`` is WARN. Otherwise it is UNJUDGED.
    """
    if outcome_if_violated is Outcome.WARN or not any(map(is_met_by, metric.samples)):
        return outcome_if_violated, None
    interval = _interval(metric)
    if interval is None or not any(map(is_met_by, interval)):
        return outcome_if_violated, None
    margin = CLEAR_MARGIN * abs(threshold)
    beyond = sum(not is_met_by(sample - margin) and not is_met_by(sample + margin) for sample in metric.samples)
    if binomial_tail(beyond, len(metric.samples), MAX_BEYOND_SHARE) < SIGNIFICANCE:
        return outcome_if_violated, None
    return Outcome.UNJUDGED, interval


def slow_windows(check: str, metric: Metric) -> Verdict | None:
    """A FAIL if there are clearly more slow windows than in a healthy run, a WARN if probably more; else None.

    One very slow window is a WARN too. Each window is compared with the value of the metric, which is the median of its
    samples, so no reference value is needed.
    """
    samples, middle, unit = metric.samples, metric.value, metric.unit
    if not (slow := _slow_count(metric)) or not min(samples) <= middle <= max(samples):
        return None
    is_time, probability = unit in TIME_UNITS, binomial_tail(slow, len(samples), MAX_SLOW_SHARE)
    worst_sample = max(samples) if is_time else min(samples)
    if slow > 1 and probability < SIGNIFICANCE:
        outcome = Outcome.FAIL
    elif (slow > 1 and probability < 5 * SIGNIFICANCE) or _speed(worst_sample, middle, is_time) < VERY_SLOW_WINDOW:
        outcome = Outcome.WARN
    else:
        return None
    return Verdict(
        check,
        metric.subject,
        outcome,
        metric.name,
        (Reason.SLOW_WINDOWS,),
        f"{slow} of {len(samples)} windows; the slowest {format_value(worst_sample, unit)}",
        middle,
        unit,
        Basis(BasisKind.OWN_MEDIAN, "", middle, unit, source=_HEALTHY_RUN, fail_below=SLOW_WINDOW),
    )


def with_mean_speed(metric: Metric) -> Metric | None:
    """The metric with the mean speed of all windows as value, without samples; None with less than two slow windows.

    The mean is that of the whole measurement: total work divided by total time. A median hides that some windows
    are slow. The value is CLEAR_MARGIN better than the mean, so that it violates a limit only if the mean clearly does.
    """
    samples = metric.samples
    if _slow_count(metric) < 2 or len(samples) < 3 or not isclose(median(samples), metric.value, rel_tol=1e-3):
        return None
    if metric.unit in TIME_UNITS:
        return replace(metric, value=(1 - CLEAR_MARGIN) * fmean(samples), samples=())
    total_rate = harmonic_mean(samples) if min(samples) > 0 else 0.0
    return replace(metric, value=total_rate / (1 - CLEAR_MARGIN), samples=())


def _slow_count(metric: Metric) -> int:
    """The number of windows far slower than the median; 0 for metrics that are neither rates nor times."""
    samples, middle, is_time = metric.samples, metric.value, metric.unit in TIME_UNITS
    if len(samples) < 2 or middle <= 0 or not (is_time or "/s" in metric.unit):
        return 0
    if _speed(max(samples) if is_time else min(samples), middle, is_time) >= SLOW_WINDOW:  # true for most metrics
        return 0
    return sum(_speed(sample, middle, is_time) < SLOW_WINDOW for sample in samples)


def _speed(sample: float, middle: float, is_time: bool) -> float:
    """The speed of a window relative to the median of all windows."""
    if is_time:
        return middle / sample if sample > 0 else 1.0
    return sample / middle


def _interval(metric: Metric) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median, or with too few samples their range.

    None if the value is outside the range of the samples: then they are samples of another quantity. Slow operations
    have few samples; without the range as interval, each of their values beyond the threshold would FAIL.
    """
    samples = metric.samples
    if len(samples) < 2 or not min(samples) <= metric.value <= max(samples):
        return None
    return median_interval(samples) or (min(samples), max(samples))
