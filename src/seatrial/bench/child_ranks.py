"""The same ranks once more, as fresh processes with an environment of their own.

NCCL and others read their variables once a process, so that what they make of another value only a new one can show. It
talks to its like through the rendezvous that its parent's group was opened by, and prints what it found as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from seatrial.bench import child_result, group
from seatrial.bench.rank import gather, release_memory, store_barrier
from seatrial.util import processes
from seatrial.util.failures import Failure, exit_hint, exit_reason, first_failure

_POLL_S = 0.05
_LOOK_S = 1.0  # between questions to the store, which thousands of ranks may ask
_LAST_WORDS = 1500  # characters of what a child that failed has said
_starts = itertools.count()  # all ranks start equally often, so that their numbers agree


@dataclass(frozen=True)
class ChildResult:
    """What one rank's child answered; ``problem`` says why it did not.

    ``code`` is its exit code, less than 0 where a signal ended it, LATE after ``limit_s``. ``place`` counts those of a
    group that did not answer, from 1, in the order in which they ended: what the first one says explains the others.
    ``host`` is where the rank is.
    """

    value: Any = None
    error: str = ""
    exit_code: int = 0
    failure_order: int = 0
    host: str = ""


EXIT_TIMEOUT = 124  # as timeout(1) has it


def run_child_ranks(
    module: str,
    task: Mapping[str, Any],
    env: Mapping[str, str],
    *,
    device: str,
    local_rank: int,
    file_prefix: Path,
    limit_s: float,
    groups: Sequence[Sequence[int]] | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> list[ChildResult]:
    """Run ``python -m module TASK`` once beside every rank, with ``env``; the answers of all, by rank.

    Children know the ranks of their own one of ``groups`` only, in its order; a rank that is in none starts none and
    waits. By default all are one group. ``out`` is what the names of the children's files begin with; ``look`` is
    called about once a second meanwhile. Called by all ranks together, which wait in the store and not in a collective:
    that would be work for the GPUs that their children measure. After ``limit_s`` seconds, or once another child of its
    group has failed, a child is ended.
    """
    me, every = dist.get_rank(), groups or [range(dist.get_world_size())]
    start = next(_starts)
    files = {stream: file_prefix.with_name(f"{file_prefix.name}.rank{me}.{stream}") for stream in ("out", "err")}
    for path in files.values():
        path.unlink(missing_ok=True)  # an earlier attempt's would be read for this one's
    release_memory(device)
    store_barrier()
    answer = ChildResult()
    for number, ranks in ((number, ranks) for number, ranks in enumerate(every) if me in ranks):
        name = f"seatrial/anew/{start}/{number}"
        where = {"RANK": ranks.index(me), "WORLD_SIZE": len(ranks), "LOCAL_RANK": local_rank}
        argv = [sys.executable, "-m", module, json.dumps({"group": name, "device": device, "limit_s": limit_s, **task})]
        variables = {**env, **{key: str(value) for key, value in where.items()}}
        # A training may run graphs beside other operations, which this choice of ours forbids
        without = group.GRAPH_MIXING if group.GRAPH_MIXING in group.set_by_seatrial else ""
        child = processes.start(argv, env=variables, stdout=files["out"], stderr=files["err"], without=without)
        answer = _attend(child, name, limit_s, on_poll)
        answer = replace(answer, error=_with_last_words(answer.error, files["err"])) if answer.error else answer
        answer = answer if answer.error else _read(files["out"])
    store_barrier()
    return gather(replace(answer, host=socket.gethostname()))


def failure_text(rank: int, answer: ChildResult) -> str:
    """What a problem is, with who has it and where."""
    return f"rank {rank}{' on ' if answer.host else ''}{answer.host}: {answer.error}"


def first_failed_rank(failed: Mapping[int, ChildResult]) -> int:
    """The rank whose problem explains those of the others. Its report is its standard error, which is always there."""
    return first_failure(
        Failure(rank, one.exit_code, reported=True, order=one.failure_order) for rank, one in failed.items()
    ).rank


def open_child_group(task: Mapping[str, Any], backend: str = "") -> str:
    """In the child: open the group of all children; its device. Call it first.

    ``backend``: other than NCCL alone on GPUs, such as "cpu:gloo,cuda:nccl", which then connects at its first use.
    """
    device, timeout = torch.device(task["device"]), timedelta(seconds=task["limit_s"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A port of our own would be closed on some networks, and rank 0 need not be where MASTER_ADDR is
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rendezvous = dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    store = dist.PrefixStore(task["group"], rendezvous)  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend:  # no device_id: it would be handed down to groups of another backend
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    elif device.type == "cuda":
        dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    return str(device)


def child_rank_main(run: Callable[[Mapping[str, Any], str], Any]) -> NoReturn:
    """``child_answer.serve`` for a child that works in the group of all children, on a device of its own."""

    def run_in_group(task: Mapping[str, Any]) -> Any:
        answer = run(task, open_child_group(task))
        group.close_group()
        return answer

    child_result.child_main(run_in_group)


def _attend(child: processes.Child, name: str, limit_s: float, look: Callable[[], None]) -> ChildResult:
    """Wait for the child's end; why there is no answer of it, if so. A failure is told to its group at once."""
    store, key = dist.distributed_c10d._get_default_store(), f"{name}/failed"
    looked = started = time.monotonic()
    while (code := child.poll()) is None:
        time.sleep(_POLL_S)
        now = time.monotonic()
        if now - looked > _LOOK_S:
            looked = now
            look()
            if store.check([key]):
                why = _stopped(child, "ended because that of another rank had failed")
                return ChildResult(error=why, exit_code=-signal.SIGTERM, failure_order=store.add(key, 1))
        if now - started > limit_s:
            place = store.add(key, 1)
            return ChildResult(
                error=_stopped(child, f"did not end within {limit_s:g} s"), exit_code=EXIT_TIMEOUT, failure_order=place
            )
    if code:
        return ChildResult(
            error=f"{exit_reason(code)}{exit_hint(code)}", exit_code=code, failure_order=store.add(key, 1)
        )
    return ChildResult()


def _stopped(child: processes.Child, why: str) -> str:
    return "; ".join(filter(None, [why, processes.stop(child, grace_s=1.0)]))


def _with_last_words(problem: str, errors: Path) -> str:
    """What was said last comes first: it says why, and who shows the beginning alone must not show old warnings.

    It begins with the last line that is not indented: further lines of a message are.
    """
    lines = errors.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    if not lines:
        return problem
    start = max((number for number, line in enumerate(lines) if line[:1].strip()), default=0)
    last, before = ("\n".join(some).strip() for some in (lines[start:], lines[:start]))
    more = f"\nbefore them: {before[-_LAST_WORDS:]}" if before else ""
    return f"{problem}; its last words: {last[:_LAST_WORDS]}{more}"


def _read(path: Path) -> ChildResult:
    """The answer is the last line: libraries write to standard output too."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    try:
        return ChildResult(json.loads(lines[-1]))
    except (IndexError, ValueError):
        return ChildResult(error=f"answered {lines[-1][:_LAST_WORDS]!r}" if lines else "answered nothing")
