"""Results of a running trial and the outcomes that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.config.schema import CheckSettings, Config
from seatrial.model import JOB_FAILURES, Job, JobFailure, JobResult, JobState, Measurement, Metric, Outcome, Threshold
from seatrial.pipeline.results import TrialResults
from seatrial.pipeline.run import show_completed_check
from seatrial.pipeline.run_directory import Request, RunDir
from tests.pipeline.fixtures import JOB, SilentDisplay, request


class RecordingDisplay(SilentDisplay):
    """Records the last outcome and the number of outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.reason, self.count = "", 0
        self.not_run: list[tuple[list[str], Outcome, str]] = []

    def show_outcome(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None:
        self.reason, self.count = reason, self.count + 1

    def show_not_run(self, checks: Sequence[str], outcome: Outcome, reason: str) -> None:
        self.not_run.append((list(checks), outcome, reason))


def test_checks_that_cannot_run_for_the_same_reason_are_shown_together(tmp_path: Path) -> None:
    display = RecordingDisplay()
    names = ("device.gemm", "train.cnn", "slurm.gres")
    config = Config(name="t", checks={name: CheckSettings() for name in names})
    run_dir = RunDir.create(tmp_path / "run", request().model_copy(update={"config": config}))
    results = TrialResults(run_dir, config, display, show_completed_check)
    no_gpu = [
        Measurement(check=name, subject="cluster", error="8 GPUs expected") for name in ("device.gemm", "train.cnn")
    ]
    results.add_not_run([*no_gpu, Measurement(check="slurm.gres", subject="cluster", skipped="no Slurm")])
    errors = (["device.gemm", "train.cnn"], Outcome.ERROR, "8 GPUs expected")
    assert display.not_run == [errors, (["slurm.gres"], Outcome.SKIP, "no Slurm")]
    assert display.count == 0
    assert run_dir.recover().measurements == results.measurements


def test_outcome_is_shown_once_after_all_ranks(tmp_path: Path) -> None:
    config = Config(name="t", checks={"host.inventory": CheckSettings()})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    display = RecordingDisplay()
    results = TrialResults(RunDir.create(tmp_path / "run", request), config, display, show_completed_check)
    job = Job(
        name="nodes",
        placement="nodes",
        device="cpu",
        nodes=3,
        ranks_per_node=1,
        checks=("host.inventory",),
        options={},
        expected_gpus=None,
        limit_s=1,
    )
    results.job_started(job, 1)
    for rank in range(3):
        assert display.count == 0
        results.add_measurement(Measurement(check="host.inventory", subject=f"n{rank}", rank=rank, skipped="no"))
    assert display.count == 1


@pytest.mark.parametrize("retry", [True, False])
def test_outcome_before_a_retry_does_not_say_not_retried(tmp_path: Path, retry: bool) -> None:
    settings = CheckSettings(expect={"busbw.1GiB": Threshold.parse("> 350 GB/s")})
    config = Config(name="t", retry=retry, checks={"collectives.all_reduce": settings})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    values = {"busbw.1GiB": (300, "GB/s"), "wrong_elements": (0, "count"), "sizes_not_allocated": (0, "sizes")}
    measured = tuple(Metric(name=n, value=v, unit=unit, subject="cluster") for n, (v, unit) in values.items())
    display = RecordingDisplay()
    results = TrialResults(RunDir.create(tmp_path / "run", request), config, display, show_completed_check)
    results.job_started(JOB.model_copy(update={"checks": ("collectives.all_reduce",), "ranks_per_node": 1}), 1)
    facts = {"backend": "gloo", "gpu": None, "world_size": 1, "nodes": 1}
    results.add_measurement(
        Measurement(check="collectives.all_reduce", subject="n0/rank0", rank=0, metrics=measured, facts=facts)
    )
    assert display.reason.startswith("busbw.1GiB is 300 GB/s, expected > 350 GB/s")
    assert ("not retried" in display.reason) is not retry


def test_measurement_is_on_disk_before_it_is_judged(tmp_path: Path) -> None:
    config = Config(name="t", checks={"host.inventory": CheckSettings()})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    run_dir = RunDir.create(tmp_path / "run", request)
    on_disk: list[str] = []

    def complete(results: TrialResults, check: str) -> None:
        on_disk.extend(item.check for item in run_dir.recover().measurements)
        raise KeyboardInterrupt

    results = TrialResults(run_dir, config, RecordingDisplay(), complete)
    with pytest.raises(KeyboardInterrupt):
        results.add_measurement(Measurement(check="host.inventory", subject="n0", rank=0))
    assert on_disk == ["host.inventory"]


def test_secrets_in_messages_of_the_scheduler_are_not_recorded(tmp_path: Path) -> None:
    """Kubernetes quotes the arguments of a container that cannot start."""
    config = Config(name="t", env={"API_KEY": "s3cr3t-value"}, checks={"host.inventory": CheckSettings()})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    results = TrialResults(RunDir.create(tmp_path / "run", request), config, SilentDisplay(), show_completed_check)
    message = "RunContainerError: exec: --key s3cr3t-value: not found"
    failure = JobFailure(cause="kubernetes_container", message=message, first_command="kubectl describe pod a")
    results.add_job_result(
        JobResult(
            job="nodes",
            attempt=1,
            launcher="kubernetes",
            state=JobState.FAILED,
            started=0,
            seconds=1,
            startup_s=0,
            cause=message,
            failures=(failure,),
        )
    )
    facts = {JOB_FAILURES: [failure.model_dump(mode="json")]}
    probe = {"check": "kubernetes.pods", "subject": "login", "facts": facts, "error": message}
    results.add_measurement(Measurement.model_validate(probe))
    assert "s3cr3t-value" not in (tmp_path / "run" / "measurements.jsonl").read_text()
    (result,), (measurement,) = results.job_results, results.localization
    assert result.failures[0].message == result.cause == measurement.error
    assert measurement.facts == {JOB_FAILURES: [result.failures[0].model_dump(mode="json")]}


def test_measurements_are_sorted_by_rank(tmp_path: Path) -> None:
    config = Config(name="t", checks={name: CheckSettings() for name in ("train.parity", "train.checkpoint")})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    results = TrialResults(RunDir.create(tmp_path / "run", request), config, RecordingDisplay())
    unsorted = [("train.parity", 1), ("train.parity", 0), ("train.checkpoint", 1), ("train.checkpoint", 0)]
    results.measurements = [Measurement(check=check, subject=f"n0/gpu{rank}", rank=rank) for check, rank in unsorted]
    results.retries = [measurement.model_copy(update={"retry": True}) for measurement in results.measurements[2:]]
    results.sort()
    assert [(measurement.check, measurement.rank) for measurement in results.measurements] == [
        unsorted[1],
        unsorted[0],
        unsorted[3],
        unsorted[2],
    ]
    assert [measurement.rank for measurement in results.retries] == [0, 1]
