"""The program that runs on nodes: ``python -m seatrial.worker RUN/jobs/JOB/job.json ATTEMPT``.

Each rank writes two files. The journal, ``rank3.jsonl``, has a record of each started check and of each measurement.
A record and its SHA-256 are on disk, as one line, before the next step starts. A separate thread rewrites the
heartbeat, ``rank3.heartbeat.json``, every second. The heartbeat of a process that waits in a collective therefore still
changes; the heartbeat of a stopped or dead process does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from seatrial.checks import catalog
from seatrial.checks.check import Check, Context
from seatrial.hardware.network_time import TcpNetwork
from seatrial.model import (
    ERROR_COUNTERS,
    Absent,
    Artifact,
    Fact,
    Frozen,
    Job,
    Measurement,
    Metric,
    NotApplicable,
    Observation,
    Scope,
    SeatrialError,
    Series,
)
from seatrial.telemetry.error_counts import ErrorCounts, count_errors
from seatrial.util import processes
from seatrial.util.files import atomic_write
from seatrial.util.gc_pause import gc_ignores_imports
from seatrial.util.journal import Journal
from seatrial.util.node_name import node_name
from seatrial.util.secrets import redacted, secret_values
from seatrial.util.signals import EXIT_TERMINATED, SigtermWatch
from seatrial.util.stack_dump import StackDump

HEARTBEAT_INTERVAL_S = 1.0
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
CLEANUP_S = 4.0  # from SIGTERM to exit; less than the 5 s of processes.stop before SIGKILL
TERMINATING = "terminating on SIGTERM"  # the last status: no further heartbeat follows
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class RankIdentity:
    """Rank of this process, from torchrun's environment variables. Without these variables it is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> RankIdentity:
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        )


class Heartbeat(Frozen):
    """Content of a heartbeat file. ``status``: the current check or phase; ``time``: by the clock of the node."""

    pid: int
    node: str
    status: str
    progress: str
    time: float


class HeartbeatWriter:
    """Writes the heartbeat of one rank every ``HEARTBEAT_INTERVAL_S``, with its status.

    On SIGTERM it writes the status ``TERMINATING`` and ends the process. The status shows that torchrun ended the rank,
    for example because another rank failed, and that the rank did not hang. With ``cleanup_s``, SIGTERM also raises
    SystemExit in the check, which then has this many seconds to clean up. The heartbeat thread also writes the
    ``stacks`` when the launcher requests them.
    """

    def __init__(self, path: Path, cleanup_s: float, stacks: StackDump) -> None:
        self._path = path
        self._stacks = stacks
        self._cleanup_s = cleanup_s
        self._state: dict[str, Any] = {"pid": os.getpid(), "node": node_name()}
        self.set_status("starting")
        self._stopping = threading.Event()
        self._sigterm = SigtermWatch(_exit if cleanup_s else lambda *_: None)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatWriter:
        self._write()
        self._poll_stacks()  # once now: a check may hold Python's lock before the thread runs for the first time
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._stacks.close()

    def set_status(self, status: str) -> None:
        self._state = {**self._state, "status": status, "progress": ""}

    def set_progress(self, progress: str) -> None:
        self._state = {**self._state, "progress": progress}

    def _run(self) -> None:
        while not self._stopping.is_set():
            terminating = self._sigterm.wait(HEARTBEAT_INTERVAL_S)
            if terminating:
                self.set_status(TERMINATING)
            with contextlib.suppress(OSError):  # the journal reports a full disk
                self._write()
            self._poll_stacks()
            if terminating:
                self._stopping.wait(self._cleanup_s)
                os._exit(EXIT_TERMINATED)

    def _poll_stacks(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the launcher reports missing stacks
            self._stacks.poll()

    def _write(self) -> None:
        # without fsync: a slow disk must not delay heartbeats
        atomic_write(self._path, json.dumps({**self._state, "time": time.time()}).encode(), sync=False)


def _exit(_number: int, _frame: object) -> None:
    raise SystemExit(EXIT_TERMINATED)


def run_checks(job: Job, run_dir: Path, attempt_dir: Path) -> None:
    """Run the job's checks in this process. Raises SeatrialError if a CLUSTER check ends with an error on this rank.

    The other ranks may then wait in a collective. When this rank has exited, the launcher ends the other ranks and
    starts a new attempt for the checks that had not started. ``attempt_dir``: the directory of this attempt at the job,
    such as ``RUN/jobs/JOB/attempt1``.
    """
    identity = RankIdentity.from_environment()
    if identity.world_size != job.process_count:
        expected = f"job {job.name} has {job.nodes} nodes with {job.ranks_per_node} processes"
        raise SeatrialError(f"WORLD_SIZE is {identity.world_size}, but {expected}: start it with its command.sh")
    journal = Journal(attempt_dir / f"rank{identity.rank}.jsonl")
    # checks of the control job submit Slurm jobs, which they must cancel before the exit
    cleanup_s = CLEANUP_S if job.placement == "control" else 0.0
    stacks = StackDump(attempt_dir, identity.rank, _recorder_dump)
    with HeartbeatWriter(attempt_dir / f"rank{identity.rank}.heartbeat.json", cleanup_s, stacks) as heartbeat:
        device, nvml_index, gpu_uuid = _open_device(job, identity, attempt_dir)
        for name in job.checks:
            check = catalog()[name]
            heartbeat.set_status(name)
            context = _context(check, job, identity, run_dir, device, nvml_index, gpu_uuid, heartbeat.set_progress)
            journal.append({"start": name, "time": time.time(), "subject": context.subject})
            with _error_counts(check, context) as counts:
                measurement = measure(check, context, job.options.get(name, {}))
            if counts and not measurement.skipped:
                measurement = _with_error_counts(measurement, counts, context)
            if job.retry:
                measurement = _as_retry(measurement, check, job)
            journal.append({"measurement": measurement.model_dump(mode="json")})
            if measurement.error and check.scope is Scope.CLUSTER:
                raise SeatrialError(f"{name}: {measurement.error}")
        heartbeat.set_status("closing")
        if job.placement == "ranks":
            from seatrial.bench import group

            group.close_group()
        journal.append({"done": time.time()})  # the launcher expects no heartbeat after this record


def measure(check: Check, context: Context, options: dict[str, Any]) -> Measurement:
    """Run one check and return its measurement, with ``error`` or ``skipped`` if the check raised an exception.

    Observations before an exception are kept. Secrets of the options and of the environment are replaced: the process
    that started the job does not know the environment of this node.
    """
    secrets = secret_values({"options": [options, context.options_by_check]}, vocabulary={check.name, *check.units})
    started, monotonic_start = time.time(), time.monotonic()
    observations: list[Observation] = []
    error = skipped = None
    try:
        for observation in check.observe(context, check.options.model_validate(options)):
            observations.append(observation)  # noqa: PERF402 - list() would lose the observations before an error
    except NotApplicable as reason:
        skipped = str(reason)
    except Exception as failure:
        print(redacted(traceback.format_exc(), secrets), file=sys.stderr, end="")
        error = f"{type(failure).__name__}: {failure}"
    return Measurement(
        check=check.name,
        subject=context.node if check.scope in (Scope.CONTROL, Scope.NODE) else context.subject,
        rank=context.rank,
        gpu_uuid=context.gpu_uuid,
        metrics=tuple(
            replace(each, evidence=redacted(each.evidence, secrets)) if each.evidence else each
            for each in _of_type(observations, Metric)
        ),
        absent=tuple(replace(each, reason=redacted(each.reason, secrets)) for each in _of_type(observations, Absent)),
        facts=redacted({fact.name: fact.value for fact in _of_type(observations, Fact)}, secrets),
        series=tuple(_of_type(observations, Series)),
        artifacts=tuple(_of_type(observations, Artifact)),
        error=redacted(error, secrets),
        skipped=redacted(skipped, secrets),
        started=started,
        seconds=time.monotonic() - monotonic_start,
    )


def _error_counts(check: Check, context: Context) -> AbstractContextManager[ErrorCounts | None]:
    """Return a context that reads error counters before and after a check.

    Each rank reads the counters of its GPU; local rank 0 also reads the counters of the node's RDMA ports. If the rank
    has no GPU, or the check needs no counters, the context reads nothing and its value is None.
    """
    if context.nvml_index is None or not check.reads_error_counters:
        return contextlib.nullcontext()
    return count_errors(context.nvml_index, context.local_rank == 0, context.root)


def _with_error_counts(measurement: Measurement, counts: ErrorCounts, context: Context) -> Measurement:
    metrics = (*measurement.metrics, *counts.metrics(context.subject, context.node))
    facts = {**measurement.facts, ERROR_COUNTERS: counts.fact()}
    return measurement.model_copy(update={"metrics": metrics, "facts": facts})


def _as_retry(measurement: Measurement, check: Check, job: Job) -> Measurement:
    """Return the measurement as a retry; its fact ``retry`` states what differs from the first measurement."""
    difference = "same device, new process"
    if job.retry == 1 and job.placement == "ranks" and job.device == "cuda" and job.ranks_per_node > 1:
        difference = "same GPU, process of another rank"
        if check.scope is Scope.CLUSTER:
            difference = "ranks assigned to the GPUs of each node in reverse order; NCCL may still use the same rings"
    elif check.scope is Scope.CLUSTER:
        difference = "same ranks on the same devices, new processes"
    return measurement.model_copy(update={"retry": job.retry, "facts": {**measurement.facts, "retry": difference}})


def _of_type(observations: Iterable[Observation], kind: type[_Kind]) -> list[_Kind]:
    return [observation for observation in observations if isinstance(observation, kind)]


def _open_device(job: Job, identity: RankIdentity, attempt_dir: Path) -> tuple[str, int | None, str]:
    """Return this rank's device, and the NVML index and the UUID of its GPU (None and empty without a GPU).

    For a ``ranks`` job, also start the spare children and open the process group.
    """
    if job.placement != "ranks":
        return "cpu", None, ""
    from seatrial.bench import group, rank, spare_children, timing

    if job.retry:
        timing.min_windows = timing.RETRY_MIN_WINDOWS
    device = f"cuda:{identity.local_rank}" if job.device == "cuda" else "cpu"
    group.enable_nccl_log(attempt_dir)
    gpus_of_children = visible_gpus_of_children(job)
    spare_children.start(gpus_of_children, attempt_dir, device)
    group.open_group(device, timeout_s=job.limit_s)
    if gpus_of_children:
        spare_children.wait_until_ready()
    return device, rank.nvml_index(device), rank.gpu_uuid(device)


def visible_gpus_of_children(job: Job) -> list[Literal["own", "all"]]:
    """Return, for each child process that a rank starts before the checks, the GPUs that the child sees.

    ``own``: the rank's GPU; ``all``: the GPUs of all ranks of the node. Empty on CPUs, where an early start of children
    saves little: their imports are short compared with their training, and waiting children would fill memory.
    """
    if job.device == "cpu":
        return []
    one_rank = job.process_count == 1
    tasks = [task for name in job.checks for task in catalog()[name].child_tasks]
    # a child for the runs of train/variants.py ("variants") sees all GPUs even if there is one rank
    return ["own" if task == "gpu" or (task == "all" and one_rank) else "all" for task in tasks]


def _recorder_dump() -> bytes:
    """Return the dump of torch's flight recorder; empty for a process without a process group."""
    group = sys.modules.get("seatrial.bench.group")  # an import statement could wait for the main thread's imports
    dump = getattr(group, "flight_recorder_dump", None)
    return dump() if dump else b""


def _context(
    check: Check,
    job: Job,
    identity: RankIdentity,
    run_dir: Path,
    device: str,
    nvml_index: int | None,
    gpu_uuid: str,
    progress: Callable[[str], None],
) -> Context:
    artifacts_dir = run_dir / "artifacts" / f"{check.name}{job.retry_suffix}"
    artifacts_dir.mkdir(parents=True, exist_ok=True)
    tcp_network = None
    if job.network_gbps is not None and job.nodes > 1:
        tcp_network = TcpNetwork(job.nodes, job.ranks_per_node, job.network_gbps)
    return Context(
        node=node_name(),
        rank=identity.rank,
        world_size=identity.world_size,
        local_rank=identity.local_rank,
        device=device,
        nvml_index=nvml_index,
        gpu_uuid=gpu_uuid,
        expected_gpus=job.expected_gpus,
        expected_nodes=job.expected_nodes,
        options_by_check=job.options,
        topology=job.topology,
        tcp_network=tcp_network,
        artifacts_dir=artifacts_dir,
        run_dir=run_dir,
        progress=progress,
    )


def reversed_devices(visible: str | None, count: int) -> str:
    """Return the first ``count`` GPUs in reverse order. ``visible``: CUDA_VISIBLE_DEVICES, None if it is unset."""
    devices = [str(index) for index in range(count)] if visible is None else visible.split(",")[:count]
    return ",".join(reversed(devices))


@contextlib.contextmanager
def _sampler(job: Job, identity: RankIdentity, attempt_dir: Path) -> Iterator[None]:
    """On local rank 0, run the node's telemetry sampler while the context is open.

    The kernel kills the sampler if this process ends. If the sampler fails, samples are missing, but no check fails.
    """
    if not job.telemetry_hz or identity.local_rank:
        yield
        return
    samples, log = attempt_dir / f"rank{identity.rank}.samples", attempt_dir / f"rank{identity.rank}.samples.err"
    argv = [sys.executable, "-m", "seatrial.telemetry.sampler", str(samples), str(job.telemetry_hz)]
    child = None
    with contextlib.suppress(OSError):
        child = processes.start(argv, env={}, stdout=log, stderr=log, death_signal=signal.SIGKILL)
    yield
    if child:
        processes.terminate(child)


def main(arguments: list[str]) -> None:
    processes.die_with_parent(os.getppid())
    job_file, attempt = Path(arguments[0]), arguments[1]
    job = Job.model_validate_json(job_file.read_text(encoding="utf-8"))
    run_dir, attempt_dir = job_file.parents[2], job_file.parent / f"attempt{attempt}"
    if job.placement == "ranks" and processes.is_orphan():  # torchrun ended before die_with_parent took effect
        raise SystemExit("seatrial.worker: torchrun exited before this rank started; exiting")
    if job.retry == 1 and job.device == "cuda":  # each rank gets another GPU; takes effect only before CUDA starts
        os.environ[_VISIBLE_DEVICES] = reversed_devices(os.environ.get(_VISIBLE_DEVICES), job.ranks_per_node)
    # the sampler starts before the import of torch, which starts threads
    with _sampler(job, RankIdentity.from_environment(), attempt_dir):
        if job.placement != "ranks":
            run_checks(job, run_dir, attempt_dir)
            return
        with gc_ignores_imports():
            from seatrial.bench import group, rank

        rank.with_torchrun_error_file(run_checks)(job, run_dir, attempt_dir)
    group.exit_without_teardown()


if __name__ == "__main__":
    main(sys.argv[1:])
