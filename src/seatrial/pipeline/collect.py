"""Results of a running trial; each measurement is on disk before it counts. Nothing here judges."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from seatrial.config.schema import Config
from seatrial.model import Job, JobResult, Measurement, Outcome, Session, Timing
from seatrial.pipeline.run_directory import RunDir
from seatrial.util.secrets import redacted, secret_values


class Show(Protocol):
    """Live output of a trial."""

    def job_started(self, job: Job, attempt: int) -> None: ...

    def current_check(self, text: str) -> None: ...

    def planned(self, jobs: tuple[Job, ...], run_dir: Path) -> None: ...

    def retry_started(self, job: Job, reasons: Mapping[str, str]) -> None: ...

    def judged(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass
class Collected:
    """Results of the trial so far; the Listener of its jobs. Each measurement is on disk before it counts.

    ``on_complete`` is called with the name of a check when all ranks have measured it or one has an error.
    """

    run_dir: RunDir
    settings: Config
    show: Show
    on_complete: Callable[[Collected, str], None] = lambda _collected, _check: None
    measurements: list[Measurement] = field(default_factory=list)
    retries: list[Measurement] = field(default_factory=list)  # second measurements of checks below a threshold
    results: list[JobResult] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)  # earlier sessions
    timings: list[Timing] = field(default_factory=list)
    stop_reason: str = ""
    jobs: list[Job] = field(default_factory=list)  # in the order of their start
    _counts: Counter[tuple[str, bool]] = field(default_factory=Counter)  # measurements by check and retry

    def __post_init__(self) -> None:
        self._secret_values = secret_values(self.settings.model_dump())

    def job_started(self, job: Job, attempt: int) -> None:
        self.jobs.append(job)
        self.show.job_started(job, attempt)

    def current_check(self, text: str) -> None:
        self.show.current_check(text)

    def measured(self, measurement: Measurement) -> None:
        if self.jobs and self.jobs[-1].retry:  # the launcher's error measurements do not have the flag
            measurement = measurement.model_copy(update={"retry": True})
        if measurement.error:
            measurement = measurement.model_copy(update={"error": redacted(measurement.error, self._secret_values)})
        self.run_dir.save(measurement)
        (self.retries if measurement.retry else self.measurements).append(measurement)
        self._counts[measurement.check, measurement.retry] += 1  # a search in all measurements would be quadratic
        process_count = next((job.process_count for job in self.jobs if measurement.check in job.checks), 1)
        if measurement.error or self._counts[measurement.check, measurement.retry] == process_count:
            self.on_complete(self, measurement.check)

    def finished(self, result: JobResult) -> None:
        result = result.model_copy(update={"cause": redacted(result.cause, self._secret_values)})
        self.run_dir.save_result(result)
        self.results.append(result)

    def sort(self) -> None:
        """Sort the measurements of each check by rank, since the order of arrival varies between runs."""
        checks = list(dict.fromkeys(measurement.check for measurement in (*self.measurements, *self.retries)))
        for measurements in (self.measurements, self.retries):
            measurements.sort(key=lambda measurement: (checks.index(measurement.check), measurement.rank or 0))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the time inside the context as overhead."""
        clock = time.monotonic()
        yield
        self.timings.append(Timing(name=name, kind="overhead", seconds=time.monotonic() - clock))
