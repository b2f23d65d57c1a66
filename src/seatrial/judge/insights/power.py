"""The slowdowns that a limit rejects, from the noise and the number of samples. Pure.

A value is the median of n samples with relative noise s, so its standard error is sqrt(pi/2)·s/sqrt(n). A trial is
rejected in two cases (judge/retry.py). First: a measurement and its retry are both below the limit, and so is the 95 %
interval of all their samples. Second: only one of the two is below the limit, and a third measurement is below it too.
benchmarks/decision_power.py compares this model with the decisions on whole records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, inf, pi, sqrt
from statistics import NormalDist, median

from seatrial.checks.check import Checks
from seatrial.hardware.references import Reference, References
from seatrial.judge.groups import Facts
from seatrial.model import Insight, Measurement, Metric, Rule
from seatrial.model.rule import PEERS, REFERENCE
from seatrial.util.grouping import grouped
from seatrial.util.quantiles import deviation, expected_half_width, independent_samples

CERTAINTY = 0.99  # share of trials in which a detectable slowdown is rejected
MAX_RATIO = 1.5  # above this ratio of detectable slowdown to slowdown at the limit, more samples are advised
_STEPS = 400  # steps of the numerical integration
_NORMAL = NormalDist()
_WithFacts = tuple[Metric, Facts]  # a metric, and the facts of its measurement


def rejected_share(slowdown: float, limit: float, noise: float, samples: float) -> float:
    """Return the share of trials that reject a device of relative speed 1 - ``slowdown``.

    ``limit``: the relative speed below which a value is bad. ``noise``: relative standard deviation of the samples.
    """
    error = sqrt(pi / 2) * noise / sqrt(samples)  # of the median of independent normal samples
    if error == 0:
        return float(1 - slowdown < limit)
    distance = (limit - (1 - slowdown)) / error
    bad = _NORMAL.cdf(distance)
    # First case: u1, u2 > 0 and (u1 + u2)/2 > half width, where u1 and u2 are the distances of the two measurements
    # below the limit, in standard errors of one measurement
    half_width = noise * expected_half_width(max(2, round(2 * samples))) / error
    step = 12 / _STEPS  # from 6 standard errors below the mean to 6 above
    both_bad = 0.0
    for index in range(_STEPS):
        u1 = distance - 6 + (index + 0.5) * step
        if u1 > 0:
            density = exp(-((u1 - distance) ** 2) / 2) / sqrt(2 * pi)
            both_bad += step * density * _NORMAL.cdf(distance - max(0.0, 2 * half_width - u1))
    third_decides = 2 * bad * (1 - bad) * bad  # second case: exactly one of the first two is bad, and the third
    return both_bad + third_decides


@cache
def detectable_slowdown(limit: float, noise: float, samples: float) -> float:
    """Return the smallest slowdown that is rejected in 99 % of trials, at most 1."""
    low, high = 1 - limit, 1.0
    if rejected_share(high, limit, noise, samples) < CERTAINTY:
        return 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if rejected_share(middle, limit, noise, samples) >= CERTAINTY else (middle, high)
    return high


def samples_needed(slowdown: float, limit: float, noise: float) -> int | None:
    """Return the number of independent samples with which ``slowdown`` is rejected in 99 % of trials.

    None if a device with this slowdown is not below ``limit``, or if more than 100,000 samples are needed.
    """
    if 1 - slowdown >= limit:
        return None
    low, high = 1, 100_000
    if rejected_share(slowdown, limit, noise, high) < CERTAINTY:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if rejected_share(slowdown, limit, noise, middle) >= CERTAINTY else (middle + 1, high)
    return high


def samples_table(limit: float) -> dict[float, dict[float, int | None]]:
    """Return noise → slowdown → samples needed, for slowdowns 1 to 10 percentage points beyond ``limit``."""
    slowdowns = [round(1 - limit + beyond, 4) for beyond in (0.01, 0.02, 0.03, 0.05, 0.10)]
    return {
        noise: {slowdown: samples_needed(slowdown, limit, noise) for slowdown in slowdowns}
        for noise in (0.005, 0.01, 0.02, 0.03, 0.05, 0.10)
    }


@dataclass(frozen=True)
class _Sensitivity:
    """The detectable slowdown of one metric on its noisiest subject."""

    metric: str
    at_limit: float  # slowdown of a device whose speed is the limit
    detectable: float  # smallest slowdown that is rejected in 99 % of trials
    noise: float  # relative standard deviation of the samples
    samples: int

    def __str__(self) -> str:
        basis = f"limit {self.at_limit:.1%}, noise {self.noise:.2%}, {self.samples} samples"
        advice = ": take more samples" if self.detectable > MAX_RATIO * self.at_limit else ""
        return f"{self.metric} {self.detectable:.1%} ({basis}){advice}"


def sensitivity_insights(
    measurements: Sequence[Measurement], checks: Checks, references: References
) -> Iterator[Insight]:
    """Yield for each check the slowdowns that its limits reject in 99 % of trials with the noise of its samples."""
    names = [name for name in dict.fromkeys(each.check for each in measurements) if name in checks]
    rules = [(name, rule) for name in names for rule in checks[name].rules if rule.share(REFERENCE) is not None]
    judged = {(name, rule.metric) for name, rule in rules}
    sampled = grouped(  # in one pass, since a thousand nodes report a million metrics
        (key, (metric, measurement.facts))
        for measurement in measurements
        for metric in measurement.metrics
        if len(metric.samples) > 1 and (key := (measurement.check, metric.name)) in judged
    )
    found = ((name, _sensitivity(rule, sampled.get((name, rule.metric), ()), references)) for name, rule in rules)
    for name, sensitivities in grouped((name, each) for name, each in found if each).items():
        sizes = "; ".join(map(str, sensitivities))
        text = f"a slowdown of this size is rejected with {CERTAINTY:.0%} probability: {sizes}"
        values = {each.metric: each.detectable for each in sensitivities}
        yield Insight(check=name, title="sensitivity", text=text, values={**values})


def _sensitivity(rule: Rule, sampled: Sequence[_WithFacts], references: References) -> _Sensitivity | None:
    """The sensitivity of a rule with a reference value, on the subject with the widest range of samples.

    None if there are no metrics, if there is no limit, or if the limit is not below the median of the metrics.
    """
    metrics = [each for each in sampled if rule.when.facts.items() <= each[1].items()]
    healthy = median(metric.value for metric, _ in metrics) if metrics else 0.0
    if healthy <= 0:
        return None
    noisiest, facts = max(metrics, key=lambda each: max(each[0].samples) - min(each[0].samples))
    limit = _limit(rule, references.applicable(rule.reference, facts), healthy) / healthy
    if limit >= 1:
        return None
    noise = deviation(noisiest.samples) / healthy
    detectable = detectable_slowdown(limit, noise, independent_samples(noisiest.samples))
    return _Sensitivity(rule.metric, 1 - limit, detectable, noise, len(noisiest.samples))


def _limit(rule: Rule, applied: Sequence[Reference], healthy: float) -> float:
    """The value, in the unit of the metric, below which the metric fails. It is infinite if there is no limit."""
    limits = [(rule.share(PEERS) or 0.0) * healthy] if rule.share(PEERS) else []
    limits += (reference.required_value(rule.share(REFERENCE) or 0.0) for reference in applied)
    return max(limits, default=inf)
