"""Records of runs that ended early: interrupted, rejected and pending jobs, lost nodes, cut journals, two sessions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.diagnose import diagnose
from seatrial.diagnose.cause_data import causes
from seatrial.diagnose.causes import Run
from seatrial.model import Job, JobFailure, JobResult, JobState, Measurement, MissingNode, Session, Trial
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import Request, RunDir
from tests.guard import clusters
from tests.guard.changes import only_checks, record

ONE_NODE = "2026-11-27-2xh200/quick"
JOURNAL_CUTS = 50
JOURNAL = "measurements.jsonl"
LATE_CHECKS = ("collectives.all_reduce", "collectives.pairs", "device.gemm")
CHECKS = ("host.inventory", "collectives.transport", *LATE_CHECKS)
REJECTED = "sbatch: error: invalid partition specified: gpux"
PENDING = "job 7 is still pending (Resources): pending 600 s, slurm.queue_s is 600 s"


def shapes() -> Iterator[tuple[str, Trial]]:
    one = record(ONE_NODE)
    yield "interrupted", one.model_copy(update={"stop_reason": "interrupted"})
    last = tuple(one.config["checks"])[-5:]
    yield "interrupted before the last checks", _measured_until(one, last, "interrupted")
    yield "no space left", _measured_until(one, last, "No space left on device: /run/measurements.jsonl")
    yield "not interrupted, without the last checks", _measured_until(one, last, "")
    yield "no usable GPU", one.model_copy(update={"gpu_error": "the driver is not loaded"})
    cluster = only_checks(clusters.healthy("infiniband", 4), CHECKS)
    for name, result in _results(cluster).items():
        failed = _with_failed_job(cluster, result)
        yield name, _diagnosed(failed)
        yield f"{name}, and the run stopped", _diagnosed(failed.model_copy(update={"stop_reason": result.cause}))
        finished = result.model_copy(update={"attempt": 2, "state": JobState.COMPLETED, "failed_subject": ""})
        update = {"results": (result, finished), "sessions": _sessions(result.cause)}
        yield f"{name}, then resumed", _diagnosed(cluster.model_copy(update=update))
    for cause in causes():
        if cause.message:
            failure = JobFailure(
                cause=cause.id, message="message", nodes=("node0001",), first_command="kubectl get pods"
            )
            result = _result(cluster, JobState.FAILED, "pods did not start", failures=(failure,))
            yield f"pods do not start: {cause.id}", _diagnosed(_with_failed_job(cluster, result))
    twice = (*one.measurements, *(each for each in one.measurements if each.check == last[0]))
    yield "a check measured in both sessions", one.model_copy(update={"measurements": twice, "sessions": _sessions("")})
    yield from _cut_journals(one)


def _measured_until(trial: Trial, missing: Sequence[str], stop_reason: str) -> Trial:
    kept = tuple(each for each in trial.measurements if each.check not in missing)
    return trial.model_copy(update={"measurements": kept, "stop_reason": stop_reason})


def _results(trial: Trial) -> dict[str, JobResult]:
    """Ends of the job of ranks."""
    missing = (MissingNode(name="node0003", state="DOWN+NOT_RESPONDING"),)
    return {
        "rejected job": _result(trial, JobState.REJECTED, REJECTED),
        "pending job": _result(trial, JobState.REJECTED, PENDING),
        "time limit of the job": _result(trial, JobState.TIMEOUT, "still running after 600 s, its time limit"),
        "hung job": _result(trial, JobState.HUNG, "no heartbeat for 60 s in collectives.all_reduce", "rank 5"),
        "cancelled job": _result(trial, JobState.CANCELLED, "interrupted"),
        "failed rank": _result(trial, JobState.FAILED, "killed by signal 9 (SIGKILL)", "node0002/gpu1"),
        "refused node": _result(
            trial, JobState.REFUSED, "torch cannot use GPU 3. Run first: nvidia-smi -L", "node0001"
        ),
        "lost node": _result(trial, JobState.FAILED, "node failure", "node0003", missing_nodes=missing),
    }


def _result(
    trial: Trial,
    state: JobState,
    cause: str,
    subject: str = "cluster",
    failures: tuple[JobFailure, ...] = (),
    missing_nodes: tuple[MissingNode, ...] = (),
) -> JobResult:
    return JobResult(
        job=_ranks_job(trial).name,
        attempt=1,
        launcher="slurm",
        state=state,
        started=0.0,
        seconds=60.0,
        startup_s=1.0,
        failed_subject=subject,
        cause=cause,
        nodelist="node[0000-0003]",
        failures=failures,
        missing_nodes=missing_nodes,
    )


def _ranks_job(trial: Trial) -> Job:
    return next(job for job in trial.jobs if job.placement == "ranks")


def _with_failed_job(trial: Trial, result: JobResult) -> Trial:
    """The trial in which a job ended before its last checks.

    They have an ERROR with the cause; if the scheduler rejected the job, they have no measurement.
    """
    kept = tuple(each for each in trial.measurements if each.check not in LATE_CHECKS)
    error = f"{result.failed_subject}: {result.cause}"
    late_checks = () if result.state is JobState.REJECTED else LATE_CHECKS
    errors = tuple(Measurement(check=name, subject=result.failed_subject, error=error) for name in late_checks)
    update = {"measurements": (*kept, *errors), "results": (result,), "missing_nodes": result.missing_nodes}
    return trial.model_copy(update=update)


def _diagnosed(trial: Trial) -> Trial:
    """The trial with the findings that the pipeline records at the end of the run."""
    with tempfile.TemporaryDirectory() as folder:
        findings = diagnose(
            Run(rejudge(trial).verdicts, trial.measurements, catalog()), trial.results, trial.retries, Path(folder)
        )
    return trial.model_copy(update={"findings": findings})


def _sessions(stop_reason: str) -> tuple[Session, ...]:
    first = Session(started=0.0, seconds=1.0, command=(), stop_reason=stop_reason)
    return first, Session(started=2.0, seconds=1.0, command=())


def _cut_journals(trial: Trial) -> Iterator[tuple[str, Trial]]:
    """The trial as recovered from its journal, which a crash cut at the end or in the middle of a line."""
    config = Config.model_validate(trial.config)
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run_dir = RunDir.create(path, request)
        for measurement in trial.measurements:
            run_dir.save(measurement)
        del run_dir  # ends its lock
        lines = (path / JOURNAL).read_bytes().splitlines(keepends=True)
        for cut in range(JOURNAL_CUTS):
            complete, half = divmod(cut * 2 * len(lines) // JOURNAL_CUTS, 2)
            end = lines[complete][: len(lines[complete]) // 2] if half else b""
            (path / JOURNAL).write_bytes(b"".join((lines[0], *lines[1:complete], end)))
            saved = RunDir.reopen(path).recover()
            update = {"measurements": tuple(saved.measurements), "stop_reason": "killed"}
            yield f"journal cut at {complete}{' and a half' if half else ''}", trial.model_copy(update=update)
