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


def test_every_process_of_a_job_is_a_place() -> None:
    assert JOB.process_count == 32


def test_a_job_is_read_as_it_was_written() -> None:
    assert Job.model_validate_json(JOB.model_dump_json()) == JOB


def test_a_job_on_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"device"):
        Job.model_validate({**JOB.model_dump(), "device": "tpu"})


def test_a_result_without_a_culprit_names_none() -> None:
    result = JobResult(
        job="ranks", attempt=1, launcher="local", state=JobState.COMPLETED, started=0, seconds=1, startup_s=0.5
    )
    assert (result.failed_subject, result.cause) == ("", "")
