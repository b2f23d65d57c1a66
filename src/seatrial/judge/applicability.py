"""Whether a rule is applicable: its required facts compared with the measured ones, and the reason if they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from pydantic import JsonValue

from seatrial.judge.groups import MeasurementGroup, gpu_model

# Text for a fact without the required value. A check may give a more specific one: "no: task/cgroup is not loaded"
_REASON_TEXTS = {
    "clock_status_readable": "the clock synchronisation status is not readable",
    "comparable": "too few to compare with each other",
    "configuration_compared": "the configuration of the nodes was not compared with the controller's",
    "any_path_shared": "no path is shared by all nodes",
    "gpus_expected": "cluster.gpus_per_node is not set",
    "has_memory_repair": "the GPUs support neither row remapping nor page retirement",
    "has_usable_gpu": "no usable GPU",
    "inodes_limited": "the filesystem has no fixed number of inodes",
    "link": "the GPUs are connected by {}, where pairs may share links by design",
    "memory_limit_tested": "Slurm enforces no memory limit",
    "nvlink": "the GPUs are not connected by NVLink",
    "p2p_available": "the GPUs have no peer-to-peer access",
    "paths_from": "the paths come from the {}",
    "rdma_present": "no RDMA device",
    "retried": "no pair was measured without concurrent pairs, which is needed to detect shared links",
    "several_nodes": "single node",
    "sockets_expected": "the option sockets_expected is set",
    "time_limit_tested": "the option time_limit is not set",
    "any_path_usable": "no path is usable",
    "verbs_accessible": "no RDMA device can be opened",
}


def mismatched_facts(applies_if: Mapping[str, str], facts: Mapping[str, JsonValue]) -> list[str]:
    """The names of the facts that differ from the values in ``applies_if``; missing facts do not count."""
    return [name for name, required in applies_if.items() if facts.get(name, required) != required]


def not_applicable_reason(
    applies_if: Mapping[str, str], mismatched: Sequence[str], facts: Mapping[str, JsonValue]
) -> str:
    """Why a rule is not applicable; ``mismatched`` are the names of the facts that differ from ``applies_if``."""
    return "; ".join(dict.fromkeys(_mismatch_text(name, applies_if[name], facts) for name in mismatched))


def _mismatch_text(name: str, required: str, facts: Mapping[str, JsonValue]) -> str:
    actual = facts[name]
    value, _, explanation = str(actual).partition(": ")
    noun = name.removeprefix("has_").replace("_", " ")
    if value == "no" and explanation:
        return explanation
    if name.startswith("has_") and (facts.get("backend") == "cpu" or facts.get("has_usable_gpu") == "no"):
        return _REASON_TEXTS["has_usable_gpu"]
    if name in _REASON_TEXTS:
        return _REASON_TEXTS[name].format(actual)
    if value != "no":
        return f"{noun} is {actual}, not {required}"
    return f"the GPUs have no {noun}" if name.startswith("has_") else f"no {noun}"


class PeerApplicability:
    """The device models to which a rule applies, computed once for all measurement groups of a check."""

    def __init__(self, groups: Sequence[MeasurementGroup], applies_if: Mapping[str, str]) -> None:
        self._groups, self._applies_if = groups, applies_if

    @cached_property
    def _subject_by_model(self) -> dict[tuple[str, str], str]:
        return {
            _device_model(group.facts): group.subject
            for group in reversed(self._groups)
            if group.is_per_gpu and not mismatched_facts(self._applies_if, group.facts)
        }

    def applicable_peer(self, group: MeasurementGroup, mismatched: Sequence[str]) -> str:
        """A subject with the same device model to which the rule applies, although it does not apply to ``group``.

        Empty if there is none. A subject without a GPU among subjects with GPUs counts too: its GPU is lost. NVLink
        facts are exempt, since NVLink bridges are optional, and so are checks of nodes, which may differ.
        """
        if not group.is_per_gpu or any("nvlink" in name for name in mismatched):
            return ""
        model = _device_model(group.facts)
        gpu_subjects = (subject for (gpu, _), subject in self._subject_by_model.items() if gpu and not model[0])
        return self._subject_by_model.get(model) or next(gpu_subjects, "")


def _device_model(facts: Mapping[str, JsonValue]) -> tuple[str, str]:
    """The model of the GPU, and without a GPU that of the CPU."""
    gpu = gpu_model(facts)
    return gpu, "" if gpu else str(facts.get("cpu") or "")
