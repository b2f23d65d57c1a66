"""Objects that several pipeline tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.model import Job, Machine, Outcome
from seatrial.pipeline.results import TrialResults
from seatrial.pipeline.run_directory import Request, RunDir

JOB = Job(
    name="ranks",
    placement="ranks",
    device="cpu",
    nodes=1,
    ranks_per_node=2,
    checks=("train.cnn",),
    options={},
    expected_gpus=None,
    limit_s=1,
)
HERE = Machine(host="h", gpus=("GPU-1", "GPU-2"))


class SilentDisplay:
    """Shows nothing; records notes, warnings and retry reasons."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.retry_reasons: dict[str, str] = {}

    def job_started(self, job: Job, attempt: int) -> None: ...

    def show_status(self, text: str) -> None: ...

    def show_waiting(self, state: str, seconds: float) -> None: ...

    def show_plan(
        self,
        jobs: tuple[Job, ...],
        run_dir: Path,
        excluded_checks: Mapping[str, str],
        not_run: Sequence[str],
        *,
        as_root: bool,
    ) -> None: ...

    def show_note(self, text: str) -> None:
        self.notes.append(text)

    def retry_started(self, job: Job, reasons: Mapping[str, str]) -> None:
        self.retry_reasons = {job.name: reasons[job.checks[0]]}

    def show_not_run(self, checks: Sequence[str], reason: str) -> None: ...

    def show_outcome(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def request(**cluster: int) -> Request:
    """Return the request of host.inventory, by default CPU-only."""
    config = Config(
        name="t", cluster=Cluster(**{"gpus_per_node": 0, **cluster}), checks={"host.inventory": CheckSettings()}
    )
    return Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)


def results(run_dir: RunDir) -> TrialResults:
    return TrialResults(run_dir, run_dir.request.config, SilentDisplay())
