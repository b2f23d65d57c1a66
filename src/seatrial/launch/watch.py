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
from seatrial.launch import blame
from seatrial.launch.base import Launcher, Rendered, Running, Whereabouts
from seatrial.launch.blame import Blame
from seatrial.launch.ranks import Rank, ranks_in
from seatrial.model import CLUSTER, Job, JobResult, JobState, Measurement, Scope, SeatrialError
from seatrial.settings import Limits

_LOOK_EVERY_S = 0.1


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
    (folder / "command.sh").write_text(rendered.text + "\n", encoding="utf-8")
    ranks = ranks_in(folder, job.nodes * job.ranks_per_node)
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
    try:
        watched = _watch(running, job, ranks, folder, limits, checks, listener)
    finally:
        running.cancel()
    return replace(watched, where=running.whereabouts())


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
        if code == 0:
            return Watched(JobState.COMPLETED, None, elapsed_s)
        if code is not None:
            return Watched(JobState.FAILED, blame.ended(ranks, code, folder, running.epitaph()), elapsed_s)
        if waiting := running.waiting():
            listener.doing(f"waiting: {waiting.reason}")
            if waiting.hopeless:
                return Watched(JobState.TIMEOUT, Blame("the queue", waiting.reason, None), elapsed_s)
            begun = time.monotonic()  # the limits count from when it runs
        stuck = _stuck(job, ranks, begun, folder, limits)
        if stuck:
            return Watched(stuck[0], stuck[1], elapsed_s)
        time.sleep(_LOOK_EVERY_S)


def _read_all(ranks: list[Rank], checks: Mapping[str, Check], listener: Listener) -> None:
    for rank in ranks:
        for record in rank.read():
            if "measurement" in record and not _is_followup(rank.measured[record["measurement"]["check"]], checks):
                listener.measured(rank.measured[record["measurement"]["check"]])
    if ranks[0].pulse:
        listener.doing(ranks[0].last_words)


def _is_followup(measurement: Measurement, checks: Mapping[str, Check]) -> bool:
    """Whether this is one rank's view of a failure of all ranks together: told once, with its cause, by _settle."""
    return measurement.error is not None and checks[measurement.check].scope is Scope.CLUSTER


def _stuck(job: Job, ranks: list[Rank], begun: float, folder: Path, limits: Limits) -> tuple[JobState, Blame] | None:
    now = time.monotonic()
    silent = [rank for rank in ranks if rank.seen is not None and now - rank.seen > limits.silence_s and rank.at_work]
    if silent:
        # the first to fall silent: the others may have ended because of it
        first = min(silent, key=lambda rank: (rank.failed, rank.seen))
        return JobState.HUNG, blame.silent(first, now - (first.seen or now))
    if all(rank.seen is not None and now - rank.seen > limits.silence_s and not rank.at_work for rank in ranks):
        cause = f"all ranks ended {limits.silence_s:g} s ago or more, and what started them has not"
        return JobState.HUNG, Blame("launcher", cause, None)
    for rank in ranks:
        check = rank.current
        if check and now - rank.started[check] > job.limits[check]:
            return JobState.TIMEOUT, blame.over_limit(ranks, check, job.limits[check])
    if now - begun > limits.startup_s and not all(rank.started for rank in ranks):
        return JobState.TIMEOUT, blame.never_started(ranks, limits.startup_s, folder)
    if now - begun > job.limit_s:
        return JobState.TIMEOUT, blame.over_limit(ranks, "the job", job.limit_s)
    return None


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
