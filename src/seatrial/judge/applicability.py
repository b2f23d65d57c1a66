"""Whether a rule applies where a check measured: the facts that its ``where`` names, and why it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from pydantic import JsonValue

from seatrial.judge.groups import MeasurementGroup, gpu_model

# What it means that such a fact is otherwise; a check that knows more says so itself: "no: task/cgroup is not loaded"
_MEANING = {
    "clock_status_readable": "whether the clock is synchronised could not be read",
    "comparable": "there are too few of them to be compared with each other",
    "configuration_compared": "the nodes' configuration could not be compared with the controller's",
    "examined": "no path is shared by all nodes",
    "gpus_expected": "the trial promises no GPUs",
    "has_memory_repair": "the GPUs have neither row remapping nor page retirement",
    "has_usable_gpu": "there is no usable GPU",
    "inodes_limited": "the filesystem has no fixed number of inodes",
    "joined": "the GPUs are joined by {}, where pairs may share links by design",
    "memory_limit_tested": "Slurm enforces no memory limit",
    "nvlink": "no NVLink joins the GPUs",
    "paths_from": "the paths are those of the {}",
    "peers": "the GPUs cannot reach each other's memory",
    "rdma_present": "there is no RDMA device",
    "several_nodes": "there is one node only",
    "sockets_expected": "the trial says that sockets are meant",
    "time_limit_tested": "the time limit is tried only where the option time_limit asks for it",
    "retried": "no pair was tried again without the others, which alone tells what they share",
    "usable": "no path can be written to",
    "verbs_accessible": "no RDMA device can be opened",
}


def mismatched_facts(where: Mapping[str, str], facts: Mapping[str, JsonValue]) -> list[str]:
    """The facts that are otherwise than a rule asks; one that was not recorded does not count as otherwise."""
    return [fact for fact, value in where.items() if facts.get(fact, value) != value]


def not_applicable_reason(where: Mapping[str, str], outside: Sequence[str], facts: Mapping[str, JsonValue]) -> str:
    """Why a rule does not apply. ``outside``: the names of the facts that are otherwise than ``where`` asks."""
    return "; ".join(dict.fromkeys(_otherwise(name, where[name], facts) for name in outside))


def _otherwise(name: str, wanted: str, facts: Mapping[str, JsonValue]) -> str:
    actual = facts[name]
    word, _, why = str(actual).partition(": ")
    plain = name.removeprefix("has_").replace("_", " ")
    if word == "no" and why:
        return why
    if name.startswith("has_") and (facts.get("backend") == "cpu" or facts.get("has_usable_gpu") == "no"):
        return _MEANING["has_usable_gpu"]
    if name in _MEANING:
        return _MEANING[name].format(actual)
    if word != "no":
        return f"the {plain} is {actual} here, not {wanted}"
    return f"the GPUs have no {plain}" if name.startswith("has_") else f"no {plain} here"


class PeerApplicability:
    """Where a rule applies, by device, asked of a fleet once: what applies to one device applies to its like."""

    def __init__(self, groups: Sequence[MeasurementGroup], where: Mapping[str, str]) -> None:
        self._groups, self._where = groups, where

    @cached_property
    def _applies(self) -> dict[tuple[str, str], str]:
        inside = (
            one for one in reversed(self._groups) if one.is_per_gpu and not mismatched_facts(self._where, one.facts)
        )
        return {_device(one.facts): one.subject for one in inside}

    def applicable_peer(self, group: MeasurementGroup, otherwise: Sequence[str]) -> str:
        """A like place where the rule applies, though it does not to ``group``; empty where there is none.

        A place without a GPU, among others with one, has lost it. Of NVLink one card may have less than the next of
        its model: bridges are bought apart. Nodes may be unlike in everything.
        """
        if not group.is_per_gpu or all("nvlink" in fact for fact in otherwise):
            return ""
        own, found = _device(group.facts), self._applies
        lost = (place for (gpu, _), place in found.items() if gpu and not own[0])
        return found.get(own) or next(lost, "")


def _device(facts: Mapping[str, JsonValue]) -> tuple[str, str]:
    """The GPU, or without one the CPU."""
    gpu = gpu_model(facts)
    return gpu, "" if gpu else str(facts.get("cpu") or "")
