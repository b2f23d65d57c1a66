"""Runs one job to its end, whatever that is: done, crashed, hung, over its limit.

After a crash the checks that had not begun are run again in a new attempt; the one that was running is not, since it
may be what crashed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from seatrial.checks.base import Check
from seatrial.config.schema import Limits
from seatrial.launch import root_cause as blame
from seatrial.launch.base import Launcher, Rendered, Running, Whereabouts
from seatrial.launch.rank_status import Rank, ranks_in
from seatrial.launch.root_cause import Blame
from seatrial.model import CLUSTER, Job, JobResult, JobState, Measurement, Scope, SeatrialError

_LOOK_EVERY_S = 0.1
_STOPPED_S = 1.0  # no machine is so busy that a sleep takes this much longer
# Once a rank has failed, the others are ended, and what started them too: torchrun gives its ranks 30 s for that, and
# Slurm as much to what is left (KillWait).
_LEAVING_S = 60.0


class Listener(Protocol):
    """Hears what happens while it happens. ``measured`` must keep the measurement: it is called once for each."""

    def job_started(self, job: Job, attempt: int) -> None: ...

    def doing(self, words: str) -> None: ...

    def measured(self, measurement: Measurement) -> None: ...


@dataclass(frozen=True)
class Watched:
    """How an attempt ended."""

    state: JobState
    blame: Blame | None
    startup_s: float
    where: Whereabouts = field(default_factory=Whereabouts)


def run_job(
    launcher: Launcher, job: Job, run_dir: Path, limits: Limits, checks: Mapping[str, Check], listener: Listener
) -> Iterator[JobResult]:
    """Run ``job``, in as many attempts as its crashes ask for; a result for each. All checks end up measured."""
    while job.checks:
        attempt = _next_attempt(run_dir, job)
        result, job = _attempt(launcher, job, run_dir, attempt, limits, checks, listener)
        yield result


def _attempt(
    launcher: Launcher,
    job: Job,
    run_dir: Path,
    attempt: int,
    limits: Limits,
    checks: Mapping[str, Check],
    listener: Listener,
) -> tuple[JobResult, Job]:
    """One attempt: its result, and the job that is left to do."""
    folder = run_dir / "jobs" / job.name / f"attempt{attempt}"
    folder.mkdir(parents=True)
    (folder.parent / "job.json").write_text(job.model_dump_json(indent=2), encoding="utf-8")
    rendered = launcher.render(job, run_dir, attempt)
    (folder / "command.sh").write_text(rendered.text + "\n", encoding="utf-8", errors="surrogateescape")
    ranks = ranks_in(folder, job)
    started, clock = time.time(), time.monotonic()
    listener.job_started(job, attempt)
    watched = _start_and_watch(launcher, rendered, job, ranks, folder, limits, checks, listener)
    result = JobResult(
        job=job.name,
        attempt=attempt,
        launcher=launcher.name,
        state=watched.state,
        started=started,
        seconds=time.monotonic() - clock,
        startup_s=watched.startup_s,
        culprit=watched.blame.culprit if watched.blame else "",
        cause=watched.blame.cause if watched.blame else "",
        scheduler_id=watched.where.id,
        nodes=watched.where.nodes,
    )
    return result, _settle(job, ranks, result, watched.blame, checks, listener)


def _start_and_watch(
    launcher: Launcher,
    rendered: Rendered,
    job: Job,
    ranks: list[Rank],
    folder: Path,
    limits: Limits,
    checks: Mapping[str, Check],
    listener: Listener,
) -> Watched:
    try:
        running = launcher.start(rendered, folder)
    except SeatrialError as refusal:
        return Watched(JobState.FAILED, Blame(f"launcher {launcher.name}", str(refusal), None), 0.0)
    left = ""
    try:
        try:
            watched = _watch(running, job, ranks, folder, limits, checks, listener)
        finally:
            if left := running.cancel():
                listener.doing(left)
    except KeyboardInterrupt:
        _keep_the_sound(ranks, listener)
        raise
    watched = replace(watched, where=running.whereabouts())
    return _with_left_over(watched, left) if left else watched


def _with_left_over(watched: Watched, left: str) -> Watched:
    """A process that cannot be ended is a fault of the machine, even where all was measured."""
    blamed = watched.blame or Blame("launcher", "its processes did not end with it", None)
    state = JobState.HUNG if watched.state is JobState.COMPLETED else watched.state
    return replace(watched, state=state, blame=replace(blamed, cause=f"{blamed.cause}; {left}"))


def _watch(
    running: Running,
    job: Job,
    ranks: list[Rank],
    folder: Path,
    limits: Limits,
    checks: Mapping[str, Check],
    listener: Listener,
) -> Watched:
    begun = time.monotonic()
    startup_s = 0.0
    while True:
        code = running.poll()  # before reading, so that what was written before the end is read after it
        _read_all(ranks, checks, listener)
        if not startup_s and all(rank.started for rank in ranks):
            startup_s = time.monotonic() - begun
        elapsed_s = startup_s or time.monotonic() - begun
        if damaged := next((rank for rank in ranks if rank.damage), None):
            return Watched(JobState.FAILED, blame.damaged(damaged), elapsed_s)
        if code == 0:
            return Watched(JobState.COMPLETED, None, elapsed_s)
        if code is not None:
            return Watched(JobState.FAILED, blame.ended(job, ranks, code, folder, running.epitaph()), elapsed_s)
        if waiting := running.waiting():
            if waiting.reason:
                listener.doing(f"waiting: {waiting.reason}")
            if waiting.hopeless:
                return Watched(JobState.TIMEOUT, Blame("the queue", waiting.reason, None), elapsed_s)
            begun = time.monotonic()  # the limits count from when it runs
        elif stuck := _stuck(job, ranks, begun, folder, limits, checks):
            return Watched(stuck[0], stuck[1], elapsed_s)
        _rest(ranks)


def _rest(ranks: list[Rank]) -> None:
    """Until the next look. Where that takes far longer we were stopped, and so may the ranks have been: no silence."""
    clock = time.monotonic()
    time.sleep(_LOOK_EVERY_S)
    stopped_s = time.monotonic() - clock - _LOOK_EVERY_S
    for rank in ranks:
        if rank.seen is not None and stopped_s > _STOPPED_S:
            rank.seen += stopped_s


def _read_all(ranks: list[Rank], checks: Mapping[str, Check], listener: Listener) -> None:
    for rank in ranks:
        for measurement in rank.read():
            if not _is_followup(measurement, checks):
                listener.measured(measurement)
    if ranks[0].pulse:
        listener.doing(ranks[0].last_words)


def _keep_the_sound(ranks: list[Rank], listener: Listener) -> None:
    """What was measured before Ctrl-C and only the job's end has brought home; an error there may be of that end."""
    for measurement in (one for rank in ranks for one in rank.read()):
        if not measurement.error:
            listener.measured(measurement)


def _is_followup(measurement: Measurement, checks: Mapping[str, Check]) -> bool:
    """Whether this is one rank's view of a failure of all ranks together: told once, with its cause, by _settle."""
    return measurement.error is not None and checks[measurement.check].scope is Scope.CLUSTER


def _stuck(
    job: Job, ranks: list[Rank], begun: float, folder: Path, limits: Limits, checks: Mapping[str, Check]
) -> tuple[JobState, Blame] | None:
    now = time.monotonic()
    patience = limits.silence_s + (_LEAVING_S if any(rank.leaving for rank in ranks) else 0)
    silent = [rank for rank in ranks if rank.seen is not None and now - rank.seen > patience and rank.at_work]
    if silent:
        _try_to_write(folder)
        # the first to fall silent: the others may have ended because of it
        first = min(silent, key=lambda rank: (rank.failed, rank.seen))
        return JobState.HUNG, blame.silent(first, now - (first.seen or now))
    # once nobody was to be seen for a while, from when somebody was again
    if all(rank.seen and now - max(rank.seen, begun) > patience and not rank.at_work for rank in ranks):
        cause = f"all ranks ended {limits.silence_s:g} s ago or more, and what started them has not"
        return JobState.HUNG, Blame("launcher", cause, None)
    if late := _over_limit(job, ranks, checks, now):
        return JobState.TIMEOUT, late
    if now - begun > limits.startup_s and not all(rank.started for rank in ranks):
        return JobState.TIMEOUT, blame.never_started(ranks, limits.startup_s, folder)
    if now - begun > job.limit_s:
        return JobState.TIMEOUT, blame.over_limit(_hindmost(ranks), "the job", job.limit_s)
    return None


def _over_limit(job: Job, ranks: list[Rank], checks: Mapping[str, Check], now: float) -> Blame | None:
    """The first check, in the order of the job, that has taken some ranks too long.

    A check of all ranks together begins when the last has started it: to wait for a peer is no fault.
    """
    for name in job.checks:
        begun = [rank.started.get(name, now) for rank in ranks]
        together = checks[name].scope is Scope.CLUSTER
        since = {rank.number: max(begun) if together else begun[rank.number] for rank in ranks}
        late = [rank for rank in ranks if rank.current == name and now - since[rank.number] > job.limits[name]]
        if late:
            return blame.over_limit(late, name, job.limits[name])
    return None


def _hindmost(ranks: list[Rank]) -> list[Rank]:
    """Those that have come least far of all."""
    progress = {rank.number: (rank.done, len(rank.measured), len(rank.started)) for rank in ranks}
    return [rank for rank in ranks if progress[rank.number] == min(progress.values())]


def _try_to_write(folder: Path) -> None:
    """Raises OSError where the disk is full: then no pulse can be written either, and silence is no sign of a fault."""
    trial = folder / "writable"
    try:
        trial.write_bytes(bytes(4096))
    finally:
        trial.unlink(missing_ok=True)


def _settle(
    job: Job,
    ranks: list[Rank],
    result: JobResult,
    blamed: Blame | None,
    checks: Mapping[str, Check],
    listener: Listener,
) -> Job:
    """Record an ERROR for what the attempt left unfinished; return the job with what is still to be run."""
    begun = [name for name in job.checks if any(name in rank.started for rank in ranks)]
    left = [name for name in job.checks if name not in begun]
    if left and (result.state is JobState.COMPLETED or not begun):
        begun, left = list(job.checks), []  # nobody got as far as a check: another attempt would end the same way
    cause = f"{result.culprit}: {result.cause}" if blamed else "its worker ended normally without measuring it"
    lost = [one for name in begun for one in _lost(name, ranks, cause, blamed, checks[name].scope)]
    if blamed and not lost and begun:  # it broke between two checks, or while closing: never let that pass in silence
        lost = [Measurement(check=begun[-1], subject=CLUSTER, error=f"right after it, {cause}", started=time.time())]
    for measurement in lost:
        listener.measured(measurement)
    # not on the same nodes at any price: one of them may be what broke
    return job.model_copy(update={"checks": tuple(left), "nodelist": ""})


def _lost(name: str, ranks: list[Rank], cause: str, blamed: Blame | None, scope: Scope) -> list[Measurement]:
    """Measurements that say what is missing: one for ranks that work together, one a rank otherwise."""
    if scope is Scope.CLUSTER:
        if all(name in rank.measured and rank.measured[name].finished for rank in ranks):
            return []
        where = ranks[blamed.rank].subject if blamed and blamed.rank is not None else ""
        return [Measurement(check=name, subject=where or CLUSTER, error=cause, started=time.time())]
    return [
        Measurement(check=name, subject=rank.subject or rank.name, rank=rank.number, error=cause, started=time.time())
        for rank in ranks
        if name not in rank.measured
    ]


def _next_attempt(run_dir: Path, job: Job) -> int:
    return 1 + sum(1 for path in (run_dir / "jobs" / job.name).glob("attempt*"))
