"""Locates slow nodes, GPUs, rails and paths: selects the pairs of nodes to measure and evaluates their bandwidth. Pure.

``pair_search`` yields steps of disjoint pairs, which run concurrently, and receives their rates: rounds of all nodes,
then the suspects with good partners, then the slow paths, then each direction. ``conclude`` evaluates the same rates.
A node or path that was slow in the first rounds may be slow by chance: it counts as slow only if it is slow again.

A transfer between two nodes is as fast as the slower of them, so a node is slow if all of its pairs are. Rates are
compared on a logarithmic scale with the healthy pairs of the same rail in the same step. Two nodes are one pair: see
two_nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, exp, expm1, sqrt
from statistics import fmean, median, pstdev
from typing import TypeVar

from seatrial.hardware.pair_rates import (
    Conclusion,
    Direction,
    Limits,
    Pair,
    PairRate,
    PairStep,
    SlowPath,
    SlowRank,
    Stage,
    log_ratio,
    slow_direction,
)
from seatrial.hardware.two_nodes import conclude_two_nodes, two_node_steps
from seatrial.util.grouping import grouped
from seatrial.util.quantiles import deviation

Key = TypeVar("Key")
ROUNDS = 3
REPEATS = 3  # repeats of each suspect, with another partner each time, and of each direction
PATH_REPEATS = 4  # repeats of each slow path: there are more paths than nodes, so that more are slow by chance
CONTROL_PAIRS = 4  # pairs of good nodes in a step with suspects, as the reference
MAX_PATHS = 128  # slow paths to repeat; most of them are disjoint and run concurrently
# Limits in standard deviations: for a suspect, and for a fault after the repetition. With noise of 1 %, a limit of 2.2
# misses 1 in 400 paths that are slow by 5 %. The repetition clears healthy paths that were slow by chance.
_SUSPECT_Z, _FAULT_Z = 2.2, 3.0
# A node or a path whose deficit is at least this share of ``Limits.log_deficit`` is a suspect. It is a fault if the
# repeated measurements show at least the whole ``Limits.log_deficit``
_NODE_SHARE, _PATH_SHARE = 2 / 3, 1 / 2
_MEDIAN_TO_MEAN = 1.2533  # standard deviation of the median of many normal values ÷ standard deviation of their mean


def round_robin(count: int, max_rounds: int) -> list[list[tuple[int, int]]]:
    """At most ``max_rounds`` rounds of disjoint pairs of the indices 0 to ``count`` - 1; no pair occurs twice.

    The circle method of round-robin tournaments (Kirkman, 1847): one position is fixed, the others rotate. All rounds
    together contain every pair once. With an odd ``count`` one index is idle in each round.
    """
    circle: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(min(max_rounds, len(circle) - 1)):
        opposite = [(circle[index], circle[-1 - index]) for index in range(len(circle) // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def pair_search(nodes: Sequence[str], limits: Limits) -> Generator[PairStep, Sequence[PairRate], Conclusion]:
    """Yield the steps to measure; each ``send`` takes the rates of the step. Returns the conclusion from all rates.

    The same rates give the same steps.
    """
    if len(nodes) == 2:
        return conclude_two_nodes((yield from two_node_steps(*nodes)), limits)
    rates: list[PairRate] = []
    for paired in round_robin(len(nodes), ROUNDS):
        rates += yield PairStep("rounds", tuple((nodes[a], nodes[b]) for a, b in paired))
    first_rounds = _FirstRounds(rates, limits)
    suspects = first_rounds.suspect_nodes
    good = [node for node in nodes if node not in suspects]
    for step in _steps("suspects", _with_partners(suspects, good, REPEATS), good):
        rates += yield step
    slow_nodes = list(dict.fromkeys(rank.node for rank in _slow_ranks(rates, first_rounds)))
    for step in _steps("paths", _disjoint(first_rounds.paths_without(slow_nodes)) * PATH_REPEATS, good):
        rates += yield step
    slow_paths = list(dict.fromkeys(path.pair for path in _slow_paths(rates, first_rounds, slow_nodes)))
    unidirectional = _with_partners(slow_nodes, good, REPEATS) + _disjoint(slow_paths) * REPEATS
    for step in _steps("directions", unidirectional, good):
        rates += yield replace(step, unidirectional=True)
        rates += yield replace(step, unidirectional=True, pairs=tuple((second, first) for first, second in step.pairs))
    return _conclude(rates, first_rounds)


def conclude(rates: Sequence[PairRate], limits: Limits) -> Conclusion:
    """The slow ranks, paths and rails by the rates of a search. Without repetitions no rank or path counts as slow."""
    if len({node for rate in rates for node in rate.pair}) == 2:
        return conclude_two_nodes(rates, limits)
    return _conclude(rates, _FirstRounds(rates, limits))


def _conclude(rates: Sequence[PairRate], first_rounds: _FirstRounds) -> Conclusion:
    if not first_rounds.rails:  # a record without rates
        return Conclusion(nodes=0, rails=0)
    ranks = list(_slow_ranks(rates, first_rounds))
    slow_nodes = {rank.node for rank in ranks}
    paths = list(_slow_paths(rates, first_rounds, slow_nodes))
    slow_pairs = {path.pair for path in paths}
    healthy = [
        fmean(rate.gb_s[: first_rounds.rails])
        for rate in first_rounds.rates
        if not slow_nodes & set(rate.pair) and rate.pair not in slow_pairs
    ]
    directions = _Directions(rates, first_rounds, slow_nodes | {node for path in paths for node in path.pair})
    return Conclusion(
        nodes=len({node for rate in first_rounds.rates for node in rate.pair}),
        rails=first_rounds.rails,
        ranks=tuple(replace(rank, direction=directions.of(rank.rail, rank.node)) for rank in ranks),
        paths=tuple(replace(path, direction=directions.of(path.rail, *path.pair)) for path in paths),
        slow_rails=first_rounds.slow_rails(),
        suspects=tuple(first_rounds.suspect_nodes),
        noise=max((rail.noise for rail in first_rounds.by_rail), default=0.0),
        healthy_gb_s=median(rail.healthy for rail in first_rounds.by_rail) if first_rounds.by_rail else 0.0,
        healthy_pairs=len(healthy),
        healthy_range_gb_s=(min(healthy, default=0.0), max(healthy, default=0.0)),
    )


@dataclass(frozen=True)
class _Rail:
    """One rail in the first rounds: its healthy rate in GB/s, its relative noise, its suspect nodes and paths."""

    healthy: float
    noise: float
    suspect_nodes: Mapping[str, float]  # node → mean log of rate / healthy rate
    suspect_paths: Mapping[Pair, float]  # pair → log of rate / healthy rate


class _FirstRounds:
    """The suspects of the first rounds. Its attribute ``rates`` has only the rates of the first rounds."""

    def __init__(self, rates: Sequence[PairRate], limits: Limits) -> None:
        self.limits = limits
        self.rates = [rate for rate in rates if rate.stage == "rounds"]
        nodes = dict.fromkeys(node for rate in self.rates for node in (rate.first, rate.second))
        self.rails = min(len(rate.gb_s) for rate in rates) if nodes else 0
        self.by_rail = [
            _with_suspects({rate.pair: rate.gb_s[rail] for rate in self.rates}, limits) for rail in range(self.rails)
        ]
        max_suspects = (len(nodes) - 1) // 2  # the others are needed as good partners
        self.suspect_nodes = _lowest(rail.suspect_nodes for rail in self.by_rail)[:max_suspects]
        self.suspect_paths = _lowest(rail.suspect_paths for rail in self.by_rail)[:MAX_PATHS]

    def paths_without(self, slow_nodes: Collection[str]) -> list[Pair]:
        """The suspect paths between nodes that are not slow."""
        return [pair for pair in self.suspect_paths if set(slow_nodes).isdisjoint(pair)]

    def typical(self, values: Sequence[float]) -> float:
        """The median of repeated rates of a suspect, or of their logs; the highest value with ``use_best``."""
        return max(values) if self.limits.use_best else median(values)

    def limit(self, rail: int, samples: int, controls: int) -> float:
        """The log of the smallest deficit that is a fault, for medians of ``samples`` and of ``controls`` rates."""
        error = _MEDIAN_TO_MEAN * self.by_rail[rail].noise * sqrt(1 / samples + 1 / max(1, controls))
        return max(self.limits.log_deficit, _FAULT_Z * error)

    def slow_rails(self) -> dict[int, float]:
        """Rail → its deficit relative to the fastest rail, for rails whose deficit is a fault."""
        fastest = max((rail.healthy for rail in self.by_rail), default=0.0)
        ratios = {index: log_ratio(rail.healthy, fastest) for index, rail in enumerate(self.by_rail)}
        pairs = max(1, len(self.rates))
        return {rail: -expm1(ratio) for rail, ratio in ratios.items() if ratio < -self.limit(rail, pairs, pairs)}


def _with_suspects(rates: Mapping[Pair, float], limits: Limits) -> _Rail:
    """Split the pairs of one rail into healthy and suspect ones, in two passes.

    The first pass takes reference and noise from the upper quartile of the rates. Faults hardly change the quartile,
    since they only make pairs slower. The second pass takes both from the pairs without the slow nodes that the first
    pass found.
    """
    ordered = sorted(rates.values())
    quartile = ordered[ceil(0.75 * (len(ordered) - 1))]
    noise = max(limits.min_noise, log_ratio(ordered[ceil(0.95 * (len(ordered) - 1))], quartile))
    residuals = {pair: log_ratio(rate, quartile) for pair, rate in rates.items()}
    slow = _slow_nodes(residuals, noise, limits)
    healthy = [residual for pair, residual in residuals.items() if slow.keys().isdisjoint(pair)]
    healthy = healthy or list(residuals.values())
    center = median(healthy)
    # The lower of two estimates: with few values each can be too high by chance, and slow paths raise pstdev
    noise = max(limits.min_noise * (1 + 2 / len(healthy)), min(deviation(healthy), pstdev(healthy, center)))
    residuals = {pair: residual - center for pair, residual in residuals.items()}
    path_limit = -max(limits.log_deficit * _PATH_SHARE, _SUSPECT_Z * noise)
    return _Rail(
        healthy=quartile * exp(center),
        noise=noise,
        suspect_nodes=_slow_nodes(residuals, noise, limits),
        suspect_paths={pair: residual for pair, residual in residuals.items() if residual < path_limit},
    )


def _slow_nodes(residuals: Mapping[Pair, float], noise: float, limits: Limits) -> dict[str, float]:
    """Node → mean log ratio, for nodes whose pairs are slow on average, the slowest first.

    ``residuals``: log of rate / healthy rate of each pair. The pairs of a slow node do not count for its partners.
    """
    entries = grouped((node, entry) for entry in residuals.items() for node in entry[0])
    by_node = {node: dict(of_node) for node, of_node in entries.items()}
    slow: dict[str, float] = {}
    scores = {node: fmean(pairs.values()) for node, pairs in by_node.items()}
    while scores:
        node = min(scores, key=scores.__getitem__)
        if scores[node] > -max(limits.log_deficit * _NODE_SHARE, _SUSPECT_Z * noise / sqrt(len(by_node[node]))):
            # The other nodes have a higher mean, but may have more pairs, for which a smaller deficit is significant
            del scores[node]
            if not scores or min(scores.values()) > -limits.log_deficit * _NODE_SHARE:
                return slow
            continue
        slow[node] = scores.pop(node)
        for pair in by_node[node]:
            partner = pair[0] if pair[1] == node else pair[1]
            by_node[partner].pop(pair, None)
            if partner in scores:
                if by_node[partner]:
                    scores[partner] = fmean(by_node[partner].values())
                else:  # all partners of this node are slow, so that nothing is known about the node
                    del scores[partner]
    return slow


def _lowest(by_rail: Iterable[Mapping[Key, float]]) -> list[Key]:
    """The keys of all rails, sorted by the lowest value of each key on any rail."""
    lowest: dict[Key, float] = {}
    for values in by_rail:
        for key, value in values.items():
            lowest[key] = min(value, lowest.get(key, value))
    return sorted(lowest, key=lowest.__getitem__)


def _with_partners(suspects: Sequence[str], good: Sequence[str], count: int) -> list[list[Pair]]:
    """``count`` steps in which each suspect has a good partner, a different one in each step.

    Needs more good nodes than suspects, so that the pairs of a step are disjoint.
    """
    return [
        [(node, good[(index + step) % len(good)]) for index, node in enumerate(suspects)]
        for step in range(count if suspects else 0)
    ]


def _disjoint(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Steps of disjoint pairs that have all ``pairs``. Each pair is added to the first step without its nodes."""
    steps: list[list[Pair]] = []
    for pair in pairs:
        free = (step for step in steps if not any(set(pair) & set(other) for other in step))
        step = next(free, None)
        if step is None:
            steps.append(step := [])
        step.append(pair)
    return steps


def _steps(stage: Stage, steps: Sequence[Sequence[Pair]], good: Sequence[str]) -> Iterator[PairStep]:
    """The steps, with pairs of idle good nodes as controls. If no step has any, steps with one control pair follow."""
    has_controls = not steps
    for pairs in steps:
        used = set(chain.from_iterable(pairs))
        idle = [node for node in good if node not in used]
        controls = list(zip(idle[::2], idle[1::2], strict=False))[:CONTROL_PAIRS]
        has_controls = has_controls or bool(controls)
        yield PairStep(stage, (*pairs, *controls))
    for _ in range(0 if has_controls or len(good) < 2 else REPEATS):
        yield PairStep(stage, ((good[0], good[1]),))


def _slow_ranks(rates: Sequence[PairRate], first_rounds: _FirstRounds) -> Iterator[SlowRank]:
    suspects = set(first_rounds.suspect_nodes)
    repeated = [rate for rate in rates if rate.stage == "suspects"]
    controls = [rate for rate in repeated if not suspects & set(rate.pair)]
    for node in first_rounds.suspect_nodes:
        first_rates = [rate for rate in first_rounds.rates if suspects & set(rate.pair) == {node}]
        node_rates = [rate for rate in repeated if node in rate.pair]
        for rail, deficits in _confirmed_rails(first_rates, node_rates, controls, first_rounds):
            yield SlowRank(node, rail, deficits)


def _slow_paths(
    rates: Sequence[PairRate], first_rounds: _FirstRounds, slow_nodes: Collection[str]
) -> Iterator[SlowPath]:
    paths = first_rounds.paths_without(slow_nodes)
    repeated = [rate for rate in rates if rate.stage == "paths"]
    controls = [rate for rate in repeated if rate.pair not in set(paths)]
    first_rates, repeated_rates = (
        grouped((rate.pair, rate) for rate in rates) for rates in (first_rounds.rates, repeated)
    )
    for pair in paths:
        confirmed = _confirmed_rails(first_rates.get(pair, []), repeated_rates.get(pair, []), controls, first_rounds)
        for rail, deficits in confirmed:
            yield SlowPath(pair, rail, deficits)


def _confirmed_rails(
    first_rates: Sequence[PairRate],
    repeated: Sequence[PairRate],
    controls: Sequence[PairRate],
    first_rounds: _FirstRounds,
) -> Iterator[tuple[int, tuple[float, ...]]]:
    """The rails on which a suspect is slow, with the deficits of the repetitions; none without repetitions.

    ``first_rates``: the rates of the suspect in the first rounds; they count too, except with ``use_best``.
    """
    for rail in range(first_rounds.rails if repeated else 0):
        healthy = first_rounds.by_rail[rail].healthy
        reference = median(rate.gb_s[rail] for rate in controls) if controls else healthy
        repeated_ratios = [log_ratio(rate.gb_s[rail], reference) for rate in repeated]
        first_ratios = (
            [] if first_rounds.limits.use_best else [log_ratio(rate.gb_s[rail], healthy) for rate in first_rates]
        )
        limit = first_rounds.limit(
            rail, len(first_ratios) + len(repeated_ratios), len(controls) or len(first_rounds.rates)
        )
        if max(first_rounds.typical([*first_ratios, *repeated_ratios]), first_rounds.typical(repeated_ratios)) < -limit:
            yield rail, tuple(-expm1(ratio) for ratio in repeated_ratios)


class _Directions:
    """The direction in which slow ranks and paths are slow, from rates of one direction at a time."""

    def __init__(self, rates: Sequence[PairRate], first_rounds: _FirstRounds, slow: Collection[str]) -> None:
        self._first_rounds = first_rounds
        self._rates = [rate for rate in rates if rate.stage == "directions"]
        self._controls = [rate for rate in self._rates if not set(slow) & set(rate.pair)]

    def of(self, rail: int, node: str, partner: str = "") -> Direction | None:
        """The slow direction of the transfers between ``node`` and ``partner``, by default with any partner.

        Without control pairs the faster direction is the reference, so that only one direction can be slow.
        """
        sent = [rate.gb_s[rail] for rate in self._rates if rate.first == node and partner in ("", rate.second)]
        received = [rate.gb_s[rail] for rate in self._rates if rate.second == node and partner in ("", rate.first)]
        if not sent or not received:
            return None
        sent_rate, received_rate = self._first_rounds.typical(sent), self._first_rounds.typical(received)
        controls = [rate.gb_s[rail] for rate in self._controls]
        reference = median(controls) if controls else max(sent_rate, received_rate)
        limit = -self._first_rounds.limit(rail, len(sent), len(controls))
        return slow_direction(log_ratio(sent_rate, reference) < limit, log_ratio(received_rate, reference) < limit)
