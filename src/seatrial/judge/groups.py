"""What a rule looks at together: the ranks of one operation, the places that must each have a figure, and like devices.

Fails closed: ranks of one operation that contradict each other prove nothing, nor does a place that is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import combinations, permutations

from pydantic import JsonValue

from seatrial.checks.base import Check, SubjectKind
from seatrial.hardware.references import PeerGroup
from seatrial.model import CLUSTER, EXEMPT, GPUS_USED, Measurement, Metric, Scope
from seatrial.util.text import and_more

NO_PEERS = PeerGroup("", ())
_NAMED = 4  # how many places a sentence names
# What a baseline of the check as a whole depends on: its ranks must be of one mind about it.
SHAPE_FACTS = ("gpu", "world_size", "nodes")
_PLAIN = (str, int, type(None))


class MeasurementGroup:
    """Measurements that together must hold what a rule asks for: their facts as one, and by name their metrics.

    Of these only those of ``given``, which says what each is given of every one of, if of any: a thousand nodes bring
    a million, and of every second one there is nothing to judge.
    """

    def __init__(
        self, measurements: Sequence[Measurement], check: Check, given: Mapping[str, SubjectKind | None]
    ) -> None:
        first, self.has_several_ranks = measurements[0], len(measurements) > 1
        self.subject, self.failed, self.facts = first.subject, bool(first.error), first.facts
        if self.has_several_ranks:
            self.subject, self.failed, self.facts = CLUSTER, any(one.error for one in measurements), {}
            for measurement in measurements:
                self.facts |= measurement.facts
        if check.per_node:
            self.subject = node_of(first)
        self.gpu_model = gpu_model(self.facts)
        self.metrics: dict[str, list[Metric]] = {}
        for measurement in measurements:
            for metric in measurement.metrics:
                if (name := metric.name) in given:
                    if (named := self.metrics.get(name)) is None:
                        self.metrics[name] = [metric]
                    else:
                        named.append(metric)
        self.is_per_gpu, self.required_per = check.scope is Scope.GPU, given
        self._measurements, self._unlike = measurements, dict[str, str]()

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """What a baseline depends on, to look things up by, whatever a record holds in its place."""
        return tuple([one if type(one) in _PLAIN else (repr(one),) for one in map(self.facts.get, SHAPE_FACTS)])

    def rank_disagreement(self, names: Iterable[str]) -> str:
        """Which of these facts the ranks tell otherwise than each other, and who; empty where all that tell agree."""
        for name in names:
            if name not in self._unlike:
                self._unlike[name] = _unlike(name, self._measurements)
        return "; ".join(filter(None, map(self._unlike.__getitem__, names)))

    def exempt_subjects(self, metric: str) -> dict[str, str]:
        """The places that rightly have no ``metric``, though the check gives it of every one, and why."""
        told = self.facts.get(EXEMPT)
        if not isinstance(told, Mapping) or self.required_per[metric] not in ("place", "gpu"):
            return {}
        measured = {one.subject for one in self.metrics[metric]}
        whys = {place: why.get(metric) if isinstance(why, Mapping) else why for place, why in told.items()}
        return {place: str(why) for place, why in whys.items() if why is not None and place not in measured}

    def missing_subjects(self, metric: str) -> str:
        """Of which places a metric is missing that is given of some, where the check gives it of every one."""
        kind = self.required_per[metric]
        if not kind or self.failed:  # an error has been told already
            return ""
        expected = self._gpus() if kind == "gpu" else _EVERY[kind]([one.subject for one in self._measurements])
        if kind == "gpu" and not expected:
            return f"the GPUs that were used, since the fact {GPUS_USED} lists none"
        found = {one.subject for one in self.metrics[metric]}.union(self.exempt_subjects(metric))
        if kind == "pair":  # whichever of the two it names first
            found |= {opposite_direction(subject) for subject in found}
        missing = [place for place in expected if place not in found]
        return f"{len(missing)} of {len(expected)}: {and_more(missing, _NAMED)}" if missing else ""

    def _gpus(self) -> list[str]:
        """Those of a node that were looked at: what was found of them does not tell how many they are."""
        used = self.facts.get(GPUS_USED)
        return [f"{self.subject}/gpu{index}" for index in used] if isinstance(used, list) else []


def measurement_groups(check: Check, measured: Sequence[Measurement], names: Set[str]) -> list[MeasurementGroup]:
    """All ranks of a collective together, or those of a node where each works by itself; else each place alone.

    ``names`` are those of the metrics that are judged.
    """
    given = {name: _of(check.required_per, name) for name in names}
    if check.per_node:
        nodes: dict[str, list[Measurement]] = {}
        for one in measured:
            nodes.setdefault(node_of(one), []).append(one)
        return [MeasurementGroup(ranks, check, given) for ranks in nodes.values()]
    if check.scope is Scope.CLUSTER:
        return [MeasurementGroup(measured, check, given)] if measured else []
    return [MeasurementGroup([measurement], check, given) for measurement in measured]


class PeerGroups:
    """The values of one metric on like GPUs: unlike ones are never compared.

    Two nodes cannot outvote each other, however many GPUs each has: of two, each is compared with itself alone.
    """

    def __init__(self) -> None:
        # by model and node
        self._values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._fleets: dict[tuple[str, str], PeerGroup] = {}

    def add(self, model: str, subject: str, value: float) -> None:
        self._values[model][subject.partition("/")[0]].append(value)

    def group_of(self, model: str, subject: str) -> PeerGroup:
        """The fleet that ``subject``, a GPU of this ``model``, is one of."""
        if (found := self._fleets.get((model, ""))) is not None:
            return found
        nodes = self._values.get(model, {})
        node = subject.partition("/")[0] if len(nodes) == 2 else ""
        if (found := self._fleets.get((model, node))) is None:
            chosen = [nodes.get(node, [])] if node else list(nodes.values())
            found = PeerGroup(model, tuple(value for some in chosen for value in some), node)
            self._fleets[model, node] = found
        return found


def peer_groups(names: Sequence[str], measured: Sequence[Measurement]) -> dict[str, PeerGroups]:
    """All values of each metric of ``names``."""
    found = {name: PeerGroups() for name in names}
    for measurement in measured if names else ():
        model = gpu_model(measurement.facts)
        for metric in measurement.metrics:
            if (fleets := found.get(metric.name)) is not None:
                fleets.add(model, metric.subject, metric.value)
    return found


def node_of(measurement: Measurement) -> str:
    """The node on which it was made."""
    return measurement.subject.partition("/")[0]


def gpu_model(facts: Mapping[str, JsonValue]) -> str:
    """NVML's name of the GPU; empty where the check told of none."""
    return str(facts.get("gpu") or "")


def opposite_direction(subject: str) -> str:
    """The opposite direction of a pair: ``n/gpu1->gpu0`` of ``n/gpu0->gpu1``, ``n2->n1`` of ``n1->n2``."""
    before, _, target = subject.partition("->")
    node, slash, source = before.rpartition("/")
    return f"{node}{slash}{target}->{source}"


def _unlike(name: str, measurements: Sequence[Measurement]) -> str:
    told: dict[str, str] = {}
    for one in measurements:
        if name in one.facts:
            told.setdefault(str(one.facts[name]), one.subject)
    words = [f"{value} at {place}" for value, place in told.items()]
    return f"{name} is {and_more(words, _NAMED)}" if len(words) > 1 else ""


def _of(per: Mapping[str, SubjectKind], metric: str) -> SubjectKind | None:
    """What a check gives a metric of every one of; None where it need not be of all."""
    return next((kind for family, kind in per.items() if fnmatchcase(metric, family)), None)


def _by_node(places: Sequence[str]) -> dict[str, list[str]]:
    """The names of places on each node: gpu0, gpu1 on n0."""
    found: dict[str, list[str]] = {}
    for place in places:
        node, _, name = place.rpartition("/")
        found.setdefault(node, []).append(name)
    return found


def _pairs(places: Sequence[str], *, ordered: bool) -> list[str]:
    """Every two places of one node: n0/gpu0->gpu1, and ``ordered`` n0/gpu1->gpu0 too."""
    twos = permutations if ordered else combinations
    return [f"{node}/{a}->{b}" for node, names in _by_node(places).items() for a, b in twos(names, 2)]


def _nodes(places: Sequence[str]) -> list[str]:
    """Every node; one by itself is the cluster."""
    found = list(_by_node(places))
    return found if len(found) > 1 else [CLUSTER]


def _rails(places: Sequence[str]) -> list[str]:
    """The first GPU of every node is rail0, the second rail1."""
    return [f"rail{number}" for number in range(max(map(len, _by_node(places).values())))]


# Of what a metric is given, by the places that took part; GPUs are those that the node itself lists
_EVERY: Mapping[str, Callable[[Sequence[str]], list[str]]] = {
    "place": list,
    "pair": partial(_pairs, ordered=False),
    "ordered pair": partial(_pairs, ordered=True),
    "node": _nodes,
    "rail": _rails,
}
