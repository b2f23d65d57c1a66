"""Whether a rule is applicable: its required facts compared with the recorded ones, and the reason if they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property

from pydantic import JsonValue

from seatrial.checks.base import NOT_SUPPORTED, PERMISSION_DENIED, Check, RuleFact
from seatrial.hardware.bounds import MetricLookup
from seatrial.hardware.links import COLLECTIVE
from seatrial.judge.groups import MeasurementGroup, fact_text, gpu_model
from seatrial.judge.plausibility import metric_shape
from seatrial.model import Outcome, Rule

RuleFacts = Mapping[str, RuleFact]


def mismatched_facts(required: Mapping[str, str], facts: Mapping[str, JsonValue]) -> list[str]:
    """The names of the facts that differ from the values in ``required``; missing facts do not count."""
    return [name for name, value in required.items() if facts.get(name, value) != value]


def invalid_fact(required: Mapping[str, str], declared: RuleFacts, group: MeasurementGroup) -> str:
    """The first fact of ``required`` with a value that the check does not declare, as text; empty if there is none.

    A missing fact is invalid too, with two exceptions: the check failed, or another fact makes the rule not applicable.
    On a CPU, for example, a check need not record which NVML values are readable.
    """
    facts, mismatched = group.facts, mismatched_facts(required, group.facts)
    missing = [] if mismatched or group.failed else [name for name in required if name not in facts]
    invalid = [name for name in mismatched if not declared[name].accepts(facts[name])] + missing
    return fact_text(invalid[0], facts, declared[invalid[0]].values) if invalid else ""


def invalid_shape(check: Check, lookup: MetricLookup, group: MeasurementGroup) -> str:
    """The first shape fact (gpu, world_size, nodes) with an invalid value, as text; empty if all are valid.

    Shape facts select a reference value. For a collective, the numbers must be those of the measured ranks and nodes.
    """
    if group.failed:
        return ""
    if group.invalid_shape or lookup.bounded_by != COLLECTIVE or not any(group.ranks_and_nodes):
        return group.invalid_shape
    world_size, nodes = metric_shape(check, lookup, *group.ranks_and_nodes)
    expected = {"world_size": world_size, "nodes": nodes}
    wrong = next((name for name, count in expected.items() if group.facts[name] != count), "")
    return fact_text(wrong, group.facts, f"{expected[wrong]}, as measured") if wrong else ""


def unmet_condition(name: str, required: str, fact: RuleFact, value: str) -> tuple[Outcome, str]:
    """The outcome and its reason for a rule that needs ``required`` while the fact ``name`` has another ``value``.

    ``value`` may end with the reason: ``permission_denied: dmesg is restricted``.
    """
    state, _, reason = value.partition(": ")
    outcomes = {NOT_SUPPORTED: fact.not_supported, PERMISSION_DENIED: fact.permission_denied}
    if not reason or state not in ("no", *outcomes):
        reason = fact.reason.format(value) or f"{name.replace('_', ' ')} is {value.replace('_', ' ')}, not {required}"
    return outcomes.get(state, Outcome.SKIP), reason


class PeerApplicability:
    """The device models to which a rule applies, computed once for all measurement groups of a check."""

    def __init__(
        self, groups: Sequence[MeasurementGroup], rule: Rule, declared: RuleFacts, varying_metrics: Set[str]
    ) -> None:
        self._groups, self._rule, self._declared, self._varying = groups, rule, declared, varying_metrics

    @cached_property
    def _subject_by_model(self) -> dict[tuple[str, str], str]:
        return {
            _device_model(group.facts): group.subject
            for group in reversed(self._groups)
            if group.is_per_gpu
            and not mismatched_facts(self._rule.applies_if, group.facts)
            and self._rule.metric in group.metrics
        }

    def applicable_peer(self, group: MeasurementGroup, mismatched: Sequence[str]) -> str:
        """A subject with the same device model as ``group`` to which the rule applies; empty if there is none.

        ``mismatched``: the facts because of which the rule does not apply to ``group``. If ``group`` has no GPU model,
        its GPU may be lost, so any subject with a GPU is a peer. There is no peer if a mismatched fact varies by
        device, such as a fact about optional NVLink bridges. Checks of nodes have no peers, since nodes may differ.
        """
        varies = self._rule.metric in self._varying
        if not group.is_per_gpu or varies or any(self._declared[name].varies_by_device for name in mismatched):
            return ""
        model = _device_model(group.facts)
        if model in self._subject_by_model:
            return self._subject_by_model[model]
        if gpu_model(group.facts):
            return ""
        gpu_subjects = (subject for (gpu, _), subject in self._subject_by_model.items() if gpu)
        return next(gpu_subjects, "")


def _device_model(facts: Mapping[str, JsonValue]) -> tuple[str, str]:
    """(GPU model, CPU model); the CPU model is empty if there is a GPU."""
    gpu = gpu_model(facts)
    return gpu, "" if gpu else str(facts.get("cpu") or "")
