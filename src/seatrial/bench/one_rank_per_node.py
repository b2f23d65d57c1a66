"""Selects one rank per node and runs steps on these ranks concurrently.

``select_participants`` and ``Participants.run_on_all`` are called by all ranks together, in an open process group
(``bench.group``) of gloo or NCCL. The other functions do not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch.distributed as dist

from seatrial.bench.rank import gather
from seatrial.util.grouping import grouped
from seatrial.util.text import error_text
from seatrial.util.threads import start_in_thread

T = TypeVar("T")

STEP_TIMEOUT_S = 30.0  # a step is a few system calls; one that takes longer than this hangs (dead file server)


class ParticipantError(Exception):
    """A step failed on some participants; raised on all ranks. ``reasons``: name of a participant → reason."""

    def __init__(self, reasons: Mapping[str, str], timed_out: bool) -> None:
        super().__init__(group_by_text(reasons))
        self.reasons = dict(reasons)
        self.timed_out = timed_out  # on some participants the step may still be running


@dataclass(frozen=True)
class _Failed:
    reason: str
    timed_out: bool


@dataclass(frozen=True)
class Participants:
    """The ranks that run the steps, usually one per node (see ``select_participants``).

    ``index``: this rank's position among the participants; -1 if it runs no steps. ``several_nodes``: whether the job
    has several nodes.
    """

    names: tuple[str, ...]
    index: int
    several_nodes: bool

    @property
    def first_only(self) -> Self:
        """The same job with the first participant only."""
        return replace(self, names=self.names[:1], index=0 if self.index == 0 else -1)

    def run_on_all(self, work: Callable[[], T], timeout_s: float = STEP_TIMEOUT_S) -> list[T]:
        """Run ``work`` on all participants concurrently; return their results, by participant, on all ranks.

        There is no barrier before ``work``. Raises ParticipantError on all ranks if ``work`` raised OSError or
        ValueError on a participant, or took longer than ``timeout_s``.
        """
        outcome_of_this_rank = _run(work, timeout_s) if self.index >= 0 else None
        outcomes = [outcome for outcome in gather(outcome_of_this_rank) if outcome]
        failed = {
            name: outcome for name, outcome in zip(self.names, outcomes, strict=True) if isinstance(outcome, _Failed)
        }
        if failed:
            reasons = {name: failure.reason for name, failure in failed.items()}
            raise ParticipantError(reasons, timed_out=any(failure.timed_out for failure in failed.values()))
        return [outcome[0] for outcome in outcomes if isinstance(outcome, tuple)]


def select_participants(node: str, min_count: int = 1) -> Participants:
    """The lowest rank of each node; with fewer than ``min_count`` nodes, the first ``min_count`` ranks instead."""
    nodes = gather(node)
    lowest_ranks = [rank for rank, name in enumerate(nodes) if nodes.index(name) == rank]  # one per node
    too_few = len(lowest_ranks) < min_count
    ranks = list(range(min(min_count, len(nodes)))) if too_few else lowest_ranks
    names = tuple(f"{nodes[rank]}/rank{rank}" if too_few else nodes[rank] for rank in ranks)
    index = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1
    return Participants(names, index, several_nodes=len(lowest_ranks) > 1)


def group_by_text(texts: Mapping[str, str]) -> str:
    """``{"a": "full", "b": "full"}`` → ``full (a, b)``: in a large cluster many nodes have the same text."""
    names_by_text = grouped((text, name) for name, text in texts.items())
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in names_by_text.items())


def _run(work: Callable[[], T], timeout_s: float) -> tuple[T] | _Failed:
    pending = start_in_thread(work)
    try:
        return (pending.result(timeout_s),)
    except (OSError, ValueError) as error:
        timed_out = not pending.done()
        return _Failed(f"did not end within {timeout_s:g} s" if timed_out else error_text(error), timed_out)
