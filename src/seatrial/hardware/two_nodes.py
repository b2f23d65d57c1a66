"""Locates a slow part between two nodes: rails (GPU i of both nodes, with their NICs) and directions. Pure.

There is only one pair, so each rail is compared with the other rails, and each direction with the opposite one. The
rates never show which of the two nodes is at fault. A fault that is the same on all rails and in both directions is not
detected.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import ceil, expm1, sqrt
from statistics import median, pstdev

from seatrial.hardware.pair_rates import Conclusion, Limits, PairRate, PairStep, SlowPath, log_ratio, slow_direction

_REPEATS = 3  # measurements of both directions at once, and of each direction
_FAULT_Z = 3.0  # standard errors


def two_node_steps(first: str, second: str) -> Generator[PairStep, Sequence[PairRate], list[PairRate]]:
    """Yield the steps to measure; each ``send`` takes the rates of the step. Returns all rates."""
    rates: list[PairRate] = []
    for _ in range(_REPEATS):
        rates += yield PairStep("rounds", ((first, second),))
    for _ in range(_REPEATS):
        rates += yield PairStep("directions", ((first, second),), unidirectional=True)
        rates += yield PairStep("directions", ((second, first),), unidirectional=True)
    return rates


def conclude_two_nodes(rates: Sequence[PairRate], limits: Limits) -> Conclusion:
    """The rails and directions between two nodes that are slower than the others; none without repeated rates."""
    pair = rates[0].pair
    rails = min(len(rate.gb_s) for rate in rates)
    both = _Rates([rate for rate in rates if rate.stage == "rounds"], rails, limits)
    sent = _Rates([rate for rate in rates if rate.unidirectional and rate.first == pair[0]], rails, limits)
    received = _Rates([rate for rate in rates if rate.unidirectional and rate.first == pair[1]], rails, limits)
    noise = max(limits.min_noise, both.noise, sent.noise, received.noise)
    # _FAULT_Z standard errors of a difference of two means
    limit = max(limits.log_deficit, _FAULT_Z * noise * sqrt(2 / _REPEATS))
    healthy, healthy_unidirectional = _upper_quartile(both.typical), _upper_quartile([*sent.typical, *received.typical])
    references = {both: healthy, sent: healthy_unidirectional, received: healthy_unidirectional}
    paths = []
    for rail in range(rails if all(len(repeated.rates) > 1 for repeated in references) else 0):
        slow = [each for each, reference in references.items() if log_ratio(each.typical[rail], reference) < -limit]
        if slow:
            deficits = tuple(-expm1(log_ratio(rate.gb_s[rail], references[slow[0]])) for rate in slow[0].rates)
            paths.append(SlowPath(pair, rail, deficits, slow_direction(sent in slow, received in slow)))
    slow_rails = {path.rail for path in paths}
    healthy_rates = [rate for rail, rate in enumerate(both.typical) if rail not in slow_rails]
    return Conclusion(
        nodes=2,
        rails=rails,
        paths=tuple(paths),
        noise=noise,
        healthy_gb_s=median(healthy_rates) if healthy_rates else healthy,
        healthy_pairs=len(healthy_rates),
        healthy_range_gb_s=(min(healthy_rates, default=healthy), max(healthy_rates, default=healthy)),
    )


class _Rates:
    """Repeated rates of the same transfer.

    ``typical``: the typical GB/s of each rail. ``noise``: the relative standard deviation of repeated rates.
    """

    def __init__(self, rates: Sequence[PairRate], rails: int, limits: Limits) -> None:
        self.rates = rates
        by_rail = [[rate.gb_s[rail] for rate in rates] for rail in range(rails if rates else 0)]
        self.typical = [max(values) if limits.use_best else median(values) for values in by_rail]
        ratios = [log_ratio(value, median(values)) for values in by_rail for value in values]
        self.noise = pstdev(ratios) if len(ratios) > 1 and not limits.use_best else 0.0


def _upper_quartile(values: Sequence[float]) -> float:
    """The value at the upper quartile; of two values the higher one. Faults hardly change it: they only lower rates."""
    ordered = sorted(values)
    return ordered[ceil(0.75 * (len(ordered) - 1))] if ordered else 0.0
