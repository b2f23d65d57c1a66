"""Whether a rule is applicable: its required facts compared with the recorded ones, and the reason if they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.checks.declare import is_possible, possible_values
from seatrial.hardware.bounds import MetricLookup
from seatrial.hardware.links import COLLECTIVE
from seatrial.judge.groups import MeasurementGroup, fact_text, gpu_model
from seatrial.judge.plausibility import metric_shape
from seatrial.model import Rule


def mismatched_facts(required: Mapping[str, str], facts: Mapping[str, JsonValue]) -> list[str]:
    """The names of the facts that differ from the values in ``required``; missing facts do not count."""
    return [name for name, value in required.items() if facts.get(name, value) != value]


def invalid_fact(required: Mapping[str, str], group: MeasurementGroup) -> str:
    """The first fact of ``required`` with a value that it cannot have, as text; empty if there is none.

    A missing fact is invalid too, with two exceptions: the check failed, or another fact makes the rule not applicable.
    """
    facts, mismatched = group.facts, mismatched_facts(required, group.facts)
    missing = [] if mismatched or group.failed else [name for name in required if name not in facts]
    invalid = [name for name in mismatched if not is_possible(name, facts[name])] + missing
    return fact_text(invalid[0], facts, possible_values(invalid[0])) if invalid else ""


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


def unmet_condition(name: str, required: str, value: str) -> str:
    """Why a rule does not apply that needs ``required`` while the fact ``name`` has another ``value``."""
    return f"{name.replace('_', ' ')} is {value}, not {required}"


class PeerApplicability:
    """The device models on which a GPU has a value to which a rule applies, for all measurement groups of a check."""

    def __init__(self, groups: Sequence[MeasurementGroup], rule: Rule, *, varies_by_device: bool) -> None:
        self._groups, self._rule, self._varies = groups, rule, varies_by_device

    @cached_property
    def _subject_by_model(self) -> dict[tuple[str, str], str]:
        return {
            _device_model(group.facts): group.subject
            for group in reversed(self._groups)
            if group.is_per_gpu
            and self._rule.metric in group.metrics
            and not mismatched_facts(self._rule.when.facts, group.facts)
        }

    def applicable_peer(self, group: MeasurementGroup) -> str:
        """A subject with the same device model as ``group`` to which the rule applies; empty if there is none.

        If ``group`` has no GPU model, its GPU may be lost, so any subject with a GPU is a peer. There is no peer if the
        metric varies by device, such as one of optional NVLink bridges. Checks of nodes have no peers, since nodes may
        differ.
        """
        if not group.is_per_gpu or self._varies:
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
