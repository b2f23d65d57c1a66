from __future__ import annotations

import pytest
from pydantic import ValidationError

from seatrial.model.job import MIN_REQUEST_S, Job, JobResult, JobState

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


def test_requested_time_is_a_multiple_of_the_typical_duration_within_limits() -> None:
    job = JOB.model_copy(
        update={
            "checks": ("a", "b"),
            "limits": {"a": 2000, "b": 100},
            "limit_s": 2280,  # with 180 s for the start
            "typical": {"a": 300, "b": 50},
            "start_s": 8,
        }
    )
    assert job.expected_s == 8 + 300 + 50
    assert job.requested_s == 180 + 4 * 300 + 100, "never more than the limit of a check"
    assert job.with_checks(("b",)).requested_s == 280, "never more than the limit of the job"
    second_attempt = job.model_copy(update={"checks": ("a",)})
    assert second_attempt.requested_s == 180 + 4 * 300
    short = job.model_copy(update={"typical": {"a": 1, "b": 1}})
    assert short.requested_s == MIN_REQUEST_S
    unknown = job.model_copy(update={"typical": {}})
    assert (unknown.expected_s, unknown.requested_s) == (8 + 2100, 2280)


def test_unknown_device_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"device"):
        Job.model_validate({**JOB.model_dump(), "device": "tpu"})


RESULT = JobResult(
    job="ranks", attempt=1, launcher="local", state=JobState.COMPLETED, started=0, seconds=1, startup_s=0.5
)


def test_result_without_failure_has_no_failed_subject() -> None:
    assert (RESULT.failed_subject, RESULT.cause) == ("", "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"retry": 3},
        {"retry": True},
        {"nodes": True},
        {"nodes": "4"},
        {"limits": {"device.gemm": -1}},
        {"limit_s": "60"},
    ],
)
def test_numbers_of_a_job_are_in_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Job.model_validate({**JOB.model_dump(), **wrong})


@pytest.mark.parametrize("wrong", [{"seconds": -1}, {"seconds": True}, {"startup_s": float("nan")}, {"attempt": "1"}])
def test_numbers_of_a_job_result_are_in_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        JobResult.model_validate({**RESULT.model_dump(), **wrong})
