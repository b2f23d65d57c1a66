"""Known causes why jobs do not start: they are consequences, have consequences, and end with a measurement."""

from __future__ import annotations

from pathlib import Path

from seatrial.checks import catalog
from seatrial.checks.kubernetes import pods
from seatrial.diagnose import diagnose
from seatrial.diagnose.causes import Run
from seatrial.model import CLUSTER, JobFailure, JobResult, JobState, Measurement, Metric, Outcome, Reason, Verdict

JOB_DIR = Path("/nonexistent")


def test_a_resumed_trial_without_errors_has_no_finding() -> None:
    """Its first session could not pull the image; its second one has measured the check."""
    failure = JobFailure(cause="kubernetes_image_missing", message="ErrImagePull", first_command="kubectl get pods")
    refused = result("nodes", 1, "ErrImagePull", (failure,))
    measured = [Measurement(check="host.inventory", subject=node) for node in ("node-a", "node-b")]
    verdicts = [Verdict("host.inventory", node, Outcome.PASS) for node in ("node-a", "node-b")]
    assert diagnose(Run(verdicts, measured, catalog()), [refused, result("nodes", 2)], (), JOB_DIR) == ()


def test_failed_probe_pods_and_jobs_are_one_finding() -> None:
    """kubernetes.pods and both jobs could not pull the image; a fault of another node has its own finding."""
    failure = JobFailure(
        cause="kubernetes_image_missing", name="a/b:1", message="ErrImagePull: x", nodes=("node-a",), first_command="k"
    )
    probe = Measurement(
        check=pods.CHECK.name,
        subject=CLUSTER,
        facts={"job_failures": [failure.model_dump(mode="json")]},
        metrics=(Metric(name="started", value=0, unit="bool", subject="node-a"),),
    )
    error = Measurement(check="host.inventory", subject="rank 0", error="node-a: ErrImagePull: x")
    verdicts = [
        Verdict("kubernetes.pods", "node-a", Outcome.FAIL, "started"),
        Verdict("kubernetes.pods", CLUSTER, Outcome.FAIL, "pods_missing"),
        Verdict("kubernetes.pods", "node-b", Outcome.FAIL, "shm_bytes"),
        Verdict("host.inventory", "rank 0", Outcome.ERROR),
    ]
    found = diagnose(
        Run(verdicts, [probe, error], catalog()), [result("nodes", 1, "ErrImagePull: x", (failure,))], (), JOB_DIR
    )
    finding, other = found
    assert [each.check for each in other.explains] == ["kubernetes.pods"]
    assert (other.cause, other.subject) == ("shm_too_small", "node-b")
    assert (finding.cause, finding.subject) == ("kubernetes_image_missing", "node-a")
    assert {(each.check, each.metric) for each in finding.explains} == {
        ("kubernetes.pods", "started"),
        ("kubernetes.pods", "pods_missing"),
        ("host.inventory", ""),
    }


def test_a_refused_probe_job_is_one_finding_with_its_error() -> None:
    """The error of the check is on the host that runs kubectl; a signature matches it too."""
    message = "the API server refused `kubectl create` (Forbidden): exceeded quota: gpus, requested: count/jobs.batch=1"
    failure = JobFailure(cause="kubernetes_quota", name="gpus", message=message, first_command="k")
    facts = {"job_failures": [failure.model_dump(mode="json")]}
    probe = Measurement(check="kubernetes.pods", subject="login", facts=facts, error=f"KubectlError: {message}")
    verdict = Verdict("kubernetes.pods", "login", Outcome.ERROR, reasons=(Reason.MEASUREMENT_FAILED,))
    (finding,) = diagnose(Run([verdict], [probe], catalog()), (), (), JOB_DIR)
    assert (finding.cause, finding.subject) == ("kubernetes_quota", CLUSTER)
    assert [(each.check, each.subject) for each in finding.explains] == [("kubernetes.pods", "login")]


def test_another_error_of_the_check_keeps_its_own_finding() -> None:
    failure = JobFailure(cause="kubernetes_quota", name="gpus", message="exceeded quota: gpus", first_command="k")
    facts = {"job_failures": [failure.model_dump(mode="json")]}
    probe = Measurement(check="kubernetes.pods", subject="login", facts=facts, error="no result of 1 probe pods")
    verdict = Verdict("kubernetes.pods", "login", Outcome.ERROR, reasons=(Reason.MEASUREMENT_FAILED,))
    assert diagnose(Run([verdict], [probe], catalog()), (), (), JOB_DIR) == ()


def test_a_failure_explains_no_error_of_another_job_whose_text_begins_alike() -> None:
    failure = JobFailure(cause="kubernetes_out_of_memory", message="OOMKilled", nodes=("node-a",), first_command="k")
    results = [result("a", 1, "exit code 1", (failure,)), result("b", 1, "exit code 127")]
    errors = [
        Measurement(check="host.inventory", subject="rank 0", error="rank 3 on node-a: exit code 1"),
        Measurement(check="gpu.inventory", subject="rank 0", error="rank 3 on node-a: exit code 127"),
    ]
    verdicts = [Verdict(each.check, "rank 0", Outcome.ERROR) for each in errors]
    (finding,) = diagnose(Run(verdicts, errors, catalog()), results, (), JOB_DIR)
    assert [each.check for each in finding.explains] == ["host.inventory"]


def test_a_taint_of_a_node_that_is_not_ready_is_its_consequence() -> None:
    failure = JobFailure(cause="kubernetes_taint", name="x", message="untolerated taint {x: }", first_command="k")
    error = Measurement(check="host.inventory", subject="rank 0", error="the queue: untolerated taint {x: }")
    verdicts = [
        Verdict("kubernetes.nodes", "node-b", Outcome.WARN, "ready"),
        Verdict("host.inventory", "rank 0", Outcome.ERROR),
    ]
    pending = result("nodes", 1, "untolerated taint {x: }", (failure,))
    (finding,) = diagnose(Run(verdicts, [error], catalog()), [pending], (), JOB_DIR)
    assert (finding.cause, finding.subject) == ("kubernetes_node_not_ready", "node-b")
    assert {each.check for each in finding.explains} == {"kubernetes.nodes", "host.inventory"}


def result(job: str, number: int, cause: str = "", failures: tuple[JobFailure, ...] = ()) -> JobResult:
    return JobResult(
        job=job,
        attempt=number,
        launcher="kubernetes",
        state=JobState.TIMEOUT if cause else JobState.COMPLETED,
        started=0,
        seconds=1,
        startup_s=0,
        cause=cause,
        failures=failures,
    )
