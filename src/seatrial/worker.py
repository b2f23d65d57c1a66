"""The one program that runs on nodes: ``python -m seatrial.worker RUN/jobs/JOB/job.json ATTEMPT``.

Each rank keeps a journal (``rank3.jsonl``: what it started and measured, on disk before the next step) and a pulse
(``rank3.heartbeat.json``: rewritten every second by a thread of its own, so that a process that is stuck in a collective still
has a pulse, and one that is stopped, or gone, has none).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from seatrial.checks import catalog
from seatrial.checks.base import Check, Context
from seatrial.model import (
    ERROR_COUNTERS,
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
from seatrial.util.gc_pause import gc_paused
from seatrial.util.journal import Journal
from seatrial.util.signals import EXIT_TERMINATED, SigtermWatch

HEARTBEAT_INTERVAL_S = 1.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
CLEANUP_S = 4.0  # less than what ends us waits before SIGKILL: shell.stop
TERMINATING = "ending on SIGTERM"  # said by a rank from which no pulse is to be expected any more
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Identity:
    """Which process of the job this is, by the variables that torchrun sets; alone without them."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Identity:
        rank, world_size, local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        return cls(rank, world_size, local_rank)


class Heartbeat(Frozen):
    """What a pulse file holds: the sign of life of one rank. ``time`` is by the clock of its node."""

    pid: int
    node: str
    doing: str
    note: str
    time: float


class HeartbeatWriter:
    """The sign of life of one rank, with what it is doing.

    It also ends the process on SIGTERM, and says so first: a rank that torchrun ends because another one failed must
    not look as if it had gone silent. ``tidy_s`` seconds are left to a check that has to tidy up first.
    """

    def __init__(self, path: Path, tidy_s: float = 0.0) -> None:
        self._path = path
        self._tidy_s = tidy_s
        self._state: dict[str, Any] = {"pid": os.getpid(), "node": socket.gethostname()}
        self.say("starting")
        self._stopping = threading.Event()
        self._sigterm = SigtermWatch(_leave if tidy_s else lambda *_: None)
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> HeartbeatWriter:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join()

    def say(self, doing: str) -> None:
        self._state = {**self._state, "doing": doing, "note": ""}

    def note(self, text: str) -> None:
        self._state = {**self._state, "note": text}

    def _beat(self) -> None:
        while not self._stopping.is_set():
            ending = self._sigterm.wait(HEARTBEAT_INTERVAL_S)
            if ending:
                self.say(TERMINATING)
            with contextlib.suppress(OSError):  # a full disk is told by the journal; no pulse would read as a hang
                self._write()
            if ending:
                self._stopping.wait(self._tidy_s)
                os._exit(EXIT_TERMINATED)

    def _write(self) -> None:
        # not synced: a pulse is rewritten every second, and a slow disk must not look like silence
        atomic_write(self._path, json.dumps({**self._state, "time": time.time()}).encode(), sync=False)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(EXIT_TERMINATED)


def work(job: Job, run_dir: Path, folder: Path) -> None:
    """Run the job's checks in this process. Raises SeatrialError after a check of all ranks together has failed here.

    Its peers may then wait for us inside a collective: leaving makes the launcher end them and run the rest anew.
    """
    me = Identity.from_environment()
    journal = Journal(folder / f"rank{me.rank}.jsonl")
    # checks of the control job hand in jobs of their own to Slurm, which must not outlive them
    tidy_s = CLEANUP_S if job.placement == "control" else 0.0
    with HeartbeatWriter(folder / f"rank{me.rank}.heartbeat.json", tidy_s) as pulse:
        device, gpu_index = _open_device(job, me, folder)
        for name in job.checks:
            check = catalog()[name]
            pulse.say(name)
            context = _place(check, job, me, run_dir, device, gpu_index, pulse.note)
            journal.append({"start": name, "time": time.time(), "subject": context.subject})
            with _counted(check, context) as window:
                measurement = measure(check, context, job.options.get(name, {}))
            if window and not measurement.skipped:
                measurement = _with_counters(measurement, window, context)
            if job.retry:
                measurement = _marked(measurement, check, job)
            journal.append({"measurement": measurement.model_dump(mode="json")})
            if measurement.error and check.scope is Scope.CLUSTER:
                raise SeatrialError(f"{name}: {measurement.error}")
        pulse.say("closing")
        _close_device(job)
        journal.append({"done": time.time()})  # the pulse ends here, and that is no silence


def measure(check: Check, context: Context, options: dict[str, Any]) -> Measurement:
    """Run one check to its end or its error; what it yielded before the error is kept."""
    started, clock = time.time(), time.monotonic()
    seen: list[Observation] = []
    error = skipped = None
    try:
        for observation in check.measure(context, check.options.model_validate(options)):
            seen.append(observation)  # noqa: PERF402 - list() would lose what came before an error
    except NotApplicable as reason:
        skipped = str(reason)
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    return Measurement(
        check=check.name,
        subject=context.node if check.scope in (Scope.CONTROL, Scope.NODE) else context.subject,
        rank=context.rank,
        metrics=tuple(_only(seen, Metric)),
        facts={fact.name: fact.value for fact in _only(seen, Fact)},
        series=tuple(_only(seen, Series)),
        artifacts=tuple(_only(seen, Artifact)),
        error=error,
        skipped=skipped,
        started=started,
        seconds=time.monotonic() - clock,
    )


def _counted(check: Check, context: Context) -> AbstractContextManager[ErrorCounts | None]:
    """Error counters before and after, outside the check's own time: of our GPU, and once a node of its RDMA ports."""
    if context.nvml_index is None or not check.reads_error_counters:
        return contextlib.nullcontext()
    return count_errors(context.nvml_index, context.local_rank == 0, context.root)


def _with_counters(measurement: Measurement, window: ErrorCounts, context: Context) -> Measurement:
    grew = window.metrics(context.subject, context.node)
    facts = {**measurement.facts, ERROR_COUNTERS: window.fact()}
    return measurement.model_copy(update={"metrics": (*measurement.metrics, *grew), "facts": facts})


def _marked(measurement: Measurement, check: Check, job: Job) -> Measurement:
    """As the second of two, with the fact that says what was different."""
    changed = "the same place, in a new process"
    if job.placement == "ranks" and job.device == "cuda" and job.ranks_per_node > 1:
        changed = "the same GPU, in the process of another rank"
        if check.scope is Scope.CLUSTER:
            changed = "the ranks in the reverse order of each node's GPUs; NCCL chooses its rings by itself"
    elif check.scope is Scope.CLUSTER:
        changed = "the same processes at the same places, started anew"
    return measurement.model_copy(update={"retry": True, "facts": {**measurement.facts, "retry": changed}})


def _only(observations: Iterable[Observation], kind: type[Kind]) -> list[Kind]:
    return [observation for observation in observations if isinstance(observation, kind)]


def _open_device(job: Job, me: Identity, folder: Path) -> tuple[str, int | None]:
    """Our device, and its NVML index; on a ``ranks`` job the process group is open afterwards."""
    if job.placement != "ranks":
        return "cpu", None
    from seatrial.bench import group, rank

    device = f"cuda:{me.local_rank}" if job.device == "cuda" else "cpu"
    group.enable_nccl_log(folder)
    group.open_group(device, timeout_s=job.limit_s)
    return device, rank.nvml_index(device)


def _close_device(job: Job) -> None:
    if job.placement == "ranks":
        from seatrial.bench import group

        group.close_group()


def _place(
    check: Check,
    job: Job,
    me: Identity,
    run_dir: Path,
    device: str,
    gpu_index: int | None,
    note: Callable[[str], None],
) -> Context:
    out = run_dir / "artifacts" / (f"{check.name}-retry" if job.retry else check.name)
    out.mkdir(parents=True, exist_ok=True)
    return Context(
        node=socket.gethostname(),
        rank=me.rank,
        world_size=me.world_size,
        local_rank=me.local_rank,
        device=device,
        nvml_index=gpu_index,
        expected_gpus=job.expected_gpus,
        expected_nodes=job.expected_nodes,
        options_by_check=job.options,
        artifacts_dir=out,
        run_dir=run_dir,
        progress=note,
    )


def reversed_order(visible: str | None, count: int) -> str:
    """CUDA_VISIBLE_DEVICES for the first ``count`` of the GPUs that it shows (None: all), the last of them first."""
    devices = [str(index) for index in range(count)] if visible is None else visible.split(",")[:count]
    return ",".join(reversed(devices))


@contextlib.contextmanager
def _sampled(job: Job, me: Identity, folder: Path) -> Iterator[None]:
    """With a sampler of this node beside its first rank. The kernel ends it with us, however we end.

    That it could not be started, or has ended, shows in the samples that are missing: it costs no check.
    """
    if not job.telemetry_hz or me.local_rank:
        yield
        return
    samples, log = folder / f"rank{me.rank}.samples", folder / f"rank{me.rank}.samples.err"
    argv = [sys.executable, "-m", "seatrial.telemetry.sampler", str(samples), str(job.telemetry_hz)]
    child = None
    with contextlib.suppress(OSError):
        child = processes.start(argv, env={}, stdout=log, stderr=log)
    yield
    if child:
        processes.end(child)


def main(arguments: list[str]) -> None:
    processes.die_with_parent(os.getppid())
    path, attempt = Path(arguments[0]), arguments[1]
    job = Job.model_validate_json(path.read_text(encoding="utf-8"))
    run_dir, folder = path.parents[2], path.parent / f"attempt{attempt}"
    if (
        job.placement == "ranks" and processes.is_orphan()
    ):  # torchrun was killed before the kernel was to end us with it
        raise SystemExit("seatrial.worker: what started this rank is gone: leaving")
    if job.retry and job.device == "cuda":  # before anything asks for a GPU
        os.environ[_VISIBLE] = reversed_order(os.environ.get(_VISIBLE), job.ranks_per_node)
    with _sampled(job, Identity.from_environment(), folder):  # before torch is imported, which starts threads
        if job.placement != "ranks":
            work(job, run_dir, folder)
            return
        with gc_paused():
            from seatrial.bench import group, rank

        rank.with_torchrun_error_file(work)(job, run_dir, folder)
    group.exit_without_teardown()


if __name__ == "__main__":
    main(sys.argv[1:])
