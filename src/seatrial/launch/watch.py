"""Runs one job until it completes, crashes, hangs or exceeds its time limit.

After a crash, checks that had not started run in a new attempt. The check that was running does not, since it may have
caused the crash.
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
from seatrial.launch.base import Allocation, Launcher, StartedJob
from seatrial.launch.rank_status import Rank, ranks_in
from seatrial.launch.root_cause import RootCause
from seatrial.model import CLUSTER, Job, JobResult, JobState, Measurement, Scope, SeatrialError
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE, redacted

_POLL_S = 0.1
_SUSPENDED_S = 1.0  # a sleep longer by more than this: this process was stopped (Ctrl-Z)
# After a failure torchrun gives the other ranks 30 s to end, and Slurm gives processes another 30 s (KillWait)
_TEARDOWN_S = 60.0


class Listener(Protocol):
    """Receives the events of a running job. ``add_measurement`` is called once per measurement and must store it."""

    def job_started(self, job: Job, attempt: int) -> None: ...

    def show_status(self, text: str) -> None: ...

    def add_measurement(self, measurement: Measurement) -> None: ...


@dataclass(frozen=True)
class AttemptEnd:
    """The end of one attempt at a job.

    ``startup_s``: until all ranks had started a check, else until the end; without pending time.
    """

    state: JobState
    root_cause: RootCause | None
    startup_s: float
    allocation: Allocation = field(default_factory=Allocation)


def run_job(
    launcher: Launcher, job: Job, run_dir: Path, limits: Limits, checks: Mapping[str, Check], listener: Listener
) -> Iterator[JobResult]:
    """Run ``job``; yield the result of each attempt.

    Each check gets a measurement or an error, but no check of a job that a node refused (JobState.REFUSED) gets one.
    """
    while job.checks:
        number = 1 + sum(1 for path in (run_dir / "jobs" / job.name).glob("attempt*"))
        folder = run_dir / "jobs" / job.name / f"attempt{number}"
        folder.mkdir(parents=True)
        attempt = _Attempt(job, folder, ranks_in(folder, job), limits, checks, listener)
        result, cause = attempt.run(launcher, run_dir, number)
        if result.state is JobState.REFUSED:
            yield result
            return
        job = attempt.remaining_job(result.state, cause)
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
        atomic_write(self.folder.parent / "job.json", job.model_dump_json(indent=2).encode(), mode=PRIVATE)
        rendered = launcher.render(job, run_dir, number)
        shown = redacted(launcher.render(job.without_secrets(), run_dir, number).text)
        (self.folder / "command.sh").write_text(shown + "\n", encoding="utf-8", errors="surrogateescape")
        started, clock = time.time(), time.monotonic()
        self.listener.job_started(job, number)
        try:
            running = launcher.start(rendered, self.folder)
        except SeatrialError as refusal:
            refused = RootCause(f"launcher {launcher.name}", str(refusal), None)
            end = AttemptEnd(JobState.FAILED, root_cause.node_error(self.folder) or refused, 0.0)
        else:
            end = self._watch_and_stop(running)
        cause = end.root_cause
        result = JobResult(
            job=job.name,
            attempt=number,
            launcher=launcher.name,
            state=JobState.REFUSED if cause and cause.preflight else end.state,
            started=started,
            seconds=time.monotonic() - clock,
            startup_s=end.startup_s,
            failed_subject=cause.subject if cause else "",
            cause=cause.cause if cause else "",
            scheduler_id=end.allocation.id,
            nodelist=end.allocation.nodes,
        )
        return result, cause

    def _watch_and_stop(self, running: StartedJob) -> AttemptEnd:
        """Watch the job, then end its remaining processes."""
        remaining = ""
        try:
            try:
                end = self._watch(running)
            finally:
                if remaining := running.cancel():
                    self.listener.show_status(remaining)
        except KeyboardInterrupt:
            # measurements made before Ctrl-C and fetched by cancel(); errors may be effects of the cancellation
            for measurement in (measured for rank in self.ranks for measured in rank.read()):
                if not measurement.error:
                    self.listener.add_measurement(measurement)
            raise
        end = replace(end, allocation=running.allocation())
        if not remaining:
            return end
        # a process that survives SIGKILL is a fault of the machine, even if all checks were measured
        cause = end.root_cause or RootCause("launcher", "processes of the job remain after its end", None)
        state = JobState.HUNG if end.state is JobState.COMPLETED else end.state
        return replace(end, state=state, root_cause=replace(cause, cause=f"{cause.cause}; {remaining}"))

    def _watch(self, running: StartedJob) -> AttemptEnd:
        ranks = self.ranks
        running_since = time.monotonic()
        startup_s = 0.0
        while True:
            code = running.poll()  # before reading: records written before the end are then complete
            self._read_all()
            if not startup_s and all(rank.started for rank in ranks):
                startup_s = time.monotonic() - running_since
            startup_or_run_s = startup_s or time.monotonic() - running_since
            if damaged := next((rank for rank in ranks if rank.damage), None):
                return AttemptEnd(JobState.FAILED, root_cause.damaged_journal(damaged), startup_or_run_s)
            if code == 0:
                return AttemptEnd(JobState.COMPLETED, None, startup_or_run_s)
            if code is not None:
                cause = root_cause.job_ended(self.job, ranks, code, self.folder, running.exit_reason())
                return AttemptEnd(JobState.FAILED, cause, startup_or_run_s)
            if waiting := running.wait_state():
                if waiting.reason:
                    self.listener.show_status(f"waiting: {waiting.reason}")
                if waiting.permanent:
                    return AttemptEnd(JobState.TIMEOUT, RootCause("the queue", waiting.reason, None), startup_or_run_s)
                running_since = time.monotonic()  # pending time does not count
            elif timeout := self._timeout(running_since):
                return AttemptEnd(timeout[0], timeout[1], startup_or_run_s)
            _sleep(ranks)

    def _read_all(self) -> None:
        for measurement in (measured for rank in self.ranks for measured in rank.read()):
            # a failed CLUSTER check is reported once, with its root cause, by remaining_job
            if not (measurement.error is not None and self.checks[measurement.check].scope is Scope.CLUSTER):
                self.listener.add_measurement(measurement)
        if self.ranks[0].heartbeat:
            self.listener.show_status(self.ranks[0].last_status)

    def _timeout(self, running_since: float) -> tuple[JobState, RootCause] | None:
        """Return the state and cause if a heartbeat has stopped or a time limit is exceeded, else None."""
        now, ranks, limits = time.monotonic(), self.ranks, self.limits
        timeout_s = limits.heartbeat_timeout_s + (_TEARDOWN_S if any(rank.may_exit for rank in ranks) else 0)
        silent = [
            rank
            for rank in ranks
            if rank.heartbeat_expected and rank.last_seen is not None and now - rank.last_seen > timeout_s
        ]
        if silent:
            _check_writable(self.folder)
            # the first rank without a heartbeat: the others may have ended because of it
            first = min(silent, key=lambda rank: (rank.failed, rank.last_seen))
            return JobState.HUNG, root_cause.no_heartbeat(first, now - (first.last_seen or now))
        if all(
            not rank.heartbeat_expected and rank.last_seen and now - max(rank.last_seen, running_since) > timeout_s
            for rank in ranks
        ):
            cause = f"all ranks ended at least {limits.heartbeat_timeout_s:g} s ago, but torchrun or srun still runs"
            return JobState.HUNG, RootCause("launcher", cause, None)
        if late := self._over_limit(now):
            return JobState.TIMEOUT, late
        if now - running_since > limits.startup_s and not all(rank.started for rank in ranks):
            return JobState.TIMEOUT, root_cause.never_started(ranks, limits.startup_s, self.folder)
        if now - running_since > self.job.limit_s:
            progress = [(rank.done, len(rank.measured), len(rank.started)) for rank in ranks]
            least_advanced = [rank for rank, steps in zip(ranks, progress, strict=True) if steps == min(progress)]
            return JobState.TIMEOUT, root_cause.over_limit(least_advanced, "the job", self.job.limit_s)
        return None

    def _over_limit(self, now: float) -> RootCause | None:
        """Return the cause for the first check, in the order of the job, that exceeds its time limit on some ranks.

        A CLUSTER check is timed from the start of its last rank, so that waiting for a peer does not count.
        """
        for name in self.job.checks:
            started = [rank.started.get(name, now) for rank in self.ranks]
            if self.checks[name].scope is Scope.CLUSTER:
                started = [max(started)] * len(started)
            limit_s = self.job.limits[name]
            late = [rank for rank in self.ranks if rank.current_check == name and now - started[rank.number] > limit_s]
            if late:
                return root_cause.over_limit(late, name, limit_s)
        return None

    def remaining_job(self, state: JobState, cause: RootCause | None) -> Job:
        """Record an error for each started check without a measurement; return the job with the checks not started."""
        job = self.job
        started = [name for name in job.checks if any(name in rank.started for rank in self.ranks)]
        remaining = [name for name in job.checks if name not in started]
        if remaining and (state is JobState.COMPLETED or not started):
            started, remaining = list(job.checks), []  # no progress: another attempt would end the same way
        error = f"{cause.subject}: {cause.cause}" if cause else "the worker exited with code 0 without measuring it"
        missing = [measurement for name in started for measurement in self._missing(name, error, cause)]
        if cause and not missing and started:  # it failed between checks or in teardown: report that too
            error = f"after this check, {error}"
            missing = [Measurement(check=started[-1], subject=CLUSTER, error=error, started=time.time())]
        for measurement in missing:
            self.listener.add_measurement(measurement)
        # without a node list: one of the present nodes may be at fault
        return job.model_copy(update={"checks": tuple(remaining), "nodelist": ""})

    def _missing(self, name: str, error: str, cause: RootCause | None) -> list[Measurement]:
        """Return the errors for missing measurements of a check: one for a CLUSTER check, else one per rank."""
        now, ranks = time.time(), self.ranks
        if self.checks[name].scope is Scope.CLUSTER:
            if all(name in rank.measured and rank.measured[name].finished for rank in ranks):
                return []
            subject = ranks[cause.rank].subject if cause and cause.rank is not None else ""
            return [Measurement(check=name, subject=subject or CLUSTER, error=error, started=now)]
        return [
            Measurement(check=name, subject=rank.subject or rank.name, rank=rank.number, error=error, started=now)
            for rank in ranks
            if name not in rank.measured
        ]


def _sleep(ranks: list[Rank]) -> None:
    """Sleep until the next poll. Time in which this process was stopped does not count as missing heartbeats."""
    clock = time.monotonic()
    time.sleep(_POLL_S)
    stopped_s = time.monotonic() - clock - _POLL_S
    for rank in ranks:
        if rank.last_seen is not None and stopped_s > _SUSPENDED_S:
            rank.last_seen += stopped_s


def _check_writable(folder: Path) -> None:
    """Raise OSError if the disk is full: then the ranks cannot write heartbeats, and their absence is no fault."""
    probe = folder / "writable"
    try:
        probe.write_bytes(bytes(4096))
    finally:
        probe.unlink(missing_ok=True)
