"""Runs one job until it completes, crashes, hangs or exceeds its time limit.

After a crash, checks that had not started run in a new attempt. The check that was running is not repeated, since it
may have caused the crash.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from seatrial.checks.check import Check
from seatrial.config.schema import Limits
from seatrial.launch import hang, root_cause
from seatrial.launch.base import Allocation, JobRefused, Launcher, StartedJob, WaitState
from seatrial.launch.rank_status import Rank, read_ranks
from seatrial.launch.root_cause import RootCause
from seatrial.launch.submission import start_job
from seatrial.model import CLUSTER, Job, JobResult, JobState, Measurement, Scope, SeatrialError
from seatrial.util import signals
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE, redacted, secret_values
from seatrial.util.text import and_more

_POLL_S = 0.1
_SUSPENDED_S = 1.0  # if a sleep takes this much longer than requested, this process was stopped (Ctrl-Z)
# After a failure torchrun gives the other ranks 30 s to end, and Slurm gives processes another 30 s (KillWait)
_TEARDOWN_S = 60.0
_MAX_NAMED = 8  # nodes listed in a message


class JobDisplay(Protocol):
    """Shows the events of a running job. ``show_waiting`` gets what the job waits for, and since how many seconds."""

    def job_started(self, job: Job, attempt: int) -> None: ...

    def show_status(self, text: str) -> None: ...

    def show_waiting(self, state: str, seconds: float) -> None: ...

    def warn(self, text: str) -> None: ...


class Listener(JobDisplay, Protocol):
    """Receives the events of a running job. ``add_measurement`` is called once per measurement and must store it."""

    def add_measurement(self, measurement: Measurement) -> None: ...


@dataclass(frozen=True)
class AttemptEnd:
    """The end of one attempt at a job.

    ``startup_s``: seconds until all ranks had started a check, else until the end; pending time does not count. 0 if
    the job did not start or was interrupted. ``interrupted``: Ctrl-C or SIGTERM arrived, before or after the end of the
    job.
    """

    state: JobState
    root_cause: RootCause | None
    startup_s: float
    allocation: Allocation = field(default_factory=Allocation)
    interrupted: bool = False


def run_job(
    launcher: Launcher,
    job: Job,
    run_dir: Path,
    limits: Limits,
    checks: Mapping[str, Check],
    listener: Listener,
    min_nodes: int | None = None,
) -> Iterator[JobResult]:
    """Run ``job``; yield the result of each attempt.

    ``listener`` gets a measurement or an error of each check. Exceptions: it gets none if the preflight of a node fails
    (JobState.REFUSED) or if the job was not started (REJECTED); these are last results, except of a job that goes on
    with fewer nodes. After an interrupt unfinished checks may be missing. ``min_nodes``: if nodes are missing and
    at least this many are left, the remaining checks run on those; None: never on fewer nodes. After Ctrl-C or SIGTERM
    the result of the attempt is yielded, then KeyboardInterrupt is raised.
    """
    while job.checks:
        number = 1 + sum(1 for path in (run_dir / "jobs" / job.name).glob("attempt*"))
        folder = run_dir / "jobs" / job.name / f"attempt{number}"
        folder.mkdir(parents=True)
        attempt = _Attempt(job, folder, read_ranks(folder, job), limits, checks, listener)
        end, result = attempt.run(launcher, run_dir, number)
        smaller_job = _on_fewer_nodes(job, end.root_cause, min_nodes)
        refused = result.refused and smaller_job is None
        if not refused and (end.root_cause or not end.interrupted):
            job = attempt.remaining_job(end, smaller_job)
        yield result
        if end.interrupted:
            raise KeyboardInterrupt
        if refused:
            return


def _on_fewer_nodes(job: Job, cause: RootCause | None, min_nodes: int | None) -> Job | None:
    """Return ``job`` for the remaining nodes; None if no node is missing, or too few remain.

    None also for a retry, which runs on as many nodes as the first measurement or not at all.
    """
    shortage = cause.shortage if cause else None
    if shortage is None or min_nodes is None or shortage.usable < min_nodes or job.retry:
        return None
    return job.on_fewer_nodes(shortage.usable)


@dataclass
class _Attempt:
    """One attempt at ``job``; the files of its ``ranks`` are in ``folder``."""

    job: Job
    folder: Path
    ranks: list[Rank]
    limits: Limits
    checks: Mapping[str, Check]
    listener: Listener

    def run(self, launcher: Launcher, run_dir: Path, number: int) -> tuple[AttemptEnd, JobResult]:
        job = self.job
        atomic_write(self.folder.parent / "job.json", job.model_dump_json(indent=2).encode(), mode=PRIVATE)
        rendered = launcher.render(job, run_dir, number)
        shown = redacted(launcher.render(job.without_secrets(), run_dir, number).text, secret_values())
        (self.folder / "command.sh").write_text(shown + "\n", encoding="utf-8", errors="surrogateescape")
        started, started_monotonic = time.time(), time.monotonic()
        self.listener.job_started(job, number)
        try:
            running = start_job(launcher, rendered, self.folder, self.listener.warn)
        except SeatrialError as error:
            end = self._rejected_end(error)
        else:
            end = self._watch_and_stop(running)
        cause = end.root_cause or RootCause("", "", None)
        result = JobResult(
            job=job.name,
            attempt=number,
            launcher=launcher.name,
            state=JobState.REFUSED if cause.preflight else end.state,
            started=started,
            seconds=time.monotonic() - started_monotonic,
            startup_s=end.startup_s,
            failed_subject=cause.subject,
            cause=cause.cause,
            scheduler_id=end.allocation.id,
            nodelist=end.allocation.nodes,
            images=end.allocation.images,
            missing_nodes=cause.missing_nodes,
            failures=cause.failures or (end.allocation.failures if end.root_cause else ()),
        )
        return end, result

    def _rejected_end(self, error: SeatrialError) -> AttemptEnd:
        """Return the end of a job that was not started; ``seatrial explain`` finds the error in launcher.err."""
        if cause := root_cause.node_error(self.job, self.folder):
            return AttemptEnd(JobState.REFUSED, cause, 0.0)
        excluded = f"submitted without {self.job.exclude}, lost in an earlier job: " if self.job.exclude else ""
        with (self.folder / "launcher.err").open("a", encoding="utf-8") as log:
            log.write(f"{redacted(str(error), secret_values())}\n")
        failures = error.failures if isinstance(error, JobRefused) else ()
        return AttemptEnd(JobState.REJECTED, RootCause(CLUSTER, f"{excluded}{error}", None, failures=failures), 0.0)

    def _watch_and_stop(self, running: StartedJob) -> AttemptEnd:
        try:
            try:
                end = self._with_stacks(self._watch(running), running)
            except KeyboardInterrupt:
                end = self._interrupted_end(running)  # before cancel(), which makes ranks fail
        except BaseException:
            running.cancel()
            raise
        node_lost = self._has_lost_nodes(end.root_cause)
        if node_lost and end.root_cause:  # named now, since the cancellation may take long
            self.listener.warn(f"{end.root_cause.subject}: {end.root_cause.cause}")
        try:
            remaining = running.cancel(node_lost=node_lost)
        except KeyboardInterrupt:  # at most once: util.signals ignores later signals, so that the second cancel() ends
            end = replace(end, interrupted=True)
            remaining = running.cancel(node_lost=node_lost)
        if end.interrupted:
            # cancel() may have fetched more records; their errors may be effects of the cancellation
            for measurement in self._new_measurements():
                if not measurement.error:
                    self.listener.add_measurement(measurement)
        end = replace(end, allocation=running.allocation())
        if node_lost and end.root_cause:
            end = replace(end, root_cause=self._cause_after_cancel(running, end.root_cause, end.state))
        if not remaining:
            return end
        self.listener.warn(remaining)
        # a process that survives SIGKILL is a fault of the machine, even if all checks were measured
        cause = end.root_cause or RootCause("launcher", "processes of the job remain after its end", None)
        state = JobState.HUNG if end.state is JobState.COMPLETED else end.state
        return replace(end, state=state, root_cause=replace(cause, cause=f"{cause.cause}; {remaining}"))

    def _with_stacks(self, end: AttemptEnd, running: StartedJob) -> AttemptEnd:
        """Add the stacks of the ranks to the cause of a hang, unless nodes are lost: a command on them would not end.

        If the cause is a shortage of nodes, but all nodes answer a command, none is lost: then the cause is the rank
        that has been silent longest.
        """
        cause = end.root_cause
        hangs = end.state in (JobState.HUNG, JobState.TIMEOUT) and any(rank.heartbeat for rank in self.ranks)
        if cause is None or not hangs:
            return end
        if cause.shortage:
            silent_rank_cause = self._cause_of_longest_silence()
            if silent_rank_cause is None or not hang.all_nodes_answer(running, self.job.nodes, self.folder):
                return end
            cause = silent_rank_cause
        return replace(end, root_cause=hang.with_evidence(cause, running, self.ranks, self.folder))

    def _cause_of_longest_silence(self) -> RootCause | None:
        """Return the cause for the rank that should write heartbeats and is silent longest; None if there is none."""
        silent = [rank for rank in self.ranks if rank.heartbeat_expected and rank.last_seen is not None]
        if not silent:
            return None
        longest_silent = min(silent, key=lambda rank: rank.last_seen or 0)
        return root_cause.no_heartbeat(longest_silent, self.limits.heartbeat_timeout_s)

    def _interrupted_end(self, running: StartedJob) -> AttemptEnd:
        """Return the end of an interrupted attempt, with the root cause that was known before the interrupt."""
        self._read_all()
        code = running.completing_code()
        if code or self._silent_nodes(root_cause.SILENT_AT_END_S) or any(rank.exit_expected for rank in self.ranks):
            return AttemptEnd(JobState.FAILED, self._cause_of_end(running, code or 1), 0.0, interrupted=True)
        return AttemptEnd(JobState.CANCELLED, None, 0.0, interrupted=True)

    def _has_lost_nodes(self, cause: RootCause | None) -> bool:
        """Return whether the job had the nodes of ``cause.shortage`` and lost them."""
        return bool(cause and cause.shortage) and any(rank.heartbeat for rank in self.ranks)

    def _cause_after_cancel(self, running: StartedJob, cause: RootCause, state: JobState) -> RootCause:
        """Return the cause of an end for which nodes seemed lost, after the cancellation of the job.

        If the scheduler shows these nodes as up and without processes of the job, they were not lost. Then the cause of
        a hang is the rank that was silent longest, if its files can be read; any other end keeps ``cause``, without its
        shortage of nodes.
        """
        if not all(running.node_is_free(node.name) for node in cause.missing_nodes):
            return cause
        is_visible = state is JobState.HUNG and not running.unreadable_nodes
        silent_rank_cause = self._cause_of_longest_silence() if is_visible else None
        return silent_rank_cause or replace(cause, shortage=None)

    def _cause_of_end(self, running: StartedJob, code: int) -> RootCause:
        return root_cause.job_ended(
            self.job,
            self.ranks,
            code,
            self.folder,
            scheduler_reason=running.exit_reason(),
            node_state=running.node_state,
            show_node_command=running.show_node_command,
        )

    def _lost_nodes(self, silent: Mapping[str, float], running: StartedJob) -> RootCause:
        return root_cause.lost_nodes(self.job, silent, running.node_state, running.show_node_command)

    def _silent_nodes(self, silent_s: float) -> Mapping[str, float]:
        return root_cause.silent_nodes(self.ranks, self.job, self.folder, silent_s)

    def _watch(self, running: StartedJob) -> AttemptEnd:
        running_since = time.monotonic()
        startup_s = 0.0
        while True:
            signals.raise_lost_interrupt()
            code = running.poll()  # before reading: records written before the end are then complete
            self._read_all()
            if not startup_s and all(rank.started for rank in self.ranks):
                startup_s = time.monotonic() - running_since
            startup_or_run_s = startup_s or time.monotonic() - running_since
            end = self._find_end(running, code)
            if not end and (waiting := running.wait_state()):
                end = self._wait(running, waiting)
                running_since = time.monotonic()  # pending time does not count
            elif not end:
                end = self._timeout(running_since, running.unreadable_nodes)
                self.listener.show_status(self.ranks[0].last_status if self.ranks[0].heartbeat else "starting")
            if end:
                state, cause = end
                return AttemptEnd(state, cause, startup_or_run_s)
            _sleep(self.ranks)

    def _find_end(self, running: StartedJob, code: int | None) -> tuple[JobState, RootCause | None] | None:
        """Return the state and cause if the job has ended, lost a node or has a damaged journal; else None."""
        if damaged := next((rank for rank in self.ranks if rank.damage), None):
            cause = f"invalid record in its journal {damaged.journal.path}: {damaged.damage[:200]}"
            return JobState.FAILED, RootCause(damaged.name, cause, damaged.number)
        if code is not None:
            return (JobState.FAILED, self._cause_of_end(running, code)) if code else (JobState.COMPLETED, None)
        # even if the scheduler still waits for the lost node
        if silent := self._silent_nodes(self.limits.heartbeat_timeout_s):
            _check_writable(self.folder)
            return JobState.HUNG, self._lost_nodes(silent, running)
        return None

    def _wait(self, running: StartedJob, waiting: WaitState) -> tuple[JobState, RootCause] | None:
        """Show the reason why the job waits; return the state and cause if waiting longer does not help."""
        if waiting.permanent:
            state = JobState.REJECTED if waiting.pending else JobState.FAILED
            return state, self._cause_of_wait(running, waiting)
        if waiting.reason:
            self.listener.show_waiting(waiting.reason, waiting.seconds)
        return None

    def _cause_of_wait(self, running: StartedJob, waiting: WaitState) -> RootCause:
        """Return why waiting does not help: nodes are missing, or were lost before the job was requeued."""
        if silent := self._silent_nodes(root_cause.SILENT_AT_END_S):
            lost = self._lost_nodes(silent, running)
            return replace(lost, cause=f"{waiting.reason}; {lost.cause}")
        names = [node.name for node in waiting.shortage.missing] if waiting.shortage else []
        names = names or list(dict.fromkeys(node for each in waiting.failures for node in each.nodes))
        subject = and_more(names, _MAX_NAMED) or CLUSTER
        return RootCause(subject, waiting.reason, None, waiting.shortage, failures=waiting.failures)

    def _read_all(self) -> None:
        for measurement in self._new_measurements():
            # a failed CLUSTER check is reported once, with its root cause, by remaining_job
            if measurement.error is None or self.checks[measurement.check].scope is not Scope.CLUSTER:
                self.listener.add_measurement(measurement)

    def _new_measurements(self) -> Iterator[Measurement]:
        """Read the new records of one rank after the other; yield their measurements."""
        for rank in self.ranks:
            yield from rank.read()

    def _timeout(self, running_since: float, unreadable_nodes: Collection[int]) -> tuple[JobState, RootCause] | None:
        """Return the state and cause if a heartbeat has stopped, the job outlives its ranks, or a limit is exceeded.

        Else None. The start of ranks on ``unreadable_nodes`` cannot be seen, and has no limit.
        """
        now, ranks, limits = time.monotonic(), self.ranks, self.limits
        timeout_s = limits.heartbeat_timeout_s + (_TEARDOWN_S if any(rank.exit_expected for rank in ranks) else 0)
        silent = [
            rank
            for rank in ranks
            if rank.heartbeat_expected and rank.last_seen is not None and now - rank.last_seen > timeout_s
        ]
        if silent:
            _check_writable(self.folder)
            # Ranks without an error come first, since failed ranks are in their teardown. Then the rank that is silent
            # longest: the others may have ended because of it
            at_fault = min(silent, key=lambda rank: (rank.failed, rank.last_seen))
            return JobState.HUNG, root_cause.no_heartbeat(at_fault, now - (at_fault.last_seen or now))
        if all(
            not rank.heartbeat_expected and rank.last_seen and now - max(rank.last_seen, running_since) > timeout_s
            for rank in ranks
        ):
            cause = f"all ranks ended at least {limits.heartbeat_timeout_s:g} s ago, but the job still runs"
            return JobState.HUNG, RootCause("launcher", cause, None)
        if late := self._over_limit(now):
            return JobState.TIMEOUT, late
        visible = [rank for rank in ranks if rank.number // self.job.ranks_per_node not in unreadable_nodes]
        if now - running_since > limits.startup_s and not all(rank.started for rank in visible):
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

    def remaining_job(self, end: AttemptEnd, smaller_job: Job | None) -> Job:
        """Record the errors of this attempt; return the job with the checks that have not started.

        Each started check without a measurement gets an error. If a new attempt would end the same way, the checks that
        have not started get an error too, and the returned job has no checks.
        ``smaller_job``: the job for the available nodes, if nodes were lost or missing.
        """
        job, state, cause = smaller_job or self.job, end.state, end.root_cause
        started = [name for name in job.checks if any(name in rank.started for rank in self.ranks)]
        remaining = [name for name in job.checks if name not in started]
        would_end_the_same = state is JobState.COMPLETED or (not started and not smaller_job)
        if remaining and would_end_the_same:  # report them as if they had started
            started, remaining = list(job.checks), []
        error = f"{cause.subject}: {cause.cause}" if cause else ""
        errors: list[Measurement] = []
        for name in started:
            errors += self._error_measurements(name, error or self._not_measured(name), cause)
        if cause and not errors and started:  # the job failed between checks or in teardown: report that too
            error = f"after this check, {error}"
            errors = [Measurement(check=started[-1], subject=CLUSTER, error=error, started=time.time())]
        for measurement in errors:
            self.listener.add_measurement(measurement)
        lost_nodes: list[str] = []
        if cause and (cause.preflight or self._has_lost_nodes(cause)):
            lost_nodes = [node.name for node in cause.missing_nodes]
        exclude = ",".join(filter(None, [job.exclude, *lost_nodes]))
        # without a node list, so that the scheduler can choose other nodes: a node of this attempt may be at fault
        return job.model_copy(update={"checks": tuple(remaining), "nodelist": "", "exclude": exclude})

    def _not_measured(self, name: str) -> str:
        """Return the error of a check that ranks did not measure before they exited with code 0."""
        journals = [str(rank.journal.path) for rank in self.ranks if name not in rank.measured]
        error = "the worker exited with code 0 without measuring this check"
        return f"{error}: no complete record of it in {and_more(journals, _MAX_NAMED)}" if journals else error

    def _error_measurements(self, name: str, error: str, cause: RootCause | None) -> list[Measurement]:
        """Return the ERROR measurements of a check: one per rank without a measurement, or one for a CLUSTER check."""
        now, ranks = time.time(), self.ranks
        if self.checks[name].scope is Scope.CLUSTER:
            if all(name in rank.measured and rank.measured[name].finished for rank in ranks):
                return []
            subject = ranks[cause.rank].subject if cause and cause.rank is not None else ""
            files = hang.stack_artifacts(self.folder, [rank.number for rank in ranks])
            return [Measurement(check=name, subject=subject or CLUSTER, error=error, artifacts=files, started=now)]
        return [
            Measurement(
                check=name,
                subject=rank.subject or rank.name,
                rank=rank.number,
                error=error,
                artifacts=hang.stack_artifacts(self.folder, [rank.number]),
                started=now,
            )
            for rank in ranks
            if name not in rank.measured
        ]


def _sleep(ranks: list[Rank]) -> None:
    """Sleep until the next poll. Time in which this process was stopped does not count as silence of a rank."""
    clock = time.monotonic()
    time.sleep(_POLL_S)
    stopped_s = time.monotonic() - clock - _POLL_S
    for rank in ranks:
        if rank.last_seen is not None and stopped_s > _SUSPENDED_S:
            rank.last_seen += stopped_s


def _check_writable(folder: Path) -> None:
    """Raise OSError if the disk is full: then missing heartbeats are no fault of a rank, which cannot write them."""
    probe = folder / "writable"
    try:
        probe.write_bytes(bytes(4096))
    finally:
        probe.unlink(missing_ok=True)
