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
from seatrial.launch import root_cause
from seatrial.launch.base import Allocation, Launcher, Running
from seatrial.launch.rank_status import Rank, ranks_in
from seatrial.launch.root_cause import RootCause
from seatrial.model import CLUSTER, Job, JobResult, JobState, Measurement, Scope, SeatrialError

_LOOK_EVERY_S = 0.1
_STOPPED_S = 1.0  # no machine is so busy that a sleep takes this much longer
# Once a rank has failed, the others are ended, and what started them too: torchrun gives its ranks 30 s for that, and
# Slurm as much to what is left (KillWait).
_LEAVING_S = 60.0


class Listener(Protocol):
    """Hears what happens while it happens. ``measured`` must keep the measurement: it is called once for each."""

    def job_started(self, job: Job, attempt: int) -> None: ...

    def current_check(self, words: str) -> None: ...

    def measured(self, measurement: Measurement) -> None: ...


@dataclass(frozen=True)
class Watched:
    """How an attempt ended."""

    state: JobState
    root_cause: RootCause | None
    startup_s: float
    where: Allocation = field(default_factory=Allocation)


def run_job(
    launcher: Launcher, job: Job, run_dir: Path, limits: Limits, checks: Mapping[str, Check], listener: Listener
) -> Iterator[JobResult]:
    """Run ``job``, in as many attempts as its crashes ask for; a result for each. All checks end up measured."""
    while job.checks:
        number = 1 + sum(1 for path in (run_dir / "jobs" / job.name).glob("attempt*"))
        folder = run_dir / "jobs" / job.name / f"attempt{number}"
        folder.mkdir(parents=True)
        attempt = _Attempt(job, folder, ranks_in(folder, job), limits, checks, listener)
        result, cause = attempt.run(launcher, run_dir, number)
        job = attempt.settle(result.state, cause)
        yield result


@dataclass
class _Attempt:
    job: Job
    folder: Path
    ranks: list[Rank]
    limits: Limits
    checks: Mapping[str, Check]
    listener: Listener

    def run(self, launcher: Launcher, run_dir: Path, number: int) -> tuple[JobResult, RootCause | None]:
        job = self.job
        (self.folder.parent / "job.json").write_text(job.model_dump_json(indent=2), encoding="utf-8")
        rendered = launcher.render(job, run_dir, number)
        (self.folder / "command.sh").write_text(rendered.text + "\n", encoding="utf-8", errors="surrogateescape")
        started, clock = time.time(), time.monotonic()
        self.listener.job_started(job, number)
        try:
            running = launcher.start(rendered, self.folder)
        except SeatrialError as refusal:
            watched = Watched(JobState.FAILED, RootCause(f"launcher {launcher.name}", str(refusal), None), 0.0)
        else:
            watched = self._watch_to_the_end(running)
        cause = watched.root_cause
        result = JobResult(
            job=job.name,
            attempt=number,
            launcher=launcher.name,
            state=watched.state,
            started=started,
            seconds=time.monotonic() - clock,
            startup_s=watched.startup_s,
            failed_subject=cause.culprit if cause else "",
            cause=cause.cause if cause else "",
            scheduler_id=watched.where.id,
            nodelist=watched.where.nodes,
        )
        return result, cause

    def _watch_to_the_end(self, running: Running) -> Watched:
        """Watch the job, and end what is left of it."""
        left = ""
        try:
            try:
                watched = self._watch(running)
            finally:
                if left := running.cancel():
                    self.listener.current_check(left)
        except KeyboardInterrupt:
            # what was measured before Ctrl-C and only the job's end has fetched; an error there may be of that end
            for measurement in (measured for rank in self.ranks for measured in rank.read()):
                if not measurement.error:
                    self.listener.measured(measurement)
            raise
        watched = replace(watched, where=running.allocation())
        if not left:
            return watched
        # a process that cannot be ended is a fault of the machine, even where all was measured
        cause = watched.root_cause or RootCause("launcher", "its processes did not end with it", None)
        state = JobState.HUNG if watched.state is JobState.COMPLETED else watched.state
        return replace(watched, state=state, root_cause=replace(cause, cause=f"{cause.cause}; {left}"))

    def _watch(self, running: Running) -> Watched:
        ranks = self.ranks
        begun = time.monotonic()
        startup_s = 0.0
        while True:
            code = running.poll()  # before reading, so that what was written before the end is read after it
            self._read_all()
            if not startup_s and all(rank.started for rank in ranks):
                startup_s = time.monotonic() - begun
            elapsed_s = startup_s or time.monotonic() - begun
            if damaged := next((rank for rank in ranks if rank.damage), None):
                return Watched(JobState.FAILED, root_cause.damaged_journal(damaged), elapsed_s)
            if code == 0:
                return Watched(JobState.COMPLETED, None, elapsed_s)
            if code is not None:
                cause = root_cause.job_ended(self.job, ranks, code, self.folder, running.exit_reason())
                return Watched(JobState.FAILED, cause, elapsed_s)
            if waiting := running.waiting():
                if waiting.reason:
                    self.listener.current_check(f"waiting: {waiting.reason}")
                if waiting.hopeless:
                    return Watched(JobState.TIMEOUT, RootCause("the queue", waiting.reason, None), elapsed_s)
                begun = time.monotonic()  # the limits count from when it runs
            elif stuck := self._stuck(begun):
                return Watched(stuck[0], stuck[1], elapsed_s)
            _rest(ranks)

    def _read_all(self) -> None:
        for measurement in (measured for rank in self.ranks for measured in rank.read()):
            # one rank's view of a failure of all ranks together is reported once, with its cause, by settle
            if not (measurement.error is not None and self.checks[measurement.check].scope is Scope.CLUSTER):
                self.listener.measured(measurement)
        if self.ranks[0].pulse:
            self.listener.current_check(self.ranks[0].last_status)

    def _stuck(self, begun: float) -> tuple[JobState, RootCause] | None:
        now, ranks, limits = time.monotonic(), self.ranks, self.limits
        patience = limits.heartbeat_timeout_s + (_LEAVING_S if any(rank.is_exiting for rank in ranks) else 0)
        silent = [rank for rank in ranks if rank.seen is not None and now - rank.seen > patience and rank.is_working]
        if silent:
            _try_to_write(self.folder)
            # the first to fall silent: the others may have ended because of it
            first = min(silent, key=lambda rank: (rank.failed, rank.seen))
            return JobState.HUNG, root_cause.no_heartbeat(first, now - (first.seen or now))
        # once nobody was to be seen for a while, from when somebody was again
        if all(rank.seen and now - max(rank.seen, begun) > patience and not rank.is_working for rank in ranks):
            cause = f"all ranks ended {limits.heartbeat_timeout_s:g} s ago or more, and what started them has not"
            return JobState.HUNG, RootCause("launcher", cause, None)
        if late := self._over_limit(now):
            return JobState.TIMEOUT, late
        if now - begun > limits.startup_s and not all(rank.started for rank in ranks):
            return JobState.TIMEOUT, root_cause.never_started(ranks, limits.startup_s, self.folder)
        if now - begun > self.job.limit_s:
            progress = [(rank.done, len(rank.measured), len(rank.started)) for rank in ranks]
            least_advanced = [rank for rank, steps in zip(ranks, progress, strict=True) if steps == min(progress)]
            return JobState.TIMEOUT, root_cause.over_limit(least_advanced, "the job", self.job.limit_s)
        return None

    def _over_limit(self, now: float) -> RootCause | None:
        """The first check, in the order of the job, that has taken some ranks too long.

        A check of all ranks together begins when the last has started it: to wait for a peer is no fault.
        """
        for name in self.job.checks:
            begun = [rank.started.get(name, now) for rank in self.ranks]
            together = self.checks[name].scope is Scope.CLUSTER
            since = {rank.number: max(begun) if together else begun[rank.number] for rank in self.ranks}
            limit_s = self.job.limits[name]
            late = [rank for rank in self.ranks if rank.current == name and now - since[rank.number] > limit_s]
            if late:
                return root_cause.over_limit(late, name, limit_s)
        return None

    def settle(self, state: JobState, cause: RootCause | None) -> Job:
        """Record an ERROR for what the attempt left unfinished; return the job with what is still to be run."""
        job = self.job
        begun = [name for name in job.checks if any(name in rank.started for rank in self.ranks)]
        left = [name for name in job.checks if name not in begun]
        if left and (state is JobState.COMPLETED or not begun):
            begun, left = list(job.checks), []  # nobody got as far as a check: another attempt would end the same way
        text = f"{cause.culprit}: {cause.cause}" if cause else "its worker ended normally without measuring it"
        lost = [measurement for name in begun for measurement in self._lost(name, text, cause)]
        if cause and not lost and begun:  # it broke between two checks, or while closing: never pass over that
            lost = [Measurement(check=begun[-1], subject=CLUSTER, error=f"right after it, {text}", started=time.time())]
        for measurement in lost:
            self.listener.measured(measurement)
        # not on the same nodes at any price: one of them may be what broke
        return job.model_copy(update={"checks": tuple(left), "nodelist": ""})

    def _lost(self, name: str, text: str, cause: RootCause | None) -> list[Measurement]:
        """Measurements that say what is missing: one for ranks that work together, one a rank otherwise."""
        now, ranks = time.time(), self.ranks
        if self.checks[name].scope is Scope.CLUSTER:
            if all(name in rank.measured and rank.measured[name].finished for rank in ranks):
                return []
            where = ranks[cause.rank].subject if cause and cause.rank is not None else ""
            return [Measurement(check=name, subject=where or CLUSTER, error=text, started=now)]
        return [
            Measurement(check=name, subject=rank.subject or rank.name, rank=rank.number, error=text, started=now)
            for rank in ranks
            if name not in rank.measured
        ]


def _rest(ranks: list[Rank]) -> None:
    """Until the next look. Where that takes far longer we were stopped, and so may the ranks have been: no silence."""
    clock = time.monotonic()
    time.sleep(_LOOK_EVERY_S)
    stopped_s = time.monotonic() - clock - _LOOK_EVERY_S
    for rank in ranks:
        if rank.seen is not None and stopped_s > _STOPPED_S:
            rank.seen += stopped_s


def _try_to_write(folder: Path) -> None:
    """Raises OSError where the disk is full: then no pulse can be written either, and silence is no sign of a fault."""
    trial = folder / "writable"
    try:
        trial.write_bytes(bytes(4096))
    finally:
        trial.unlink(missing_ok=True)
