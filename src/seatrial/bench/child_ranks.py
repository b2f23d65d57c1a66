"""Starts one child process per rank, with its own environment; the children form their own process group.

NCCL reads its variables once per process, so that another value can be tested in a new process only. The children use
the rendezvous store of the parents' process group and print their result as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, NotRequired, TypedDict, Unpack

import torch
import torch.distributed as dist

from seatrial.bench import child_result, group, spare_children
from seatrial.bench.rank import gather, release_memory, store_barrier
from seatrial.util import processes
from seatrial.util.failures import Failure, exit_hint, exit_reason, first_failure
from seatrial.util.node_name import node_name

_POLL_S = 0.05  # period of polls of this rank's child process
_READY_POLL_S = 0.5  # period of reads of the number of ready children in the store
_STORE_POLL_S = 1.0  # period of reads of the failure key in the store, which thousands of ranks may read
# Limit for each text that an error quotes: the last message of stderr, the text before it, an invalid line of stdout
_QUOTED_CHARACTERS = 1500
EXIT_TIMEOUT = 124  # as timeout(1)
_run_numbers = itertools.count()  # the same on all ranks: all run children equally often


@dataclass(frozen=True)
class ChildResult:
    """Result of one rank's child: its JSON ``value``, or ``error`` if it failed.

    ``exit_code`` is that of the child, negative if a signal ended it; EXIT_TIMEOUT if it did not end in time. A child
    that ended with 0 but printed no JSON has an ``error`` and ``exit_code`` 0. ``failure_order`` numbers the failed
    children of a group from 1 in the order in which they ended; it is 0 if ``exit_code`` is 0. ``host``: name of the
    rank's node.
    """

    value: Any = None
    error: str = ""
    exit_code: int = 0
    failure_order: int = 0
    host: str = ""


@dataclass(frozen=True)
class StartedChildRanks:
    """Children that all ranks started together; each rank has an object with its own child, if it has one.

    The children import torch and then wait in ``open_child_group`` until ``results`` is called. ``start_key``: the key
    in the rendezvous store for which the children wait. ``group_name``: the prefix in that store for the keys of this
    child's process group.
    """

    start_key: str
    group_name: str
    child: processes.Child | None
    process_count: int  # number of children on all ranks
    files: Mapping[str, Path]  # "out" and "err": standard output and standard error of this rank's child
    limit_s: float

    def wait_until_ready(self) -> None:
        """Wait until all children have imported torch or failed, at most ``limit_s``. Called by all ranks."""
        store, deadline = group.rendezvous_store(), time.monotonic() + self.limit_s
        failure_counted = False
        while store.add(f"{self.start_key}/ready", 0) < self.process_count and time.monotonic() < deadline:
            # A failed child counts too, so that no rank waits for it; ``results`` reports the failure
            if self.child and self.child.poll() is not None and not failure_counted:
                store.add(f"{self.start_key}/ready", 1)
                failure_counted = True
            time.sleep(_READY_POLL_S)

    def results(self, on_poll: Callable[[], None] = lambda: None) -> list[ChildResult]:
        """Let the waiting children run, wait until they end and return their results, by rank. Called by all ranks."""
        store_barrier()
        if dist.get_rank() == 0:
            group.rendezvous_store().set(self.start_key, "")
        result = ChildResult()
        if self.child:
            result = _wait_for_child(self.child, self.group_name, self.limit_s, on_poll)
            if result.error:
                result = replace(result, error=_with_stderr(result.error, self.files["err"]))
            else:
                result = _read_result(self.files["out"])
        store_barrier()
        return gather(replace(result, host=node_name()))


class ChildOptions(TypedDict):
    """How children are started. ``device``, ``local_rank``: of this rank; ``file_prefix``: of the children's files.

    ``limit_s``: seconds until a child is ended. ``groups``: ranks of each process group of children, by default one
    group of all ranks; a rank that is in no group has no child. ``spare_gpus``: instead of a new process, use a spare
    child that has imported the training code and sees these GPUs, if there is one and its variables allow it
    (spare_children.py).
    """

    device: str
    local_rank: int
    file_prefix: Path
    limit_s: float
    groups: NotRequired[Sequence[Sequence[int]] | None]
    spare_gpus: NotRequired[spare_children.Gpus | None]


def run_child_ranks(
    module: str,
    task: Mapping[str, Any],
    env: Mapping[str, str],
    *,
    on_poll: Callable[[], None] = lambda: None,
    **options: Unpack[ChildOptions],
) -> list[ChildResult]:
    """Run ``python -m module TASK`` with ``env`` beside every rank and return the results of all children, by rank.

    ``on_poll`` is called about once a second. A child is also ended when another child of its group fails. Called by
    all ranks together.
    """
    release_memory(options["device"])
    store_barrier()  # aligns the start: children of a module without a process group do not wait for each other
    with start_child_ranks(module, task, env, **options) as children:
        return children.results(on_poll)


@contextmanager
def start_child_ranks(
    module: str, task: Mapping[str, Any], env: Mapping[str, str], **options: Unpack[ChildOptions]
) -> Iterator[StartedChildRanks]:
    """Context manager: start children as for ``run_child_ranks``; at the exit, children that still run are ended.

    A check that runs children several times can start all of them first, so that later children import torch while
    earlier ones run. ``limit_s`` applies separately to ``wait_until_ready``, to ``results`` (from its call) and to each
    operation of the children's process group.
    """
    release_memory(options["device"])
    file_prefix, limit_s = options["file_prefix"], options["limit_s"]
    rank, run_number = dist.get_rank(), next(_run_numbers)
    files = {stream: file_prefix.with_name(f"{file_prefix.name}.rank{rank}.{stream}") for stream in ("out", "err")}
    for path in files.values():
        path.unlink(missing_ok=True)  # otherwise the output of an earlier attempt could be read as this one's
    all_groups = options.get("groups") or [range(dist.get_world_size())]
    group_number = next((number for number, ranks in enumerate(all_groups) if rank in ranks), None)
    start_key = f"seatrial/children/{run_number}/start"
    group_name = f"seatrial/children/{run_number}/{group_number}"
    child = None
    if group_number is not None:
        ranks = all_groups[group_number]
        child_rank = ranks.index(rank)
        identity = {"RANK": str(child_rank), "WORLD_SIZE": str(len(ranks)), "LOCAL_RANK": str(options["local_rank"])}
        # The child must not inherit NCCL_GRAPH_MIXING_SUPPORT=0 of seatrial: training may run operations in a CUDA
        # graph concurrently with others
        omitted_variable = group.GRAPH_MIXING if group.GRAPH_MIXING in group.set_by_seatrial else ""
        group_task = {  # read by open_child_group; "started" is read by train/child.py
            "group": group_name,
            "start_key": start_key,
            "device": options["device"],
            "limit_s": limit_s,
            "started": time.time(),
        }
        child_task, child_env = {**group_task, **task}, {**env, **identity}
        spare = spare_children.take(options.get("spare_gpus"), child_env)
        if spare and spare.run(module, child_task, {**processes.inherited(omitted_variable), **child_env}, files):
            child = spare.child
        else:
            argv = [sys.executable, "-m", module, json.dumps(child_task)]
            child = processes.start(
                argv, env=child_env, stdout=files["out"], stderr=files["err"], without=omitted_variable
            )
    try:
        yield StartedChildRanks(start_key, group_name, child, sum(map(len, all_groups)), files, limit_s)
    finally:
        if child and child.poll() is None:
            processes.stop(child, grace_s=1.0)


def failure_text(rank: int, result: ChildResult) -> str:
    return f"rank {rank}{' on ' if result.host else ''}{result.host}: {result.error}"


def first_failure_text(results: Sequence[ChildResult]) -> str:
    """The error of the child that most likely failed first, with its rank and host; empty if none failed."""
    failed = {rank: result for rank, result in enumerate(results) if result.error}
    if not failed:
        return ""
    first = first_failed_rank(failed)
    return failure_text(first, failed[first])


def first_failed_rank(failed: Mapping[int, ChildResult]) -> int:
    """The rank that most likely failed first. ``failure_order`` alone is not enough: each group has its own numbers."""
    return first_failure(
        Failure(rank, result.exit_code, reported=True, order=result.failure_order)  # reported: wrote an error message
        for rank, result in failed.items()
    ).rank


def open_child_group(task: Mapping[str, Any], backend: str = "") -> str:
    """Called first in a child: wait for the start, open the children's process group and return the device.

    ``backend``: replaces the default (NCCL on GPUs, gloo on CPUs), e.g. "cpu:gloo,cuda:nccl"; communicators are then
    created at first use.
    """
    device, timeout = torch.device(task["device"]), timedelta(seconds=task["limit_s"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = group.rendezvous_store(timeout)
    rendezvous.add(f"{task['start_key']}/ready", 1)
    rendezvous.wait([task["start_key"]], group.STORE_TIMEOUT)
    store = dist.PrefixStore(task["group"], rendezvous)  # type: ignore[attr-defined]
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if not backend:  # a device_id would be passed on to groups of another backend
            options["device_id"] = device
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout, **options)
    return str(device)


def child_rank_main(run: Callable[[Mapping[str, Any], str], Any]) -> NoReturn:
    """Run ``run(task, device)`` in the children's process group, print its result as JSON and exit."""

    def run_in_group(task: Mapping[str, Any]) -> Any:
        result = run(task, open_child_group(task))
        group.close_group()
        return result

    child_result.child_main(run_in_group)


def _wait_for_child(
    child: processes.Child, group_name: str, limit_s: float, on_poll: Callable[[], None]
) -> ChildResult:
    """Wait until the child ends, and return its error; an empty result if its exit code is 0.

    Its failure is counted in the store, where the other ranks of its group see it.
    """
    store, failure_key = dist.distributed_c10d._get_default_store(), f"{group_name}/failed"
    last_store_poll = started = time.monotonic()
    while (code := child.poll()) is None:
        time.sleep(_POLL_S)
        now = time.monotonic()
        if now - last_store_poll > _STORE_POLL_S:
            last_store_poll = now
            on_poll()
            if store.check([failure_key]):
                error = _stop(child, "ended because the child of another rank failed")
                return ChildResult(error=error, exit_code=-signal.SIGTERM, failure_order=store.add(failure_key, 1))
        if now - started > limit_s:
            order = store.add(failure_key, 1)
            error = _stop(child, f"did not end within {limit_s:g} s")
            return ChildResult(error=error, exit_code=EXIT_TIMEOUT, failure_order=order)
    if code:
        error = ". ".join(filter(None, [exit_reason(code), exit_hint(code)]))
        return ChildResult(error=error, exit_code=code, failure_order=store.add(failure_key, 1))
    return ChildResult()


def _stop(child: processes.Child, reason: str) -> str:
    """End the child, and return ``reason`` with the pids that still run, if any."""
    return "; ".join(filter(None, [reason, processes.stop(child, grace_s=1.0)]))


def _with_stderr(error: str, stderr: Path) -> str:
    """``error``, then the last message of stderr, then the text before that message.

    In this order, truncation of the error keeps the message. The last message begins at the last line that is not
    indented: continuation lines are indented.
    """
    lines = stderr.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    if not lines:
        return error
    start = max((number for number, line in enumerate(lines) if line[:1].strip()), default=0)
    last_message, text_before = "\n".join(lines[start:]).strip(), "\n".join(lines[:start]).strip()
    earlier = f"\nearlier stderr: {text_before[-_QUOTED_CHARACTERS:]}" if text_before else ""
    return f"{error}; stderr ends with: {last_message[:_QUOTED_CHARACTERS]}{earlier}"


def _read_result(path: Path) -> ChildResult:
    """The result from the last line of stdout; libraries may have written the lines before it."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    try:
        return ChildResult(json.loads(lines[-1]))
    except (IndexError, ValueError):
        printed = f"'{lines[-1][:_QUOTED_CHARACTERS]}'" if lines else "no output"
        return ChildResult(error=f"expected JSON as the last line of stdout, got {printed}")
