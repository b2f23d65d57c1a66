"""What a running trial has gathered: each measurement is on disk before it counts. Nothing here judges."""

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


class Show(Protocol):
    """What a person sees while a trial runs."""

    def job_started(self, job: Job, attempt: int) -> None: ...

    def current_check(self, words: str) -> None: ...

    def planned(self, jobs: tuple[Job, ...], run_dir: Path) -> None: ...

    def retry_started(self, job: Job, reasons: Mapping[str, str]) -> None: ...

    def judged(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass
class Collected:
    """What has been measured so far. A launcher reports to it: each measurement is on disk before it counts.

    ``complete`` is called with a check that every place has measured, or that has an error: the pipeline judges it.
    """

    run_dir: RunDir
    settings: Config
    show: Show
    complete: Callable[[Collected, str], None] = lambda _collected, _check: None
    measurements: list[Measurement] = field(default_factory=list)
    repeats: list[Measurement] = field(default_factory=list)  # the second of what fell short
    results: list[JobResult] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)  # earlier ones
    timings: list[Timing] = field(default_factory=list)
    stopped: str = ""
    jobs: list[Job] = field(default_factory=list)  # that were started, in this order
    _seen: Counter[tuple[str, bool]] = field(default_factory=Counter)  # measurements by check, and whether again

    def job_started(self, job: Job, attempt: int) -> None:
        self.jobs.append(job)
        self.show.job_started(job, attempt)

    def current_check(self, words: str) -> None:
        self.show.current_check(words)

    def measured(self, measurement: Measurement) -> None:
        if self.jobs and self.jobs[-1].retry:  # a launcher that tells of an error does not say so
            measurement = measurement.model_copy(update={"retry": True})
        self.run_dir.save(measurement)
        kept = self.repeats if measurement.retry else self.measurements
        kept.append(measurement)
        self._seen[measurement.check, measurement.retry] += 1  # of a large cluster, not to be looked for among all
        places = next((job.process_count for job in self.jobs if measurement.check in job.checks), 1)
        if measurement.error or self._seen[measurement.check, measurement.retry] == places:
            self.complete(self, measurement.check)

    def finished(self, result: JobResult) -> None:
        self.run_dir.save_result(result)
        self.results.append(result)

    def sort(self) -> None:
        """Of a check its ranks by number: in what order their files were read is chance, and no matter of a record."""
        checks = list(dict.fromkeys(one.check for one in (*self.measurements, *self.repeats)))
        for kept in (self.measurements, self.repeats):
            kept.sort(key=lambda one: (checks.index(one.check), one.rank or 0))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count what happens inside as seatrial's own time."""
        clock = time.monotonic()
        yield
        self.timings.append(Timing(name=name, kind="overhead", seconds=time.monotonic() - clock))
