"""The form in which a check declares its metrics, and in which its ``measure`` answers for each of them.

A metric is declared once: name, unit, rules, meaning, fix, which subjects must answer, and the cause that a bad value
shows. ``measure`` yields, for each declared metric and each of its subjects, one of ``value``, ``absent`` (does not
apply), ``forbidden`` (this user may not read it) and ``unreadable``. What is missing is an ERROR.

A rule is a text:

| text | a value is good if it is |
| --- | --- |
| ``== 0 errors``, ``<= 120 s``, ``yes``, ``no`` | as stated |
| ``>= 0.90 reference`` | at least this share of the reference value of this model and shape |
| ``>= 0.90 peers`` | at least this share of the median of the same model in this run |
| ``>= 0.05 bound`` | at least this share of the physical bound |
| ``>= 0.72 gemm`` | at least this share of the tokens that the GEMM rate of this run could train |
| ``>= 0.78 all_reduce`` | at least this share of the speed with gradients at the busbw of this run's all-reduce |
| ``>= 0.95 opposite`` | at least this share of the value of the opposite direction |
| ``>= 0.75 METRIC of the GPU`` | at least this share of METRIC of the same GPU |
| ``> 0.75 METRIC / gpus`` | above this share of METRIC of the same GPU, divided by the GPUs of the node |
| ``recorded`` | not judged |

``when`` restricts a rule: ``FACT == VALUE``, ``nodes >= 2``, ``nodes < 16`` and ``OPTION is the default``, joined by
``and``. Where a fact differs, the rule is SKIP; for another number of nodes it gives no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import isfinite
from numbers import Real
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from pydantic import JsonValue

from seatrial.checks.cause import Cause
from seatrial.model import (
    Absent,
    Artifact,
    Fact,
    Metric,
    Observation,
    Outcome,
    Rule,
    SeatrialError,
    Series,
    Why,
    has_scale,
)
from seatrial.model.rule import REFERENCE, Condition, Limit, Severity

# The subjects that must each have a value of a metric
SubjectKind = Literal[
    "rank",  # each rank of a CLUSTER check
    "pair",  # each pair of ranks on a node
    "ordered pair",  # each pair of ranks on a node, in both directions
    "node",  # each node
    "other node",  # each node but the first, with which they are compared
    "rail",  # each rail
    "gpu",  # each GPU in the fact gpus_used of a NODE check
    "port",  # each port in the fact ports_used of a CLUSTER check
]
# Fact that rules may require → regular expression of its possible values, where these are not "yes" and "no"
_FACT_VALUES = {
    "architecture": r"\w+",
    "backend": "nccl|gloo|cuda|cpu",
    "data": "generated|rows",
    "device": "cuda|cpu",
    "layers": r"all|\d+",
    "link": r"(NVLink|unknown link|NV\d+|PIX|PXB|PHB|NODE|SYS)( \+ (NVLink|unknown link|NV\d+|PIX|PXB|PHB|NODE|SYS))*",
    "load": "bf16|fp16|fp32",
    "nvlink": "yes|some|no|unknown",
    "parallelism": "(ddp|fsdp2|zero3|single)( and (ddp|fsdp2|zero3|single))*",
    "paths_from": "options|run directory",
    "settings": "shipped|changed",
}


@dataclass(frozen=True, kw_only=True)
class FindingTemplate:
    """The finding for a FAIL or WARN on a metric of one subject, which may be a pair.

    ``first_command`` may contain ``{node}``, the node of the subject, and ``{pair}``, both ends of a pair.
    ``whole_node_title``: if set, a node has one finding for all its failed subjects, with this title if all subjects of
    the node failed; if empty, each failed subject has its own finding. ``max_locatable_fact``: name of the fact that
    states how many slow subjects (slow nodes, if ``whole_node_title`` is set) can be located at most.
    """

    title: str
    first_command: str
    whole_node_title: str = ""
    max_locatable_fact: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a metric compares: its value is the speed of a ``part`` of the cluster divided by that of similar parts.

    ``inter_node``: whether the part is a path between nodes. ``is_speedup``: the value is the speed with the part
    divided by the speed without it; the threshold detects an unused part, not a slow part.
    """

    part: str
    inter_node: bool = False
    is_speedup: bool = False


@dataclass(frozen=True)
class rule:
    """A further rule on a metric, with another condition, limit or outcome.

    An empty meaning or fix is that of the metric.

    ``text``: the rule, or several that a value must all meet; ``outcome``: of a violation. ``warn``: rules whose
    violation is a WARN, beside those of ``text``. ``when``: the condition of all.
    """

    text: str | tuple[str, ...]
    meaning: str = ""
    fix: str = ""
    _: KW_ONLY
    outcome: Severity = Outcome.FAIL
    warn: str | tuple[str, ...] = ()
    when: str = ""


@dataclass(frozen=True)
class metric:
    """A metric, or a family of metrics such as ``busbw.*``, with its first rule (see ``rule``).

    ``also``: rules with other conditions or outcomes. ``unit``: needed where no rule states it. ``reference``: key of
    the reference value in data/skus and baselines; without such a value the metric is UNJUDGED, or with
    ``reference_optional`` SKIP. ``signed``: a negative value that meets the rule is no measurement error. ``per``: the
    subjects that must each answer; None: at least one. ``speed``: a bad value counts only if a second measurement
    confirms it. ``may_exceed_100``: a value in % above 100 is no error. ``varies_by_device``: it need not apply to each
    of several equal GPUs. ``bound``: its upper bound, a key of a SKU's spec, or BIDIRECTIONAL or COLLECTIVE of
    hardware.links. ``key``: shown in summaries. ``also_measured_by``: what else measures the same: tests of other
    tools, such as ``nvbandwidth host_to_device_memcpy_ce``, and values of the telemetry. ``log_evidence``: the evidence
    has output of a program, in which known failures are searched.

    Raises SeatrialError for a text that cannot be parsed, and for different units.
    """

    name: str
    text: str | tuple[str, ...] = "recorded"
    meaning: str = ""
    fix: str = ""
    _: KW_ONLY
    outcome: Severity = Outcome.FAIL
    warn: str | tuple[str, ...] = ()
    when: str = ""
    also: tuple[rule, ...] = ()
    unit: str = ""
    reference: str = ""
    reference_optional: bool = False
    signed: bool = False
    per: SubjectKind | None = None
    speed: bool = False
    may_exceed_100: bool = False
    varies_by_device: bool = False
    bound: str = ""
    key: bool = False
    also_measured_by: tuple[str, ...] = ()
    log_evidence: bool = False
    cause: Cause | None = None
    finding: FindingTemplate | None = None
    comparison: Comparison | None = None
    rules: tuple[Rule, ...] = field(init=False)

    def __post_init__(self) -> None:
        given: tuple[metric | rule, ...] = (self, *self.also)
        try:
            rules = tuple(made for each in given for made in self._rules(each))
        except ValueError as error:
            raise SeatrialError(f"metric {self.name}: {error}") from None
        limits = [limit for each in rules for limit in each.limits]
        for fact, required in ((fact, value) for each in rules for fact, value in each.when.facts.items()):
            if not is_possible(fact, required):
                values = possible_values(fact)
                raise SeatrialError(f"metric {self.name}: the fact {fact} is never {required!r}, but {values}")
        if self.per is not None and self.per not in get_args(SubjectKind):
            raise SeatrialError(f"metric {self.name}: per={self.per!r} is none of {', '.join(get_args(SubjectKind))}")
        if any(limit.base == REFERENCE for limit in limits) and not self.reference:
            raise SeatrialError(f"metric {self.name}: a share of the reference value needs reference=KEY")
        units = dict.fromkeys(filter(None, (self.unit, *(limit.unit for limit in limits))))
        if len(units) > 1:
            raise SeatrialError(f"metric {self.name}: declared in different units: {', '.join(units)}")
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "unit", next(iter(units), ""))

    def _rules(self, given: metric | rule) -> Iterator[Rule]:
        """One rule for each threshold, and one for all shares of reference value, peers and bound."""
        texts, warnings = ((each,) if isinstance(each, str) else each for each in (given.text, given.warn))
        limits = [Limit.of(text, given.outcome) for text in texts if text != "recorded"]
        limits += [Limit.of(text, Outcome.WARN) for text in warnings]
        shares = tuple(limit for limit in limits if limit.base)
        for group in (*((limit,) for limit in limits if not limit.base), *([shares] if shares else ())):
            yield Rule(
                metric=self.name,
                limits=group,
                when=Condition.of(given.when),
                reference=self.reference if any(limit.base == REFERENCE for limit in group) else "",
                meaning=given.meaning or self.meaning,
                fix=given.fix or self.fix,
            )


warning = partial(metric, outcome=Outcome.WARN)  # a metric whose violations are WARN


def possible_values(fact: str) -> str:
    """Regular expression of the values that a fact may have on which rules depend."""
    return _FACT_VALUES.get(fact, "yes|no")


def is_possible(fact: str, value: JsonValue) -> bool:
    """Whether the fact may have this value."""
    return isinstance(value, str) and re.fullmatch(possible_values(fact), value) is not None


Evidence = dict[str, Any] | list[Any] | str | float | None  # a JsonValue; unlike it, the type includes list[str]


class Value(NamedTuple):
    """A measured value of a declared metric. ``subject``: None for the subject of the check's scope."""

    name: str
    value: float
    samples: tuple[float, ...]
    subject: str | None
    evidence: Evidence


class NoValue(NamedTuple):
    """Declared metrics without a value; ``names`` may contain patterns. ``subject``: None for all subjects.

    Of a metric ``per`` rank, None is this rank: each rank answers for itself.
    """

    names: tuple[str, ...]
    why: Why
    reason: str
    subject: str | None
    instead: str = ""


Answer = Value | NoValue | Fact | Series | Artifact
Answers = Iterator[Answer]  # what ``measure`` yields


def value(
    name: str, measured: float | Sequence[float], subject: str | None = None, *, evidence: Evidence = None
) -> Value:
    """A value, or the median of several samples. ``evidence``: shown if the value violates its rule."""
    if isinstance(measured, Sequence):
        if not measured:
            raise SeatrialError(f"{name} has no samples")
        return Value(name, median(measured), tuple(measured), subject, evidence)
    return Value(name, measured, (), subject, evidence)


def fact(name: str, value: Any) -> Fact:
    """A fact of the record; ``value``: a JSON document."""
    return Fact(name=name, value=value)


def _no_value(
    why: Why, names: str | Iterable[str], reason: str, subject: str | None = None, *, instead: str = ""
) -> NoValue:
    """Why these metrics, names or patterns, have no value. ``instead``: the metric to judge instead."""
    if not reason:
        raise SeatrialError(f"{names}: a metric without a value needs a reason")
    return NoValue((names,) if isinstance(names, str) else tuple(names), why, reason, subject, instead)


absent = partial(_no_value, Why.DOES_NOT_APPLY)  # the metrics do not apply
# The metrics apply, but this user may not read them, or what was read is not known, such as a new filesystem
forbidden = partial(_no_value, Why.NOT_PERMITTED)
unreadable = partial(_no_value, Why.UNREADABLE)  # the metrics apply, but could not be measured
not_requested = partial(_no_value, Why.NOT_REQUESTED)  # not measured, because of the options or of a slow network


def stored_number(number: float) -> float:
    """A sample, or the value of a metric with samples, with seven significant digits.

    The error is 5e-7 at most. Of all records in docs/results, no samples vary by less than 1e-5.
    """
    return float(f"{number:.7g}")


def answers(
    given: Iterable[Answer], declared: Sequence[metric], check: str, own: Mapping[SubjectKind | None, str]
) -> Iterator[Observation]:
    """What ``measure`` yields, as observations of the record; facts, series and artifacts pass unchanged.

    ``own``: kind of subjects → the subject of answers that name none; None: of metrics without such a kind. A pattern
    of an answer without a value stands for the metrics that have no answer yet. Raises SeatrialError for an undeclared
    metric, for two answers on one metric and subject, and for a value that is not a finite number.
    """
    known: dict[str, metric] = {}  # by name; a large cluster has a million values of few names
    answered: dict[str, dict[str, str]] = {}  # metric → subject ("": all) → the answer
    for each in given:
        if isinstance(each, Value):
            if (found := known.get(each.name)) is None:
                found = known[each.name] = declaration(declared, each.name, check)
            subject = own.get(found.per, own[None]) if each.subject is None else each.subject
            before = answered.setdefault(each.name, {})
            if earlier := before.get(subject) or before.get(""):
                _refuse(check, each.name, subject, "a value", earlier)
            if not all(_is_number(number, found.unit) for number in (each.value, *each.samples)):
                expected = "yes or no (True, False)" if found.unit == "bool" else "a finite number"
                raise SeatrialError(f"check {check}: {each.name} on {subject} is {each.value!r}, not {expected}")
            before[subject] = "a value"
            yield Metric(
                name=each.name,
                value=stored_number(each.value) if each.samples else float(each.value),  # within the range of samples
                unit=found.unit,
                subject=subject,
                samples=tuple(map(stored_number, each.samples)),
                evidence=each.evidence,
            )
        elif isinstance(each, NoValue):
            for name, is_pattern in _names(declared, each.names, check):
                per = declaration(declared, name, check).per
                subject = each.subject or (own.get(per, "") if per else "")
                before = answered.setdefault(name, {})
                if is_pattern and before:
                    continue
                if subject in before or "" in before or (before and not subject):
                    _refuse(check, name, subject or "all subjects", each.reason, next(iter(before.values())))
                before[subject] = each.reason
                yield Absent(metric=name, why=each.why, reason=each.reason, subject=subject, instead=each.instead)
        elif isinstance(each, Fact | Series | Artifact):
            yield each
        else:
            raise SeatrialError(f"check {check} yields {type(each).__name__}, not a value or a reason why it has none")


def _is_number(number: object, unit: str) -> bool:
    """Whether a finite number was given: for the unit bool 0 or 1, and for a unit with a scale not True or False."""
    if unit == "bool":
        return number in (0, 1)
    is_meant = not (isinstance(number, bool) and has_scale(unit))
    return is_meant and isinstance(number, Real) and isfinite(number)


def _refuse(check: str, metric: str, subject: str, answer: str, before: str) -> None:
    raise SeatrialError(f"check {check}: two answers for {metric} on {subject}: {before}; {answer}")


def declaration(declared: Sequence[metric], name: str, check: str) -> metric:
    """The declaration of ``name``: of exactly this name, else of a family. Raises SeatrialError without one."""
    if (found := find(declared, name)) is None:
        raise SeatrialError(f"check {check} declares no metric {name}")
    return found


def find(declared: Sequence[metric], name: str) -> metric | None:
    """The declaration of exactly this name, else of its family; None without one."""
    exact = (each for each in declared if each.name == name)
    family = (each for each in declared if fnmatchcase(name, each.name))
    return next(exact, None) or next(family, None)


def _names(declared: Sequence[metric], patterns: Sequence[str], check: str) -> Iterator[tuple[str, bool]]:
    """The declared names that match ``patterns``, each with whether it matches as a pattern."""
    for pattern in patterns:
        is_pattern = "*" in pattern and all(each.name != pattern for each in declared)
        if not is_pattern:
            declaration(declared, pattern, check)
            yield pattern, False
        elif not (matching := [each.name for each in declared if fnmatchcase(each.name, pattern)]):
            raise SeatrialError(f"check {check} declares no metric {pattern}")
        else:
            yield from ((name, True) for name in matching)
