"""The nodes of a job: who acts for each of them, and what they do at the same time.

Everything here is called by all ranks together, in an open process group (``bench.group``), gloo or NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from seatrial.bench.rank import gather

T = TypeVar("T")

STEP_TIMEOUT_S = 30.0  # a step is a few system calls: what has not answered by then hangs, as a dead file server does


class ParticipantError(Exception):
    """Some actors could not do their part. Raised on all ranks alike, so that all go on (or stop) together."""

    def __init__(self, reasons: Mapping[str, str], stuck: bool) -> None:
        super().__init__(group_by_reason(reasons))
        self.reasons = dict(reasons)
        self.timed_out = stuck  # some did not come back: what they do may still go on


@dataclass(frozen=True)
class _Done(Generic[T]):
    value: T


@dataclass(frozen=True)
class _Failed:
    reason: str
    stuck: bool


@dataclass(frozen=True)
class Participants:
    """The ranks that act, one a node. ``me`` is our place among them; -1 on a rank that only takes part in gathers."""

    names: tuple[str, ...]
    index: int
    several_nodes: bool

    @property
    def first_only(self) -> Participants:
        """The first actor alone."""
        return Participants(self.names[:1], 0 if self.index == 0 else -1, self.several_nodes)

    def run_on_all(self, work: Callable[[], T], seconds: float = STEP_TIMEOUT_S) -> list[T]:
        """Run ``work`` on all actors, who begin within milliseconds of each other; the results of all, on all ranks.

        Raises Trouble on all ranks when ``work`` raised OSError or ValueError on some actor, or took longer than
        ``seconds`` there.
        """
        outcomes = [outcome for outcome in gather(_attempt(work, seconds) if self.index >= 0 else None) if outcome]
        failed = {
            name: outcome for name, outcome in zip(self.names, outcomes, strict=True) if isinstance(outcome, _Failed)
        }
        if failed:
            reasons = {name: failure.reason for name, failure in failed.items()}
            raise ParticipantError(reasons, stuck=any(failure.stuck for failure in failed.values()))
        return [outcome.value for outcome in outcomes if isinstance(outcome, _Done)]


def select_participants(node: str, min_count: int = 1) -> Participants:
    """The lowest rank of each node acts. Where that is fewer than ``at_least``, the first ranks do, several a node."""
    nodes = gather(node)
    lowest = [rank for rank, name in enumerate(nodes) if nodes.index(name) == rank]
    short = len(lowest) < min_count
    ranks = list(range(min(min_count, len(nodes)))) if short else lowest
    names = tuple(f"{nodes[rank]}/rank{rank}" if short else nodes[rank] for rank in ranks)
    me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1
    return Participants(names, me, several_nodes=len(lowest) > 1)


def group_by_reason(reasons: Mapping[str, str]) -> str:
    """``{"a": "full", "b": "full"}`` → ``full (a, b)``: on a large cluster many fail for one reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{reason} ({', '.join(those)})" for reason, those in names.items())


def run_with_timeout(work: Callable[[], T], seconds: float) -> T:
    """``work()``, in a thread of its own. Raises what it raises, or TimeoutError when the time is up."""
    return start_in_thread(work).result(seconds)


def _attempt(work: Callable[[], T], seconds: float) -> _Done[T] | _Failed:
    pending = start_in_thread(work)
    try:
        return _Done(pending.result(seconds))
    except (OSError, ValueError) as error:
        stuck = not pending.done()
        return _Failed(f"no answer within {seconds:g} s" if stuck else error_text(error), stuck)


def start_in_thread(work: Callable[[], T]) -> Future[T]:
    """``work`` in a daemon thread: one that never returns does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # handed to the caller by result()
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def error_text(error: Exception) -> str:
    """Why a call failed, in a line: ``/mnt/x: Permission denied``."""
    if isinstance(error, OSError) and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error) or type(error).__name__


def nccl_version() -> str | None:
    """The NCCL that carries this group; None where it is another backend."""
    if dist.get_backend() != dist.Backend.NCCL:
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
