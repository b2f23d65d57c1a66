"""Results of a running trial. Each measurement is written to disk before it is added."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.launch.watch import JobDisplay
from seatrial.model import JOB_FAILURES, Job, JobFailure, JobResult, Measurement, MissingNode, Outcome, Timing
from seatrial.model.trial import NEW_RUN
from seatrial.pipeline.plan import LOCALIZATION_JOB
from seatrial.pipeline.run_directory import RunDir, SavedRun
from seatrial.util.grouping import grouped
from seatrial.util.secrets import redacted, secret_values


class Display(JobDisplay, Protocol):
    """Live output of a trial for the user."""

    def show_plan(
        self,
        jobs: tuple[Job, ...],
        run_dir: Path,
        excluded_checks: Mapping[str, str],
        not_run: Sequence[str],
        *,
        as_root: bool,
    ) -> None: ...

    def show_note(self, text: str) -> None: ...

    def retry_started(self, job: Job, reasons: Mapping[str, str]) -> None: ...

    def show_outcome(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None: ...

    def show_not_run(self, checks: Sequence[str], outcome: Outcome, reason: str) -> None: ...


class JobNotStarted(Exception):
    """No check of a job was started: its nodes or the scheduler refused it; the message has the reason."""


class GpuExchanged(JobNotStarted):
    """A resumed run found another GPU than an earlier session measured; the message names node, index and UUIDs."""


@dataclass
class TrialResults(SavedRun):
    """Results of the trial so far. This object is also the Listener (launch/watch.py) of the trial's jobs.

    ``sessions``: earlier ones; each `run --resume` adds a session.
    ``on_complete`` is called with the results and the name of a check when all ranks have measured the check, and after
    each of its ERRORs.
    """

    run_dir: RunDir
    settings: Config
    display: Display
    on_complete: Callable[[TrialResults, str], None] = lambda _results, _check: None
    localization: list[Measurement] = field(default_factory=list)  # search for slow nodes after the trial's checks
    timings: list[Timing] = field(default_factory=list)
    stop_reason: str = ""
    missing_nodes: dict[str, MissingNode] = field(default_factory=dict)  # key: name of the node
    lost_nodes: list[str] = field(default_factory=list)  # the missing nodes that a job lost while it ran
    preflight_passed: bool = False  # a job of this session has passed it; the next jobs run on the same nodes
    jobs: list[Job] = field(default_factory=list)  # started attempts, in the order of their start
    gpus: dict[str, Measurement] = field(default_factory=dict)  # subject → its first measurement in earlier sessions
    # (check, number of the retry) → number of measurements: counting in the lists each time would be quadratic
    _counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        checks = (catalog().get(name) for name in self.settings.checks)
        metrics = {metric for check in checks if check for metric in check.units}
        self.secrets = secret_values(self.settings.model_dump(), vocabulary=metrics)

    def job_started(self, job: Job, attempt: int) -> None:
        self.jobs.append(job)
        self.display.job_started(job, attempt)

    def show_status(self, text: str) -> None:
        self.display.show_status(text)

    def show_waiting(self, state: str, seconds: float) -> None:
        self.display.show_waiting(redacted(state, self.secrets), seconds)

    def warn(self, text: str) -> None:
        self.display.warn(redacted(text, self.secrets))

    def add_not_run(self, measurements: Iterable[Measurement]) -> None:
        """Add the ERROR or SKIP of checks that no job can run; show those with the same reason together."""
        checks = grouped(((each.error, each.skipped), each.check) for each in map(self._store, measurements))
        for (error, skipped), names in checks.items():
            self.display.show_not_run(names, Outcome.ERROR if error else Outcome.SKIP, error or skipped or "")

    def add_measurement(self, measurement: Measurement) -> None:
        measurement = self._store(measurement)
        if measurement.check not in self.settings.checks:
            return
        self._counts[measurement.check, measurement.retry] += 1
        jobs = reversed(self.jobs)  # after the loss of a node, a check runs in a smaller job
        process_count = next((job.process_count for job in jobs if measurement.check in job.checks), 1)
        if measurement.error or self._counts[measurement.check, measurement.retry] == process_count:
            self.on_complete(self, measurement.check)

    def _store(self, measurement: Measurement) -> Measurement:
        """Write the measurement to disk and add it to the results; return it with its retry and without secrets.

        Raises GpuExchanged if its GPU is not the one that an earlier session measured.
        """
        self.refuse_other_gpu(measurement)
        update: dict[str, object] = {"error": redacted(measurement.error, self.secrets)}
        if self.jobs and self.jobs[-1].retry:  # the ERROR measurements of run_job do not have the number of the retry
            update["retry"] = self.jobs[-1].retry
        if JOB_FAILURES in measurement.facts:
            failures = redacted(measurement.facts[JOB_FAILURES], self.secrets)
            update["facts"] = {**measurement.facts, JOB_FAILURES: failures}
        measurement = measurement.model_copy(update=update)
        self.run_dir.save(measurement)
        if measurement.check not in self.settings.checks:
            self.localization.append(measurement)
        else:
            (self.retries if measurement.retry else self.measurements).append(measurement)
        return measurement

    def discard(self, checks: Collection[str]) -> None:
        """Discard all measurements of these checks, and their retries, also in the journal of the run."""
        self.run_dir.discard_checks(checks)
        super().discard(checks)
        self.localization = [measurement for measurement in self.localization if measurement.check not in checks]

    def refuse_other_gpu(self, measurement: Measurement) -> None:
        """Raise GpuExchanged if the subject had another GPU in an earlier session: a record has one set of GPUs."""
        first = self.gpus.get(measurement.subject, measurement)
        if first.gpu_uuid != measurement.gpu_uuid:
            command = new_run_command(self.run_dir.request.command)
            raise GpuExchanged(
                f"{measurement.subject} is {measurement.gpu_uuid}, but was {first.gpu_uuid} when {first.check} was "
                f"measured in an earlier session. The GPU or the node was exchanged: {NEW_RUN}{command}"
            )

    def add_job_result(self, result: JobResult) -> JobResult:
        """Write the result of a job to disk and add it to the results; return it without secrets."""
        # messages of a scheduler can quote variables and arguments of the job
        failures = redacted([each.model_dump() for each in result.failures], self.secrets)
        result = result.model_copy(
            update={
                "cause": redacted(result.cause, self.secrets),
                "failures": tuple(JobFailure.model_validate(each) for each in failures),
            }
        )
        self.run_dir.save(result)
        self.job_results.append(result)
        if result.job == LOCALIZATION_JOB:  # a node lost in this job is not missing: the trial's checks measured it
            return result
        self.add_missing_nodes(result.missing_nodes)
        if result.nodelist:
            self.lost_nodes += [node.name for node in result.missing_nodes if node.name not in self.lost_nodes]
        return result

    def add_missing_nodes(self, nodes: Iterable[MissingNode]) -> None:
        """Add nodes of the trial that its jobs could not get, or lost; a node keeps its first reason."""
        self.missing_nodes = {node.name: node for node in nodes} | self.missing_nodes

    def sort(self) -> None:
        """Sort the measurements of each check by rank, since the order of arrival varies between runs."""
        checks = list(dict.fromkeys(measurement.check for measurement in (*self.measurements, *self.retries)))
        for measurements in (self.measurements, self.retries):
            measurements.sort(key=lambda measurement: (checks.index(measurement.check), measurement.rank or 0))
        self.localization.sort(key=lambda measurement: measurement.rank or 0)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the time inside the context as overhead."""
        start = time.monotonic()
        yield
        self.add_overhead(name, time.monotonic() - start)

    def add_overhead(self, name: str, seconds: float) -> None:
        self.timings.append(Timing(name=name, kind="overhead", seconds=seconds))


def new_run_command(command: Sequence[str]) -> str:
    """Return the command of a run with another --out, which must be an empty directory."""
    arguments = [f"{each}-2" if before == "--out" else each for before, each in pairwise(("", *command))]
    return shlex.join(f"{each}-2" if each.startswith("--out=") else each for each in arguments)
