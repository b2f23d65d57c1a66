"""Locates slow nodes, GPUs, rails and paths by bandwidth between pairs of nodes: which pairs to measure, and what they
show. Pure.

``pair_search`` yields steps of disjoint pairs, which run concurrently, and receives their rates: rounds of all nodes,
then the suspects with partners that are good, then slow paths again, then each direction. ``conclude`` reads the same
rates and decides. Only the repeated measurements count: the first rounds also select pairs that are slow by chance.

A transfer between two nodes is as fast as the slower of them, so a node is slow if all of its pairs are. Rates are
compared on a logarithmic scale with the healthy pairs of the same rail in the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, expm1, log, log1p, sqrt
from statistics import fmean, median, pstdev
from typing import Annotated, Literal, TypeVar

from pydantic import Field, FiniteFloat, model_validator

from seatrial.model import Frozen
from seatrial.util.quantiles import deviation

Stage = Literal["rounds", "suspects", "paths", "directions"]
Direction = Literal["sends", "receives", "both"]
Pair = tuple[str, str]  # names of two nodes
Key = TypeVar("Key")

# Facts of the check that measures the steps: rows of PairRate, and node → subjects of its ranks
PAIR_RATES, RANKS_BY_NODE = "pair_rates", "ranks_by_node"
ROUNDS = 3
PARTNERS = 5  # of each suspect, and repetitions of each slow path
_MIN_CONTROLS = 3
CONTROL_PAIRS = 4  # pairs of good nodes beside the suspects, as the reference
MIN_NODES = 3  # with two nodes, a slow pair does not show which node is slow
MAX_PATHS = 128  # slow paths to repeat; most of them are disjoint and run concurrently
# In standard deviations: for a suspect, and for a fault after the repetition. 2.2 misses 1 in 400 paths that are slow
# by 5 % with noise of 1 %; the repetition clears those that are slow by chance.
_SUSPECT_Z, _FAULT_Z = 2.2, 3.0
_MEDIAN_TO_MEAN = 1.2533  # standard deviation of the median of many normal values relative to that of their mean


@dataclass(frozen=True)
class Limits:
    """``min_deficit``: the smallest fault, as a share of the healthy rate. ``min_noise``: the smallest relative noise
    that is assumed, since few pairs may agree by chance. ``use_best``: the fastest of several rates counts, not their
    median, since disturbances only make a rate lower."""

    min_deficit: float
    min_noise: float
    use_best: bool = False

    @property
    def log_deficit(self) -> float:
        return -log1p(-self.min_deficit)


# NCCL: a fault of 5 % is found with noise of 1 %. CPUs: processes compete for cores, so that healthy rates differ by a
# factor of up to 4 (4 nodes on 2 cores), and only a rate below 40 % counts.
GPU_LIMITS = Limits(min_deficit=0.025, min_noise=0.005)
CPU_LIMITS = Limits(min_deficit=0.6, min_noise=0.2, use_best=True)


@dataclass(frozen=True)
class Step:
    """Disjoint pairs to measure concurrently. ``one_way``: only the first node of each pair sends."""

    stage: Stage
    pairs: tuple[Pair, ...]
    one_way: bool = False


class PairRate(Frozen):
    """The rate of each rail between two nodes in GB/s per direction; ``one_way``: only ``first`` sent."""

    stage: Stage
    first: str
    second: str
    gb_s: tuple[Annotated[FiniteFloat, Field(ge=0, le=1e6)], ...] = Field(min_length=1)
    one_way: bool = False

    @model_validator(mode="after")
    def _require_two_nodes(self) -> PairRate:
        if self.first == self.second:
            raise ValueError(f"a pair of {self.first} with itself")
        return self

    @property
    def pair(self) -> Pair:
        """Both names in alphabetical order."""
        return (self.first, self.second) if self.first < self.second else (self.second, self.first)


@dataclass(frozen=True)
class SlowPort:
    """A rank of a node that is slow with every partner; ``rail``: its index on the node.

    ``deficits``: 1 - rate / healthy rate of each repetition. ``direction``: None if it is unknown.
    """

    node: str
    rail: int
    deficits: tuple[float, ...]
    direction: Direction | None = None


@dataclass(frozen=True)
class SlowPath:
    """Two nodes that are slow with each other on a rail and not with others; fields as of SlowPort.

    ``direction``: sends: from the first to the second node.
    """

    pair: Pair
    rail: int
    deficits: tuple[float, ...]
    direction: Direction | None = None


@dataclass(frozen=True)
class Conclusion:
    """The result of a search.

    ``suspects``: nodes that were slow in the first rounds, less than half of all. ``noise``: relative standard
    deviation of healthy pairs. ``healthy_gb_s``: median, and ``healthy_range_gb_s`` lowest and highest rate of the
    ``healthy_pairs`` of the first rounds.
    """

    nodes: int
    rails: int
    ports: tuple[SlowPort, ...] = ()
    paths: tuple[SlowPath, ...] = ()
    slow_rails: Mapping[int, float] = field(default_factory=dict)  # rail → deficit
    suspects: tuple[str, ...] = ()
    noise: float = 0.0
    healthy_gb_s: float = 0.0
    healthy_pairs: int = 0
    healthy_range_gb_s: tuple[float, float] = (0.0, 0.0)


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


def pair_search(
    nodes: Sequence[str], limits: Limits, rounds: int = ROUNDS
) -> Generator[Step, Sequence[PairRate], Conclusion]:
    """Yield the steps to measure; each ``send`` takes the rates of the step. Returns what all rates show.

    The same rates give the same steps.
    """
    rates: list[PairRate] = []
    for paired in round_robin(len(nodes), rounds):
        rates += yield Step("rounds", tuple((nodes[a], nodes[b]) for a, b in paired))
    first = _FirstRounds(rates, limits)
    suspects, good = first.suspect_nodes, [node for node in nodes if node not in first.suspect_nodes]
    partners = [(node, partner) for node in suspects for partner in _partners(node, good)]
    for step in _steps("suspects", partners, good):
        rates += yield step
    slow_nodes = {port.node for port in _slow_ports(rates, first)}
    paths = [pair for pair in first.suspect_paths if not slow_nodes & set(pair)]
    for step in _steps("paths", [pair for pair in paths for _ in range(PARTNERS)], good):
        rates += yield step
    slow_paths = dict.fromkeys(path.pair for path in _slow_paths(rates, first, slow_nodes))
    forward = [pair for pair in partners if pair[0] in slow_nodes] + [
        pair for pair in slow_paths for _ in range(PARTNERS)
    ]
    for pairs in (forward, [(second, first) for first, second in forward]):
        for step in _steps("directions", pairs, good, one_way=True):
            rates += yield step
    return _conclude(rates, first)


def conclude(rates: Sequence[PairRate], limits: Limits) -> Conclusion:
    """The Conclusion from the rates of a search; without repetitions nothing is slow."""
    return _conclude(rates, _FirstRounds(rates, limits))


def _conclude(rates: Sequence[PairRate], first: _FirstRounds) -> Conclusion:
    if not first.rails:  # a record with too few nodes
        return Conclusion(nodes=0, rails=0)
    ports = list(_slow_ports(rates, first))
    slow_nodes = {port.node for port in ports}
    paths = list(_slow_paths(rates, first, slow_nodes))
    slow_pairs = {path.pair for path in paths}
    healthy = [
        fmean(rate.gb_s[: first.rails])
        for rate in first.rates
        if not slow_nodes & set(rate.pair) and rate.pair not in slow_pairs
    ]
    directions = _Directions(rates, first, slow_nodes | {node for path in paths for node in path.pair})
    return Conclusion(
        nodes=len({node for rate in first.rates for node in rate.pair}),
        rails=first.rails,
        ports=tuple(directions.of_port(port) for port in ports),
        paths=tuple(directions.of_path(path) for path in paths),
        slow_rails=first.slow_rails(),
        suspects=tuple(first.suspect_nodes),
        noise=max((rail.noise for rail in first.by_rail), default=0.0),
        healthy_gb_s=median(rail.healthy for rail in first.by_rail) if first.by_rail else 0.0,
        healthy_pairs=len(healthy),
        healthy_range_gb_s=(min(healthy, default=0.0), max(healthy, default=0.0)),
    )


@dataclass(frozen=True)
class _Rail:
    """One rail in the first rounds: its healthy rate in GB/s, its noise, and the nodes and pairs that are slower."""

    healthy: float
    noise: float
    nodes: Mapping[str, float]  # suspect → mean log of rate / healthy rate
    paths: Mapping[Pair, float]


class _FirstRounds:
    """The suspects of the first rounds; ``rates``: those of the first rounds."""

    def __init__(self, rates: Sequence[PairRate], limits: Limits) -> None:
        self.limits = limits
        self.rates = [rate for rate in rates if rate.stage == "rounds"]
        nodes = dict.fromkeys(node for rate in self.rates for node in (rate.first, rate.second))
        self.rails = min(len(rate.gb_s) for rate in rates) if len(nodes) >= MIN_NODES else 0
        self.by_rail = [
            _rail({rate.pair: rate.gb_s[rail] for rate in self.rates}, limits) for rail in range(self.rails)
        ]
        max_suspects = (len(nodes) - 1) // 2  # the others are needed as good partners
        self.suspect_nodes = _lowest(rail.nodes for rail in self.by_rail)[:max_suspects]
        self.suspect_paths = _lowest(rail.paths for rail in self.by_rail)[:MAX_PATHS]

    def typical(self, values: Sequence[float]) -> float:
        """The best or the median of the repeated rates of a suspect (or of their logs)."""
        return max(values) if self.limits.use_best else median(values)

    def limit(self, rail: int, samples: int, controls: int) -> float:
        """The log of the smallest deficit that is a fault, for the median of this number of rates."""
        error = _MEDIAN_TO_MEAN * self.by_rail[rail].noise * sqrt(1 / samples + 1 / max(1, controls))
        return max(self.limits.log_deficit, _FAULT_Z * error)

    def slow_rails(self) -> dict[int, float]:
        """Rail → its deficit relative to the fastest rail, where that is a fault."""
        fastest = max((rail.healthy for rail in self.by_rail), default=0.0)
        ratios = {number: _log_ratio(rail.healthy, fastest) for number, rail in enumerate(self.by_rail)}
        pairs = max(1, len(self.rates))
        return {rail: -expm1(ratio) for rail, ratio in ratios.items() if ratio < -self.limit(rail, pairs, pairs)}


def _rail(rates: Mapping[Pair, float], limits: Limits) -> _Rail:
    """Split the pairs of one rail into healthy and suspect ones, in two passes.

    The first pass takes reference and noise from the upper quartile of the rates, which faults hardly change: they make
    pairs slower only. The second takes them from the pairs that the first leaves.
    """
    ordered = sorted(rates.values())
    quartile = ordered[ceil(0.75 * (len(ordered) - 1))]
    noise = max(limits.min_noise, _log_ratio(ordered[ceil(0.95 * (len(ordered) - 1))], quartile))
    residuals = {pair: _log_ratio(rate, quartile) for pair, rate in rates.items()}
    slow = _slow_nodes(residuals, noise, limits)
    left = [residual for pair, residual in residuals.items() if slow.keys().isdisjoint(pair)] or list(
        residuals.values()
    )
    center = median(left)
    # of few values either estimate may be too high by chance, and slow paths raise the second
    noise = max(
        limits.min_noise * (1 + 2 / len(left)),
        min(deviation(left), pstdev(left, center)),
    )
    residuals = {pair: residual - center for pair, residual in residuals.items()}
    below = -max(limits.log_deficit / 2, _SUSPECT_Z * noise)
    return _Rail(
        healthy=quartile * exp(center),
        noise=noise,
        nodes=_slow_nodes(residuals, noise, limits),
        paths={pair: residual for pair, residual in residuals.items() if residual < below},
    )


def _slow_nodes(residuals: Mapping[Pair, float], noise: float, limits: Limits) -> dict[str, float]:
    """Nodes whose pairs are slow on average, slowest first; pairs with such a node do not count for their partners."""
    by_node: dict[str, dict[Pair, float]] = {}
    for pair, residual in residuals.items():
        for node in pair:
            by_node.setdefault(node, {})[pair] = residual
    slow: dict[str, float] = {}
    scores = {node: fmean(pairs.values()) for node, pairs in by_node.items()}
    while scores:
        node = min(scores, key=scores.__getitem__)
        if scores[node] > -max(limits.log_deficit / 2, _SUSPECT_Z * noise / sqrt(len(by_node[node]))):
            # the others have a higher mean, but may have more pairs
            del scores[node]
            if not scores or min(scores.values()) > -limits.log_deficit / 2:
                return slow
            continue
        slow[node] = scores.pop(node)
        for pair in by_node[node]:
            partner = pair[0] if pair[1] == node else pair[1]
            by_node[partner].pop(pair, None)
            if partner in scores:
                if by_node[partner]:
                    scores[partner] = fmean(by_node[partner].values())
                else:  # all of its partners are slow, so that its own speed is unknown
                    del scores[partner]
    return slow


def _lowest(by_rail: Iterable[Mapping[Key, float]]) -> list[Key]:
    """The keys of all rails, the one with the lowest value first."""
    lowest: dict[Key, float] = {}
    for values in by_rail:
        for key, value in values.items():
            lowest[key] = min(value, lowest.get(key, value))
    return sorted(lowest, key=lowest.__getitem__)


def _log_ratio(rate: float, reference: float) -> float:
    """Log of rate / reference; a rate of 0 counts as a millionth of the reference."""
    return log(max(rate / reference, 1e-6)) if reference else 0.0


def _partners(node: str, good: Sequence[str]) -> list[str]:
    """PARTNERS of the good nodes, different ones for neighbouring suspects; with few good nodes at least three."""
    start = sum(node.encode()) % len(good)
    return [good[(start + step) % len(good)] for step in range(max(_MIN_CONTROLS, min(PARTNERS, len(good))))]


def _steps(stage: Stage, pairs: Sequence[Pair], good: Sequence[str], *, one_way: bool = False) -> Iterator[Step]:
    """The pairs in few steps of disjoint pairs (greedy order), each step with pairs of good nodes as control.

    Where all good nodes are partners of suspects, steps with a control pair alone follow.
    """
    left, has_controls = list(pairs), not pairs
    while left:
        used: set[str] = set()
        step: list[Pair] = []
        for pair in left:
            if not used & set(pair):
                step.append(pair)
                used |= set(pair)
        for pair in step:
            left.remove(pair)
        idle = [node for node in good if node not in used]
        controls = list(zip(idle[::2], idle[1::2], strict=False))[:CONTROL_PAIRS]
        has_controls = has_controls or bool(controls)
        yield Step(stage, (*step, *controls), one_way)
    for _ in range(0 if has_controls or len(good) < 2 else _MIN_CONTROLS):
        yield Step(stage, ((good[0], good[1]),), one_way)


def _slow_ports(rates: Sequence[PairRate], first: _FirstRounds) -> Iterator[SlowPort]:
    repeated = [rate for rate in rates if rate.stage == "suspects"]
    references, count = _references(repeated, first, set(first.suspect_nodes))
    for node in first.suspect_nodes:
        of_node = [rate for rate in repeated if node in rate.pair]
        for rail in range(first.rails if of_node else 0):
            ratios = [_log_ratio(rate.gb_s[rail], references[rail]) for rate in of_node]
            if first.typical(ratios) < -first.limit(rail, len(ratios), count):
                yield SlowPort(node, rail, tuple(-expm1(ratio) for ratio in ratios))


def _slow_paths(rates: Sequence[PairRate], first: _FirstRounds, slow_nodes: Collection[str]) -> Iterator[SlowPath]:
    repeated = [rate for rate in rates if rate.stage == "paths"]
    paths = [pair for pair in first.suspect_paths if not set(slow_nodes) & set(pair)]
    references, count = _references([rate for rate in repeated if rate.pair not in set(paths)], first, set())
    for pair in paths:
        of_pair = [rate for rate in repeated if rate.pair == pair]
        for rail in range(first.rails if of_pair else 0):
            ratios = [_log_ratio(rate.gb_s[rail], references[rail]) for rate in of_pair]
            if first.typical(ratios) < -first.limit(rail, len(ratios), count):
                yield SlowPath(pair, rail, tuple(-expm1(ratio) for ratio in ratios))


def _references(rates: Iterable[PairRate], first: _FirstRounds, suspects: Collection[str]) -> tuple[list[float], int]:
    """The healthy rate of each rail in repeated steps, of pairs without suspects, and the number of these.

    Without such pairs it is that of the first rounds.
    """
    controls = [rate for rate in rates if not set(suspects) & set(rate.pair)]
    references = [
        median(rate.gb_s[number] for rate in controls) if controls else rail.healthy
        for number, rail in enumerate(first.by_rail)
    ]
    return references, len(controls) or len(first.rates)


class _Directions:
    """The direction in which slow ports and paths are slow, from rates of one direction at a time."""

    def __init__(self, rates: Sequence[PairRate], first: _FirstRounds, slow: Collection[str]) -> None:
        self._first = first
        self._rates = [rate for rate in rates if rate.stage == "directions"]
        self._controls = [rate for rate in self._rates if not set(slow) & set(rate.pair)]

    def of_port(self, port: SlowPort) -> SlowPort:
        sent = [rate.gb_s[port.rail] for rate in self._rates if rate.first == port.node]
        received = [rate.gb_s[port.rail] for rate in self._rates if rate.second == port.node]
        return replace(port, direction=self._direction(sent, received, port.rail))

    def of_path(self, path: SlowPath) -> SlowPath:
        first, second = path.pair
        there = [rate.gb_s[path.rail] for rate in self._rates if (rate.first, rate.second) == (first, second)]
        back = [rate.gb_s[path.rail] for rate in self._rates if (rate.first, rate.second) == (second, first)]
        return replace(path, direction=self._direction(there, back, path.rail))

    def _direction(self, sent: Sequence[float], received: Sequence[float], rail: int) -> Direction | None:
        """The slow direction. Without control pairs the faster direction is the reference, so only one can be slow."""
        if not sent or not received:
            return None
        out, back = self._first.typical(sent), self._first.typical(received)
        controls = [rate.gb_s[rail] for rate in self._controls]
        reference = median(controls) if controls else max(out, back)
        limit = -self._first.limit(rail, len(sent), len(controls))
        if _log_ratio(out, reference) < limit:
            return "both" if _log_ratio(back, reference) < limit else "sends"
        return "receives" if _log_ratio(back, reference) < limit else None
