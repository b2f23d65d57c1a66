from __future__ import annotations

import pytest
from pydantic import ValidationError

from seatrial.model.job import Job, JobResult, JobState

JOB = Job(
    name="ranks",
    placement="ranks",
    device="cuda",
    nodes=4,
    ranks_per_node=8,
    checks=("device.gemm",),
    options={},
    expected_gpus=8,
    limit_s=60,
)


def test_process_count() -> None:
    assert JOB.process_count == 32


def test_job_round_trip() -> None:
    assert Job.model_validate_json(JOB.model_dump_json()) == JOB


def test_unknown_device_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"device"):
        Job.model_validate({**JOB.model_dump(), "device": "tpu"})


def test_result_without_failure_has_no_failed_subject() -> None:
    result = JobResult(
        job="ranks", attempt=1, launcher="local", state=JobState.COMPLETED, started=0, seconds=1, startup_s=0.5
    )
    assert (result.failed_subject, result.cause) == ("", "")
