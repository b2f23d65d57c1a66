"""Groups of measurements that a rule evaluates together, the subjects that a metric requires, and peer groups."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import chain, combinations, permutations
from statistics import median
from typing import Annotated, Any

from pydantic import Field, JsonValue, StrictInt, TypeAdapter, ValidationError

from seatrial.checks.check import Check
from seatrial.checks.declare import SubjectKind
from seatrial.hardware.references import PeerGroup
from seatrial.model import CLUSTER, GPUS_USED, PORTS_USED, Absent, Measurement, Metric, Scope, Why, node_of
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more

_MAX_NAMED = 4  # subjects listed in one message
_GPU = "gpu"
SHAPE_FACTS = (_GPU, "world_size", "nodes")  # facts that select a reference value; all ranks must agree on them
_HASHABLE = (str, int, type(None))
_MAX_VALUE_CHARS = 80  # longer values of facts are truncated in messages
Facts = Mapping[str, JsonValue]  # of a measurement, or those that all of a group have
_Text = Annotated[str, Field(min_length=1)]


# Facts that any check may record → their type, and its description
_COMMON_FACTS: Mapping[str, tuple[TypeAdapter[Any], str]] = {
    GPUS_USED: (TypeAdapter(list[Annotated[StrictInt, Field(ge=0)]]), "a list of NVML indices"),
    PORTS_USED: (TypeAdapter(dict[str, list[_Text]]), "names of RDMA ports by node"),
}


class MeasurementGroup:
    """The measurements to which a rule applies as a whole: their merged facts, and their metrics by name.

    ``per``: metric → the kind of subjects (rank, gpu, node, …) that must each answer; None: one answer is enough.
    Metrics that are not in it are dropped, since a thousand nodes report a million metrics.
    """

    def __init__(
        self, measurements: Sequence[Measurement], check: Check, per: Mapping[str, SubjectKind | None]
    ) -> None:
        first, self.has_several_ranks = measurements[0], len(measurements) > 1
        self.subject, self.failed, self.facts = first.subject, bool(first.error), first.facts
        if self.has_several_ranks:
            self.subject = CLUSTER
            self.failed = any(each.error for each in measurements)
            self.facts = {}
            for measurement in measurements:
                self.facts |= measurement.facts
        if check.per_node:
            self.subject = node_of(first.subject)
        self.model = _text_fact(check.model_fact, self.facts)
        # a check that compares hosts (by another ``model_fact``) needs no numbers of ranks and nodes
        self._shape_facts = SHAPE_FACTS if check.model_fact == _GPU else (check.model_fact,)
        self.metrics: dict[str, list[Metric]] = {}
        self._absent: dict[str, dict[str, Absent]] = {}
        for measurement in measurements:
            for metric in measurement.metrics:
                if (name := metric.name) in per:
                    if (same_name := self.metrics.get(name)) is None:
                        self.metrics[name] = [metric]
                    else:
                        same_name.append(metric)
            for absent in measurement.absent:
                self._absent.setdefault(absent.metric, {})[absent.subject] = absent
        self.is_per_gpu, self.per = check.scope is Scope.GPU, per
        self._measurements, self._disagreements = measurements, dict[str, str]()

    def absent(self, metric: str) -> Mapping[str, Absent]:
        """Subject → why it has no value of ``metric``; "" stands for all subjects of the group.

        The answer on a family such as ``busbw.*`` counts for all subjects only if the metric has no value.
        """
        if (absent := self._absent.get(metric)) is None and self._absent:
            family = next((each for name, each in self._absent.items() if fnmatchcase(metric, name)), {})
            absent = {subject: each for subject, each in family.items() if subject or metric not in self.metrics}
            self._absent[metric] = absent
        return absent or {}

    @cached_property
    def ranks_and_nodes(self) -> tuple[int, int]:
        """The number of measured ranks and the number of their nodes; 0 and 0 if no measurement has a rank."""
        ranked = [each for each in self._measurements if each.rank is not None]
        return len(ranked), len({node_of(each.subject) for each in ranked})

    @cached_property
    def invalid_shape(self) -> str:
        """A message on the first shape fact that is missing or invalid; empty if all are valid."""
        for name in self._shape_facts:
            value = self.facts.get(name)
            is_model = name == self._shape_facts[0]
            if is_model and not (isinstance(value, str) and value):
                expected = "the NVML name of the GPU" if name == _GPU else "the model of the device"
                return fact_text(name, self.facts, expected)
            if not is_model and not (type(value) is int and value > 0):
                return fact_text(name, self.facts, "a positive integer")
        return ""

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """The values of the facts that select a reference value, as a hashable key."""
        return self.fact_values(self._shape_facts)

    def fact_values(self, names: Iterable[str]) -> tuple[object, ...]:
        """The values of these facts as a hashable key; equal values of different types give different keys."""
        values = map(self.facts.get, names)
        return tuple([value if type(value) in _HASHABLE else (repr(value),) for value in values])

    def rank_disagreement(self, names: Iterable[str]) -> str:
        """The facts among ``names`` that differ between ranks, each value with one subject; empty if all agree."""
        for name in names:
            if name not in self._disagreements:
                self._disagreements[name] = _disagreement(name, self._measurements)
        differing = "; ".join(filter(None, map(self._disagreements.__getitem__, names)))
        return differing and f"ranks report different values of {differing}"

    def missing_subjects(self, metric: str) -> str:
        """The required subjects without a value of ``metric``, as text; empty if there are none."""
        kind, absent = self.per[metric], self.absent(metric)
        if not kind or self.failed or "" in absent:  # an error has its own verdict
            return ""
        if kind == "gpu":
            expected = [f"{self.subject}/gpu{index}" for index in common_fact(self.facts, GPUS_USED) or ()]
            if not expected:
                return f"the fact {GPUS_USED} lists no GPU"
        elif kind == "port":
            ports = common_fact(self.facts, PORTS_USED) or {}
            expected = [f"{node}/{name}" for node, names in ports.items() for name in names]
        else:
            expected = _SUBJECTS[kind]([value.subject for value in self._measurements])
        unreadable = {subject: f" ({each.reason})" for subject, each in absent.items() if each.why is Why.UNREADABLE}
        named = () if kind == "other node" else unreadable  # the others have an ERROR of their own
        measured = {value.subject for value in self.metrics.get(metric, ())}.union(absent.keys() - set(named))
        if kind == "pair":  # in either order
            measured |= {opposite_direction(subject) for subject in measured}
        missing = [f"{subject}{unreadable.get(subject, '')}" for subject in expected if subject not in measured]
        if not missing:
            return ""
        return f"no value for {len(missing)} of {len(expected)} subjects: {and_more(missing, _MAX_NAMED)}"


def measurement_groups(check: Check, measured: Sequence[Measurement], names: Set[str]) -> list[MeasurementGroup]:
    """One group for all ranks of a CLUSTER check, or one per node with ``per_node``; otherwise one per measurement.

    ``names`` are the names of the metrics that rules evaluate.
    """
    declared = {name: check.declaration(name) for name in names}
    per = {name: each.per if each else None for name, each in declared.items()}
    if check.per_node:
        by_node = grouped((node_of(each.subject), each) for each in measured)
        return [MeasurementGroup(ranks, check, per) for ranks in by_node.values()]
    if check.scope is Scope.CLUSTER:
        return [MeasurementGroup(measured, check, per)] if measured else []
    return [MeasurementGroup([each], check, per) for each in measured]


class PeerGroups:
    """The values of one metric in groups of the same device model, since different models are never compared.

    With exactly two nodes, each node is a separate group: a difference of two nodes does not show which one is slow.
    """

    def __init__(self, metric: str, measured: Sequence[MeasurementGroup]) -> None:
        # device model → node → values
        self._values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for group in measured:
            for each in group.metrics.get(metric, ()):
                self._values[group.model][node_of(each.subject)].append(each.value)
        self._groups: dict[tuple[str, str], PeerGroup] = {}  # (model, node) → group; empty node: all nodes

    def peer_group(self, model: str, subject: str, *, of_node: bool = False) -> PeerGroup:
        """The subjects with this device ``model`` on all nodes, or on the node of ``subject``."""
        nodes = self._values.get(model, {})
        node = node_of(subject) if of_node or len(nodes) == 2 else ""
        if (group := self._groups.get((model, node))) is None:
            values = nodes.get(node, ()) if node else chain.from_iterable(nodes.values())
            group = self._groups[model, node] = PeerGroup(model, tuple(values), node)
        return group

    def groups_to_reach(self, model: str, subject: str) -> list[PeerGroup]:
        """The peers on the node of ``subject`` and on all nodes; of exactly two nodes, the medians of both nodes."""
        nodes = self._values.get(model, {})
        of_all = (
            PeerGroup(model, tuple(map(median, nodes.values()))) if len(nodes) == 2 else self.peer_group(model, subject)
        )
        return [self.peer_group(model, subject, of_node=True), of_all]


def common_fact(facts: Facts, name: str) -> Any:
    """The value of a fact in _COMMON_FACTS; None if it is missing or of another type."""
    try:
        return _COMMON_FACTS[name][0].validate_python(facts[name]) if name in facts else None
    except ValidationError:
        return None


def invalid_common_facts(facts: Facts) -> Iterator[str]:
    """The facts in _COMMON_FACTS that have another type, as text."""
    for name in _COMMON_FACTS.keys() & facts.keys():
        if common_fact(facts, name) is None:
            yield fact_text(name, facts, _COMMON_FACTS[name][1])


def fact_text(name: str, facts: Facts, expected: str) -> str:
    """A message with the name, the value and the expected value of a fact; for a missing fact only with its name."""
    if name not in facts:
        return f"the record has no fact {name}"
    value = json.dumps(facts[name], ensure_ascii=False)
    shown = value if len(value) <= _MAX_VALUE_CHARS else f"{value[:_MAX_VALUE_CHARS]}…"
    return f"the fact {name} is {shown}, expected {expected}"


def gpu_model(facts: Facts) -> str:
    """NVML's name of the GPU, or an empty string."""
    return _text_fact(_GPU, facts)


def _text_fact(name: str, facts: Facts) -> str:
    value = facts.get(name)
    return value if isinstance(value, str) else ""


def opposite_direction(subject: str) -> str:
    """The subject of the opposite direction: ``n/gpu1->gpu0`` for ``n/gpu0->gpu1``, ``n2->n1`` for ``n1->n2``."""
    before, _, target = subject.partition("->")
    node, slash, source = before.rpartition("/")
    return f"{node}{slash}{target}->{source}"


def _disagreement(name: str, measurements: Sequence[Measurement]) -> str:
    subject_by_value: dict[str, str] = {}
    for measurement in measurements:
        if name in measurement.facts:
            subject_by_value.setdefault(str(measurement.facts[name]), measurement.subject)
    values = [f"{value} on {subject}" for value, subject in subject_by_value.items()]
    return f"{name} ({and_more(values, _MAX_NAMED)})" if len(values) > 1 else ""


def _names_by_node(ranks: Sequence[str]) -> dict[str, list[str]]:
    """Node → names of its ranks, such as gpu0 and gpu1."""
    return grouped((node, name) for node, _, name in (subject.rpartition("/") for subject in ranks))


def _pairs(ranks: Sequence[str], *, ordered: bool) -> list[str]:
    """Each pair of ranks on one node: n0/gpu0->gpu1, and if ``ordered`` also n0/gpu1->gpu0."""
    choose = permutations if ordered else combinations
    return [f"{node}/{a}->{b}" for node, names in _names_by_node(ranks).items() for a, b in choose(names, 2)]


def _nodes(ranks: Sequence[str]) -> list[str]:
    """The nodes of the ranks; for a single node only CLUSTER."""
    nodes = list(_names_by_node(ranks))
    return nodes if len(nodes) > 1 else [CLUSTER]


# Kind → function that derives the required subjects from those of the ranks. GPUs and ports are listed in facts.
_SUBJECTS: Mapping[str, Callable[[Sequence[str]], list[str]]] = {
    "rank": list,
    "pair": partial(_pairs, ordered=False),
    "ordered pair": partial(_pairs, ordered=True),
    "node": _nodes,
    "other node": lambda ranks: _nodes(ranks)[1:],
    # rail0 connects the first GPUs of all nodes, rail1 the second ones
    "rail": lambda ranks: [f"rail{index}" for index in range(max(map(len, _names_by_node(ranks).values())))],
}
