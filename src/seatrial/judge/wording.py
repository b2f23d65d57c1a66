"""Why a rule does not apply, as a sentence: made of the facts that its ``where`` asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

# What it means that such a fact is otherwise; a check that knows more says so itself: "no: task/cgroup is not loaded"
_MEANING = {
    "clock_known": "whether the clock is synchronised could not be read",
    "comparable": "there are too few of them to be compared with each other",
    "configuration_compared": "the nodes' configuration could not be compared with the controller's",
    "examined": "no path is shared by all nodes",
    "gpus_promised": "the trial promises no GPUs",
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
    "sockets_meant": "the trial says that sockets are meant",
    "time_limit_tested": "the time limit is tried only where the option time_limit asks for it",
    "tried_again": "no pair was tried again without the others, which alone tells what they share",
    "usable": "no path can be written to",
    "verbs_reachable": "no RDMA device can be opened",
}


def inapplicable(where: Mapping[str, str], outside: Sequence[str], facts: Mapping[str, JsonValue]) -> str:
    """``where``: what a rule asks of the facts; ``outside``: the names of those that are otherwise."""
    return "does not apply: " + "; ".join(dict.fromkeys(_otherwise(name, where[name], facts) for name in outside))


def some(names: Sequence[str], most: int) -> str:
    """The first of them, as many as a sentence holds."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def opposite(subject: str) -> str:
    """The other order of a pair: ``n/gpu1->gpu0`` of ``n/gpu0->gpu1``, ``n2->n1`` of ``n1->n2``."""
    before, _, target = subject.partition("->")
    node, slash, source = before.rpartition("/")
    return f"{node}{slash}{target}->{source}"


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
